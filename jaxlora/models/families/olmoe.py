"""OLMoE, an OLMo with experts, whose norms come before attention and experts."""

from typing import Annotated, Any, ClassVar

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig
from jaxlora.models.families.mixture import (
    Mixture,
    MixtureLayer,
    MixtureModel,
    NumExperts,
)
from jaxlora.models.hf_config import Count, Flag, number, only


class OlmoeLayer(MixtureLayer):
    """A layer that normalizes queries and keys over all heads."""

    def __init__(self, config: MixtureModel, make: LayerBuilder):
        super().__init__(config, make, norms="all")


class Olmoe(Mixture):
    """The config.json of an OLMoE."""

    FAMILY: ClassVar[Family] = Family(
        model_type="olmoe",
        models="OLMoE",
        layer=OlmoeLayer,
        undivided="the norms of queries and keys run over all heads",
    )

    max_position_embeddings: Count = 4096
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    attention_bias: Flag = False
    clip_qkv: Annotated[Any, only(None)] = None
    num_experts: NumExperts = 64
    num_experts_per_tok: NumExperts = 8

    def build(self, **fields: Any) -> ModelConfig:
        bias = self.attention_bias
        return super().build(qkv_bias=bias, o_bias=bias, **fields)
