"""GLM-4 of both types: pairs of neighbours rotate, and gate and up are one linear.

The first 9B models (`glm`) have the norms of a Llama, later ones also norms after.
"""

from typing import Annotated, Any, ClassVar

from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Family, ModelConfig, PartialRope, Rope
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.families.phi import PartialRotary, read_partial_rope
from jaxlora.models.hf_config import (
    Count,
    Flag,
    HeadDim,
    Heads,
    HfConfig,
    Share,
    YarnRope,
    number,
    only,
)
from jaxlora.models.layer import DecoderLayer

_UNDIVIDED = "fused linears cannot be cut into equal parts"


class _PartialYarn(YarnRope):
    partial_rotary_factor: Share = 1.0

    def build(self) -> Rope:
        share = self.partial_rotary_factor
        return PartialRope(theta=self.rope_theta, share=share, scaling=self.scaling())


class GlmLayer(LlamaLayer):
    """`h += attention(norm(h)); h += mlp(norm(h))`."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(config, make, neighbours=True)

    def make_mlp(self, config: ModelConfig, make: LayerBuilder) -> Mlp:
        return Mlp(config, make, fused=True)


class Glm4Layer(DecoderLayer):
    """`h += norm(attention(norm(h))); h += norm(mlp(norm(h)))`."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        self.self_attn = Attention(config, make, neighbours=True)
        self.attention_output_norm = make.norm("post_self_attn_layernorm")
        self.mlp_norm = make.norm("post_attention_layernorm")
        self.mlp = Mlp(config, make, fused=True)
        self.mlp_output_norm = make.norm("post_mlp_layernorm")


class Glm(HfConfig):
    """The config.json of a GLM-4 9B of the first ones."""

    FAMILY: ClassVar[Family] = Family(
        model_type="glm",
        models="GLM-4-9B-Chat",
        layer=GlmLayer,
        undivided=_UNDIVIDED,
    )

    max_position_embeddings: Count = 131072
    num_key_value_heads: Heads | None = 2
    head_dim: HeadDim | None = 128
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1.5625e-7
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = True
    partial_rotary_factor: Share | None = 0.5

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(qkv_bias=self.attention_bias, **fields)

    def ropes(self) -> tuple[Rope, None]:
        kinds = {"default": PartialRotary, "yarn": _PartialYarn}
        return read_partial_rope(self, {}, kinds), None


class Glm4(Glm):
    """The config.json of a GLM-4 of April 2025 (0414) or later."""

    FAMILY: ClassVar[Family] = Family(
        model_type="glm4", models="GLM-4", layer=Glm4Layer, undivided=_UNDIVIDED
    )
