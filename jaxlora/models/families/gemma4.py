"""Gemma 4, of which the text of dense models and of those with experts is read."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, ClassVar, Self

import jax.numpy as jnp
import pydantic
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.blocks.experts import ExpertLinears, choose_experts
from jaxlora.models.blocks.mlp import geglu
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import (
    Composite,
    ExpertShape,
    Family,
    ModelConfig,
    ProportionalScaling,
    Rope,
)
from jaxlora.models.families.gemma import Gemma2Layer, Scale
from jaxlora.models.families.mixture import Features, NumExperts
from jaxlora.models.hf_config import (
    FULL,
    ROPES,
    SLIDING,
    Count,
    DefaultRope,
    Flag,
    HeadDim,
    Heads,
    HfConfig,
    Share,
    Windows,
    only,
    validated,
)
from jaxlora.modules.norm import rms_norm
from jaxlora.modules.rows import Rows

_UNDIVIDED = "its experts are whole on each device"
_SMALL = "such as gemma-4-E2B and gemma-4-E4B"
_REFUSED = {
    "hidden_size_per_layer_input": f"embeddings for each layer, {_SMALL}",
    "num_kv_shared_layers": f"layers that share keys and values, {_SMALL}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Model(ModelConfig):
    """The mathematics of the text of a Gemma 4.

    Attributes:
        full_head_dim: Features of a head in layers without a window.
        full_kv_heads: Key and value heads of these layers.
        shares_kv: Whether their keys are their values, too, but for norm and rotation.
    """

    full_head_dim: int
    full_kv_heads: int
    shares_kv: bool

    def at_layer(self, layer: int) -> Self:
        if self.layer_windows[layer] is not None:
            return self
        heads = {"head_dim": self.full_head_dim, "num_kv_heads": self.full_kv_heads}
        return dataclasses.replace(self, **heads)

    def divided(self, tensor: int) -> Self:
        number = max(1, self.full_kv_heads // tensor)
        return dataclasses.replace(super().divided(tensor), full_kv_heads=number)

    def layer_kind(self, layer: int) -> Hashable:
        return FULL if self.layer_windows[layer] is None else SLIDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4ExpertsModel(Gemma4Model):
    """The mathematics of the text of a Gemma 4 with experts.

    Attributes:
        experts: The experts beside the MLP of each layer.
    """

    experts: ExpertShape

    def expert_shape(self, layer: int) -> ExpertShape:
        del layer
        return self.experts


class Gemma4Layer(Gemma2Layer):
    """Attention whose values are normalized, too; the output has a frozen factor."""

    def __init__(self, config: Gemma4Model, make: LayerBuilder):
        is_full = config.layer_windows[make.number] is None
        shares_kv = is_full and config.shares_kv
        super().__init__(
            config, make, norms="head", norms_values=True, shares_kv=shares_kv
        )
        self.layer_scalar = make.weight((1,), "layer_scalar", ("ONE",))

    def feed_forward(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        """Applies the second half of the layer."""
        return super().feed_forward(h, rows) * self.layer_scalar[...]


class Gemma4Router(nnx.Module):
    """Chooses the experts of each row, by what is left of it after a norm."""

    def __init__(self, config: Gemma4Model, make: LayerBuilder, shape: ExpertShape):
        d, x = config.hidden_size, shape.number
        self.shape, self.eps = shape, config.rms_eps
        self.proj = make.weight(
            (d, x), "router.proj.weight", ("D", "X"), transpose=True
        )
        self.scale = make.weight((d,), "router.scale", ("D",))
        self.per_expert_scale = make.weight((x,), "router.per_expert_scale", ("X",))

    def __call__(
        self, h: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T C"], Int[Array, "T C"]]:
        """Returns the weights and the numbers of the experts of each row."""
        normed = rms_norm(h, jnp.ones(h.shape[1], h.dtype), self.eps)
        x = normed * self.scale[...] * h.shape[1] ** -0.5
        logits = jnp.matmul(x, self.proj[...], preferred_element_type=jnp.float32)
        weights, chosen = choose_experts(logits, self.shape)
        return weights * self.per_expert_scale[...][chosen], chosen


class Gemma4ExpertsLayer(Gemma4Layer):
    """A layer with experts beside the MLP; both and the router read the same rows."""

    def __init__(self, config: Gemma4ExpertsModel, make: LayerBuilder):
        super().__init__(config, make)
        self.dense_output_norm = make.norm("post_feedforward_layernorm_1")
        self.router = Gemma4Router(config, make, config.experts)
        self.experts_norm = make.norm("pre_feedforward_layernorm_2")
        self.experts = ExpertLinears(
            config, make, config.experts, name="experts", activation=geglu
        )
        self.experts_output_norm = make.norm("post_feedforward_layernorm_2")

    def feed_forward(self, h: Float[Array, "T D"], rows: Rows) -> Float[Array, "T D"]:
        """Applies the second half of the layer."""
        h, x = self._input(self.mlp_norm, h, self.mlp.input_linears, rows.routing)
        dense = self.dense_output_norm(self.mlp(x, rows))
        chosen = self.experts(self.experts_norm(h), *self.router(h), rows.routing)
        y, after = dense + self.experts_output_norm(chosen), self.mlp_output_norm
        assert after is not None
        return (h + after(y)) * self.layer_scalar[...]


class _Heads(pydantic.BaseModel):
    head_dim: HeadDim
    num_key_value_heads: Heads


class _ProportionalRope(DefaultRope):
    partial_rotary_factor: Share = 1.0

    def build(self) -> Rope:
        scaling = ProportionalScaling(share=self.partial_rotary_factor)
        return Rope(theta=self.rope_theta, scaling=scaling)


class Gemma4(HfConfig):
    """The config.json of the text of a Gemma 4.

    Keys of layers that share keys and values, and of embeddings for each layer are
    read, so that models with them are refused by name.
    """

    FAMILY: ClassVar[Family] = Family(
        model_type="gemma4_text",
        models="text models of Gemma 4",
        layer=Gemma4Layer,
        scales_embedding=True,
    )
    MODEL: ClassVar[type[ModelConfig]] = Gemma4Model
    # The activation is `hidden_activation`, and the other keys belong to what is
    # refused.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "hidden_act",
            "use_double_wide_mlp",
            "vocab_size_per_layer_input",
        }
    )

    max_position_embeddings: Count = 131072
    num_key_value_heads: Heads | None = 4
    head_dim: HeadDim | None = 256
    global_head_dim: HeadDim = 512
    num_global_key_value_heads: Heads | None = None
    per_layer_config: Any = None
    attention_k_eq_v: Flag = False
    attention_bias: Flag = False
    tie_word_embeddings: Flag = True
    hidden_activation: Annotated[Any, only("gelu_pytorch_tanh")] = "gelu_pytorch_tanh"
    sliding_window: Count = 512
    final_logit_softcapping: Scale | None = None
    # With "vision", tokens of images alone see those after them.
    use_bidirectional_attention: Annotated[Any, only("vision")] | None = None
    hidden_size_per_layer_input: Any = 256
    num_kv_shared_layers: Any = 0
    enable_moe_block: Flag = False
    num_experts: Any = None
    top_k_experts: Any = None
    moe_intermediate_size: Any = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        if cls is Gemma4 and config.get("enable_moe_block"):
            return Gemma4Experts.read(config)
        return super().read(config)

    def build(self, **fields: Any) -> ModelConfig:
        for key, what in _REFUSED.items():
            if value := getattr(self, key):
                raise ModelError(
                    f"config.json has {key}={shown(value)}: Gemma 4 models with "
                    f"{what}, are not supported. Others are, such as gemma-4-31B and "
                    "gemma-4-26B-A4B."
                )
        full = self._full_heads()
        if full.head_dim % 2 or self.num_attention_heads % full.num_key_value_heads:
            raise ModelError(
                f"config.json has {full.num_key_value_heads} key-value heads of "
                f"{full.head_dim} features in full_attention layers; wanted a divisor "
                f"of num_attention_heads={self.num_attention_heads}, and an even "
                "number."
            )
        return super().build(
            full_head_dim=full.head_dim,
            full_kv_heads=full.num_key_value_heads,
            shares_kv=self.attention_k_eq_v,
            score_scale=1.0,
            logit_softcap=self.final_logit_softcapping,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            **fields,
        )

    def _full_heads(self) -> _Heads:
        """Returns the heads of layers without a window.

        Since version 5.24, transformers writes them for each such layer.
        """
        own = self.num_global_key_value_heads if self.attention_k_eq_v else None
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if (given := self.per_layer_config) is None:
            sizes = self.global_head_dim, own or kv_heads
            return _Heads(head_dim=sizes[0], num_key_value_heads=sizes[1])
        full = [str(i) for i, w in enumerate(self.layer_windows()) if w is None]
        sizes = {"head_dim": self.features_of_head(), "num_key_value_heads": kv_heads}
        one = given.get(full[0]) if isinstance(given, Mapping) else None
        is_map = isinstance(one, Mapping) and one.keys() <= sizes.keys()
        if not is_map or given != dict.fromkeys(full, one):
            raise ModelError(
                f"config.json has per_layer_config={shown(given)}; wanted the same "
                "head_dim and num_key_value_heads for each full_attention layer, and "
                "no other layer."
            )
        return validated(_Heads, {**sizes, **one})

    def ropes(self) -> tuple[Rope, Rope]:
        if not self.rope_parameters:
            quarter = ProportionalScaling(share=0.25)
            return Rope(theta=1e6, scaling=quarter), Rope(theta=1e4)
        kinds = {**ROPES, "proportional": _ProportionalRope}
        return self.ropes_by_type(1e6, 1e4, kinds)

    def layer_windows(self) -> Windows:
        number = self.num_hidden_layers
        has_window = [i % 6 != 0 and i < number for i in range(1, number + 1)]
        windows = self.typed_windows(self.sliding_window, has_window, may_differ=True)
        if windows[-1] is not None:
            raise ModelError(
                f"config.json has layer_types={shown(self.layer_types)}; the last "
                "layer of a Gemma 4 must be full_attention, which transformers makes "
                "it in any case. Correct layer_types."
            )
        return windows


class Gemma4Experts(Gemma4):
    """The same with experts."""

    FAMILY: ClassVar[Family] = dataclasses.replace(
        Gemma4.FAMILY, layer=Gemma4ExpertsLayer, undivided=_UNDIVIDED
    )
    MODEL: ClassVar[type[ModelConfig]] = Gemma4ExpertsModel

    num_experts: NumExperts
    top_k_experts: NumExperts
    moe_intermediate_size: Features

    def build(self, **fields: Any) -> ModelConfig:
        if self.top_k_experts > self.num_experts:
            raise ModelError(
                f"config.json has top_k_experts={self.top_k_experts}, more than its "
                f"{self.num_experts} experts."
            )
        shape = ExpertShape(
            number=self.num_experts,
            chosen=self.top_k_experts,
            features=self.moe_intermediate_size,
            normalizes=True,
            rounds=False,
            shared_features=self.intermediate_size,
        )
        return super().build(experts=shape, **fields)


GEMMA4 = Composite(
    model_type="gemma4",
    models="Gemma 4",
    texts=(Gemma4.FAMILY.model_type,),
    keys=frozenset(
        {
            "audio_config",
            "audio_token_id",
            "boa_token_id",
            "boi_token_id",
            "eoa_token_id",
            "eoa_token_index",
            "eoi_token_id",
            "eos_token_id",
            "image_token_id",
            "video_token_id",
            "vision_config",
            "vision_soft_tokens_per_image",
        }
    ),
    prefix="model.language_model.",
    starts=(("model.language_model.", "model."),),
    others=(
        "model.audio_tower.",
        "model.embed_audio.",
        "model.embed_vision.",
        "model.vision_tower.",
    ),
)
