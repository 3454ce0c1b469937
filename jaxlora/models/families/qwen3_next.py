"""Qwen3-Next, and Qwen3.5 and Qwen3.6 with experts: gated delta nets and experts."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated, Any, ClassVar

from jaxlora.models.blocks.delta_net import DeltaNet, FusedDeltaNet
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.mixture import (
    Features,
    MixtureModel,
    NumExperts,
)
from jaxlora.models.families.qwen3_5 import QWEN3_5, Qwen35, Qwen35Layer, Qwen35Model
from jaxlora.models.families.qwen_moe import SharedMoe
from jaxlora.models.hf_config import Flag, Heads, InnerWidth, only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextModel(Qwen35Model, MixtureModel):
    """The mathematics of a model with gated delta nets and experts."""

    LAYERWISE: ClassVar[tuple[str, ...]] = (*Qwen35Model.LAYERWISE, "has_experts")

    def layer_kind(self, layer: int) -> Hashable:
        return self.is_linear[layer], self.has_experts[layer]


class Qwen3NextLayer(Qwen35Layer):
    """A layer whose gated delta net has fused linears."""

    delta_net: ClassVar[type[DeltaNet]] = FusedDeltaNet


class Qwen3Next(Qwen35, SharedMoe):
    """The config.json of a Qwen3-Next, of which one expert is shared."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen3_next",
        models="Qwen3-Next",
        layer=Qwen3NextLayer,
        norm_offset=True,
        others=("mtp.",),
    )
    MODEL: ClassVar[type[ModelConfig]] = Qwen3NextModel
    IGNORED: ClassVar[frozenset[str]] = Qwen35.IGNORED | SharedMoe.IGNORED

    num_key_value_heads: Heads | None = 2
    num_experts: NumExperts = 512
    num_experts_per_tok: NumExperts = 10
    norm_topk_prob: Flag = True
    moe_intermediate_size: Features = 512
    shared_expert_intermediate_size: Features = 512


class Qwen35Moe(Qwen3Next):
    """The config.json of the text model of a Qwen3.5 or Qwen3.6 with experts."""

    FAMILY: ClassVar[Family] = dataclasses.replace(
        Qwen3Next.FAMILY,
        model_type="qwen3_5_moe_text",
        models="text models of Qwen3.5, Qwen3.6 with experts",
        layer=Qwen35Layer,
    )

    # No layer has an MLP, whose width this would be.
    intermediate_size: InnerWidth = 512
    num_experts: NumExperts = 256
    num_experts_per_tok: NumExperts = 8
    norm_topk_prob: Annotated[Any, only(True)] = True
    decoder_sparse_step: Annotated[Any, only(1)] = 1
    mlp_only_layers: Annotated[Any, only([])] | None = None


QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    models="Qwen3.5, Qwen3.6 with experts",
    texts=(Qwen35Moe.FAMILY.model_type,),
)
