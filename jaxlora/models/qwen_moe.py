"""Qwen3 with experts."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated, Any, ClassVar

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.blocks.experts import Experts
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, Family, ModelConfig
from jaxlora.models.hf_config import Count, Flag, Heads, HfConfig, Windows, count, only
from jaxlora.models.llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeModel(ModelConfig):
    """The mathematics of a Qwen3 with experts.

    Attributes:
        experts: The experts of a layer that has them.
        has_experts: Whether each layer has experts in the place of an MLP.
    """

    LAYERWISE: ClassVar[tuple[str, ...]] = (*ModelConfig.LAYERWISE, "has_experts")

    experts: ExpertShape
    has_experts: tuple[bool, ...]

    def layer_kind(self, layer: int) -> Hashable:
        return self.has_experts[layer]

    def expert_shape(self, layer: int) -> ExpertShape | None:
        return self.experts if self.has_experts[layer] else None


class Qwen3MoeLayer(LlamaLayer):
    """A layer with experts or an MLP, which normalizes each head."""

    def __init__(self, config: Qwen3MoeModel, make: LayerBuilder):
        super().__init__(config, make, norms="head")

    def make_mlp(self, config: Qwen3MoeModel, make: LayerBuilder) -> Experts | Mlp:
        shape = config.expert_shape(make.number)
        return Mlp(config, make) if shape is None else Experts(config, make, shape)


class Qwen3Moe(HfConfig):
    """The config.json of a Qwen3 with experts."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen3_moe",
        models="Qwen3 with experts",
        layer=Qwen3MoeLayer,
        undivided="its experts are whole on each device",
    )
    MODEL: ClassVar[type[ModelConfig]] = Qwen3MoeModel
    IGNORED: ClassVar[frozenset[str]] = frozenset({"router_aux_loss_coef"})

    max_position_embeddings: Count = 32768
    num_key_value_heads: Heads | None = 4
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False
    sliding_window: Count | None = 4096
    use_sliding_window: Flag = False
    num_experts: Annotated[int, count(2**12)] = 128
    num_local_experts: Annotated[int, count(2**12)] | None = None  # transformers 5
    num_experts_per_tok: Annotated[int, count(2**12)] = 8
    moe_intermediate_size: Annotated[int, count(2**20)] = 768
    norm_topk_prob: Flag = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: Any = None
    output_router_logits: Annotated[Any, only(False)] = False

    def build(self, **fields: Any) -> ModelConfig:
        number = self.num_local_experts or self.num_experts
        if self.num_experts_per_tok > number:
            raise ModelError(
                f"config.json has num_experts_per_tok={self.num_experts_per_tok}, more "
                f"than its {number} experts."
            )
        return super().build(
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            experts=ExpertShape(
                number=number,
                chosen=self.num_experts_per_tok,
                features=self.moe_intermediate_size,
                normalizes=self.norm_topk_prob,
            ),
            has_experts=self.has_experts(),
            **fields,
        )

    def has_experts(self) -> tuple[bool, ...]:
        """Returns whether each layer has experts."""
        dense, layers = self.mlp_only_layers or [], range(self.num_hidden_layers)
        if not isinstance(dense, list) or any(i not in layers for i in dense):
            raise ModelError(
                f"config.json has mlp_only_layers={shown(dense)}; wanted a list of "
                f"numbers of the {len(layers)} layers."
            )
        step = self.decoder_sparse_step
        return tuple(i not in dense and (i + 1) % step == 0 for i in layers)

    def layer_windows(self) -> Windows:
        window = self.sliding_window if self.use_sliding_window else None
        return self.typed_windows(window, [True] * self.num_hidden_layers)
