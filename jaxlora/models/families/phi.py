"""Phi-3 and Phi-4-mini, with fused linears and features that do not rotate."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from jaxlora.errors import ModelError
from jaxlora.models.blocks.mlp import Mlp
from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import (
    Family,
    LongRopeScaling,
    ModelConfig,
    PartialRope,
    Rope,
)
from jaxlora.models.families.llama import LlamaLayer
from jaxlora.models.hf_config import (
    Count,
    DefaultRope,
    HfConfig,
    Share,
    Windows,
    number,
    only,
    read_rope,
)


def _factors(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or any(
        not isinstance(x, int | float) or not 0 < x <= 1e6 for x in value
    ):
        raise ValueError("wanted a list of numbers above 0.")
    return tuple(map(float, value))


Factors = Annotated[tuple[float, ...], BeforeValidator(_factors)]


class PartialRotary(DefaultRope):
    """The keys of rotary positions of some of the features."""

    partial_rotary_factor: Share = 1.0

    def build(self) -> Rope:
        return PartialRope(theta=self.rope_theta, share=self.partial_rotary_factor)


class _LongRope(PartialRotary):
    short_factor: Factors
    long_factor: Factors
    original_max_position_embeddings: Count
    factor: Annotated[float, number(1e6)]
    attention_factor: Annotated[float, number(1e6)] | None = None

    def build(self) -> Rope:
        magnitude = self.attention_factor or 1.0
        if self.attention_factor is None and self.factor > 1:
            original = math.log(self.original_max_position_embeddings)
            magnitude = math.sqrt(1 + math.log(self.factor) / original)
        return PartialRope(
            theta=self.rope_theta,
            share=self.partial_rotary_factor,
            scaling=LongRopeScaling(factors=self.short_factor, magnitude=magnitude),
        )


_ROPES = {"default": PartialRotary, "longrope": _LongRope}


def read_partial_rope(
    config: HfConfig, own: Mapping[str, Any], kinds: Mapping[str, type[DefaultRope]]
) -> Rope:
    """Reads rotary positions of some of the features.

    Args:
        config: The config.json.
        own: Keys with values that hold where its rotary positions have none.
        kinds: The keys of each `rope_type` that the family has.
    """
    given = {
        "rope_theta": config.rope_theta or 10000.0,
        "partial_rotary_factor": config.partial_rotary_factor or 1.0,
        **own,
        **config.rope_scaling,
        **config.rope_parameters,
    }
    rope, head_dim = read_rope(given, kinds), config.features_of_head()
    rotated = rope.num_rotated(head_dim)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"config.json has head_dim={head_dim} and a partial_rotary_factor by which "
            f"{rotated} features rotate; wanted an even number above 0."
        )
    return rope


class Phi3Layer(LlamaLayer):
    """The layer of a Llama, with fused linears."""

    def __init__(self, config: ModelConfig, make: LayerBuilder):
        super().__init__(config, make, fused=True)

    def make_mlp(self, config: ModelConfig, make: LayerBuilder) -> Mlp:
        return Mlp(config, make, fused=True)


class Phi3(HfConfig):
    """The config.json of a Phi-3 or Phi-4-mini.

    With `longrope`, transformers has other frequencies in longer sequences than
    `original_max_position_embeddings`. Such sequences are not supported.
    """

    FAMILY: ClassVar[Family] = Family(
        model_type="phi3",
        models="Phi-3, Phi-4-mini",
        layer=Phi3Layer,
        undivided="fused linears cannot be cut into equal parts",
    )
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"auto_map", "full_attn_mod", "interpolate_factor"}
    )

    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Count = 4096
    rms_norm_eps: Annotated[float, number(1.0)] | None = 1e-5
    hidden_act: Annotated[Any, only("silu")] = "silu"
    partial_rotary_factor: Share | None = None
    sliding_window: Count | None = None
    embd_pdrop: Annotated[Any, only(0)] = 0
    resid_pdrop: Annotated[Any, only(0)] = 0

    def build(self, **fields: Any) -> ModelConfig:
        model = super().build(**fields)
        most = self.original_max_position_embeddings
        if model.rope.scaling is None or model.max_positions <= most:
            return model
        return dataclasses.replace(model, max_positions=most)

    def ropes(self) -> tuple[Rope, None]:
        original = self.original_max_position_embeddings
        given, own = {**self.rope_scaling, **self.rope_parameters}, {}
        if "longrope" in (given.get("type"), given.get("rope_type")):
            factor = self.max_position_embeddings / original
            own = {"original_max_position_embeddings": original, "factor": factor}
        rope = read_partial_rope(self, own, _ROPES)
        scaling = rope.scaling
        pairs = rope.num_rotated(self.features_of_head()) // 2
        if isinstance(scaling, LongRopeScaling) and len(scaling.factors) != pairs:
            raise ModelError(
                f"config.json has {len(scaling.factors)} values in short_factor; "
                f"wanted {pairs}, one for each pair of features that rotates."
            )
        return rope, None

    def layer_windows(self) -> Windows:
        return self.typed_windows(self.sliding_window, [True] * self.num_hidden_layers)
