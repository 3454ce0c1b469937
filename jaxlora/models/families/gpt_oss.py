"""gpt-oss, a mixture of experts with biases, and sinks in its attention."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.experts import Experts
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import ExpertShape, Family, ModelConfig, Rope
from jaxlora.models.families.mixture import (
    Mixture,
    MixtureModel,
    NumExperts,
)
from jaxlora.models.hf_config import (
    Count,
    Factor,
    Flag,
    HeadDim,
    Heads,
    InnerWidth,
    Layers,
    Theta,
    VocabSize,
    Width,
    Windows,
    number,
    read_rope,
)
from jaxlora.models.layer import DecoderLayer

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssModel(MixtureModel):
    """The mathematics of a gpt-oss.

    Attributes:
        gate_slope: Factor of the gate inside its sigmoid.
        gate_limit: The most that the gate can be, and the magnitude of up.
    """

    gate_slope: float
    gate_limit: float


class GptOssLayer(DecoderLayer):
    """Attention with sinks, and experts."""

    def __init__(self, config: GptOssModel, make: LayerBuilder):
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        self.self_attn = Attention(config, make, has_sinks=True)
        self.mlp_norm = make.norm("post_attention_layernorm")
        limits = {"slope": config.gate_slope, "limit": config.gate_limit}
        self.mlp = Experts(
            config,
            make,
            config.experts,
            router="mlp.router",
            activation=functools.partial(clamped_gate, **limits),
            fused=True,
        )


def clamped_gate(
    gate_up: Float[Array, "T FF"], *, slope: float, limit: float
) -> Float[Array, "T F"]:
    """`(up + 1) * gate * sigmoid(slope * gate)`, in float32, rounded once.

    Each feature of the gate has that of up beside it. The gate is at most `limit`
    before, and the magnitude of up is. The backward pass keeps the two and no more.
    """

    @jax.checkpoint
    def run(gate_up):
        wide = gate_up.astype(jnp.float32)
        gate, up = wide[:, 0::2], wide[:, 1::2]
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
        return ((up + 1) * gate * jax.nn.sigmoid(slope * gate)).astype(gate_up.dtype)

    return run(gate_up)


class GptOss(Mixture):
    """The config.json of a gpt-oss.

    The weights of the experts of a row are the softmax of the logits of those that it
    has chosen. That is the softmax of all logits, divided by the sum of the chosen.
    """

    FAMILY: ClassVar[Family] = Family(
        model_type="gpt_oss",
        models="gpt-oss",
        layer=GptOssLayer,
        has_fused_experts=True,
    )
    MODEL: ClassVar[type[ModelConfig]] = GptOssModel
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"experts_per_token", "initial_context_length", *Mixture.IGNORED}
    )

    vocab_size: VocabSize = 201088
    hidden_size: Width = 2880
    intermediate_size: InnerWidth = 2880
    num_hidden_layers: Layers = 36
    num_attention_heads: Heads = 64
    num_key_value_heads: Heads | None = 8
    head_dim: HeadDim | None = 64
    max_position_embeddings: Count = 131072
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    rope_theta: Theta | None = 150000.0
    sliding_window: Count | None = 128
    attention_bias: Flag = True
    num_experts: NumExperts = 128
    num_experts_per_tok: NumExperts = 4
    swiglu_alpha: Factor = 1.702
    swiglu_limit: Factor = 7.0

    def build(self, **fields: Any) -> ModelConfig:
        return super().build(
            gate_slope=self.swiglu_alpha,
            gate_limit=self.swiglu_limit,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            mlp_bias=True,
            **fields,
        )

    def expert_shape(self) -> ExpertShape:
        return dataclasses.replace(super().expert_shape(), normalizes=True)

    def ropes(self) -> tuple[Rope, Rope | None]:
        if self.rope_parameters or self.rope_scaling:
            return super().ropes()
        return read_rope({"rope_theta": self.rope_theta or 150000.0, **_ROPE}), None

    def layer_windows(self) -> Windows:
        has_window = [i % 2 == 0 for i in range(self.num_hidden_layers)]
        return self.typed_windows(self.sliding_window, has_window, may_differ=True)
