"""Dense Qwen3.5 and Qwen3.6: the text models, mostly of gated delta nets."""

import dataclasses
from collections.abc import Hashable
from typing import Annotated, Any, ClassVar, Self

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.blocks.attention import Attention
from jaxlora.models.blocks.delta_net import DeltaNet
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import Composite, DeltaShape, Family, ModelConfig, Rope
from jaxlora.models.families.mixture import experts_or_mlp
from jaxlora.models.families.phi import PartialRotary, read_partial_rope
from jaxlora.models.hf_config import (
    FULL,
    Count,
    Flag,
    HeadDim,
    Heads,
    HfConfig,
    Share,
    Windows,
    count,
    only,
)
from jaxlora.models.layer import DecoderLayer

LINEAR = "linear_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Model(ModelConfig):
    """The mathematics of the text model of a Qwen3.5 or Qwen3.6.

    Attributes:
        delta: Sizes of its gated delta nets.
        is_linear: Whether each layer has one in the place of attention.
    """

    LAYERWISE: ClassVar[tuple[str, ...]] = (*ModelConfig.LAYERWISE, "is_linear")

    delta: DeltaShape
    is_linear: tuple[bool, ...]

    def layer_kind(self, layer: int) -> Hashable:
        return self.is_linear[layer]

    def delta_shape(self, layer: int) -> DeltaShape | None:
        return self.delta if self.is_linear[layer] else None

    def divided(self, tensor: int) -> Self:
        part = super().divided(tensor)
        return dataclasses.replace(part, delta=self.delta.divided(tensor))


class Qwen35Layer(DecoderLayer):
    """A gated delta net or attention with an output gate; and an MLP or experts."""

    delta_net: ClassVar[type[DeltaNet]] = DeltaNet

    def __init__(self, config: Qwen35Model, make: LayerBuilder):
        super().__init__(make)
        self.attention_norm = make.norm("input_layernorm")
        if config.is_linear[make.number]:
            self.linear_attn = self.delta_net(config, make, config.delta)
        else:
            self.self_attn = Attention(config, make, norms="head", gated=True)
        self.mlp_norm = make.norm("post_attention_layernorm")
        self.mlp = experts_or_mlp(config, make)

    @property
    def mixer(self) -> Attention | DeltaNet:
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn


class _Rope(PartialRotary):
    """Positions of a text agree in all sections, which are of images."""

    mrope_section: Any = None
    mrope_interleaved: Any = None


class Qwen35(HfConfig):
    """The config.json of the text model of a Qwen3.5 or Qwen3.6."""

    FAMILY: ClassVar[Family] = Family(
        model_type="qwen3_5_text",
        models="text models of Qwen3.5, Qwen3.6",
        layer=Qwen35Layer,
        norm_offset=True,
        others=("mtp.",),
    )
    MODEL: ClassVar[type[ModelConfig]] = Qwen35Model
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            # The state is in float32, and the gate of the norm a SiLU, in any case.
            "mamba_ssm_dtype",
            "output_gate_type",
        }
    )

    max_position_embeddings: Count = 32768
    num_key_value_heads: Heads | None = 4
    head_dim: HeadDim | None = 256
    hidden_act: Annotated[Any, only("silu")] = "silu"
    attention_bias: Flag = False
    attn_output_gate: Annotated[Any, only(True)] = True
    partial_rotary_factor: Share | None = None
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Annotated[int, count(2**6)] = 4
    linear_key_head_dim: HeadDim = 128
    linear_value_head_dim: HeadDim = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32

    def build(self, **fields: Any) -> ModelConfig:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ModelError(
                f"config.json has linear_num_value_heads={values}, not a multiple of "
                f"linear_num_key_heads={keys}."
            )
        delta = DeltaShape(
            num_key_heads=keys,
            num_value_heads=values,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )
        bias = self.attention_bias
        return super().build(
            delta=delta,
            is_linear=self.is_linear(),
            qkv_bias=bias,
            o_bias=bias,
            **fields,
        )

    def is_linear(self) -> tuple[bool, ...]:
        """Returns whether each layer has a gated delta net."""
        number, kinds = self.num_hidden_layers, self.layer_types
        if kinds is None:
            numbers = range(1, number + 1)
            return tuple(i % self.full_attention_interval != 0 for i in numbers)
        fits = isinstance(kinds, list) and len(kinds) == number
        if not fits or any(kind not in (FULL, LINEAR) for kind in kinds):
            raise ModelError(
                f"config.json has layer_types={shown(kinds)}; wanted {FULL} or "
                f"{LINEAR} for each of the {number} layers."
            )
        return tuple(kind == LINEAR for kind in kinds)

    def ropes(self) -> tuple[Rope, None]:
        own = {"partial_rotary_factor": self.partial_rotary_factor or 0.25}
        return read_partial_rope(self, own, {"default": _Rope}), None

    def layer_windows(self) -> Windows:
        return (None,) * self.num_hidden_layers


QWEN3_5 = Composite(
    model_type="qwen3_5",
    models="Qwen3.5, Qwen3.6",
    texts=(Qwen35.FAMILY.model_type,),
    keys=frozenset(
        {
            "image_token_id",
            "language_model_only",
            "video_token_id",
            "vision_config",
            "vision_end_token_id",
            "vision_start_token_id",
        }
    ),
    prefix="model.language_model.",
    starts=(("model.language_model.", "model."),),
    others=("model.visual.",),
)
