"""The parts that families with a mixture of experts share."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated, Any, ClassVar, Self

from jaxlora.errors import ModelError
from jaxlora.models.blocks.experts import Experts
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, ModelConfig
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import Flag, HfConfig, count, only

NumExperts = Annotated[int, count(2**12)]
Features = Annotated[int, count(2**20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureModel(ModelConfig):
    """The mathematics of a model with experts.

    Attributes:
        experts: The experts of a layer that has them.
        has_experts: Whether each layer has experts in the place of an MLP.
    """

    LAYERWISE: ClassVar[tuple[str, ...]] = (*ModelConfig.LAYERWISE, "has_experts")

    experts: ExpertShape
    has_experts: tuple[bool, ...]

    def divided(self, tensor: int) -> Self:
        part = super().divided(tensor)
        return dataclasses.replace(part, experts=self.experts.divided(tensor))

    def layer_kind(self, layer: int) -> Hashable:
        return self.has_experts[layer]

    def expert_shape(self, layer: int) -> ExpertShape | None:
        return self.experts if self.has_experts[layer] else None


def experts_or_mlp(config: ModelConfig, make: LayerBuilder) -> Experts | Mlp:
    """Makes the experts of a layer, or its MLP where it has none."""
    shape = config.expert_shape(make.number)
    return Mlp(config, make) if shape is None else Experts(config, make, shape)


class MixtureLayer(LlamaLayer):
    """A layer with experts or an MLP."""

    def make_mlp(self, config: MixtureModel, make: LayerBuilder) -> Experts | Mlp:
        return experts_or_mlp(config, make)


class Mixture(HfConfig):
    """The keys of a config.json with experts.

    The loss that balances the experts' loads is a mean over all rows of a batch, which
    would tie jobs together. Here the router is frozen, and there is no such loss.
    """

    MODEL: ClassVar[type[ModelConfig]] = MixtureModel
    IGNORED: ClassVar[frozenset[str]] = frozenset({"router_aux_loss_coef"})

    hidden_act: Annotated[Any, only("silu")] = "silu"
    num_experts: NumExperts
    num_local_experts: NumExperts | None = None  # its other name
    num_experts_per_tok: NumExperts
    norm_topk_prob: Flag = False
    output_router_logits: Annotated[Any, only(False)] = False

    def build(self, **fields: Any) -> ModelConfig:
        shape = self.expert_shape()
        if shape.chosen > shape.number:
            raise ModelError(
                f"config.json has num_experts_per_tok={shape.chosen}, more than its "
                f"{shape.number} experts."
            )
        has_experts = self.has_experts()
        return super().build(experts=shape, has_experts=has_experts, **fields)

    def expert_shape(self) -> ExpertShape:
        """Returns the experts of a layer that has them."""
        return ExpertShape(
            number=self.num_local_experts or self.num_experts,
            chosen=self.num_experts_per_tok,
            features=self.intermediate_size,
            normalizes=self.norm_topk_prob,
        )

    def has_experts(self) -> tuple[bool, ...]:
        """Returns whether each layer has experts."""
        return (True,) * self.num_hidden_layers
