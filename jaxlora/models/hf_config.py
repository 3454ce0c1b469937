"""Reads a Hugging Face config.json: the base of the classes of all families.

A family is a subclass with the keys that it reads, their bounds and the defaults that
they have in transformers. A default holds for a key that is missing; an explicit null
is another value, and disables it. What a null stands for is said where a key is used.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.models.config import (
    Family,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    Rope,
    UnroundedYarnScaling,
    YarnScaling,
)

# Keys without an effect on what a model computes in training, and keys that are read
# elsewhere or that transformers reads for other families alone.
_IGNORED = {
    "_name_or_path",
    "_attn_implementation_autoset",
    "architectures",
    "cache_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_length",
    "max_window_layers",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "rope_interleaved",
    "temperature",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_sliding_window",
    "vocab_file",
}
FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]


def only(wanted: Any) -> BeforeValidator:
    """Accepts one value."""

    def check(value: Any) -> Any:
        if value != wanted:
            raise ValueError(f"only {wanted!r} is supported.")
        return value

    return BeforeValidator(check)


def count(most: int = 2**31 - 1) -> BeforeValidator:
    """Accepts whole numbers above 0, up to several times that of any known model.

    Without bounds, a damaged file could make this library allocate arbitrarily much for
    each layer or feature.
    """

    def check(value: Any) -> int:
        if value is None:
            raise PydanticCustomError("missing", "null")
        if not _is_whole(value) or value <= 0:
            raise ValueError("wanted a positive whole number.")
        if value > most:
            raise ValueError(
                f"wanted at most {most}, which is more than any known model has. Is "
                "the file damaged?"
            )
        return value

    return BeforeValidator(check)


def number(most: float, *, or_zero: bool = False) -> BeforeValidator:
    """Accepts numbers above 0, or also 0."""

    def check(value: Any) -> float:
        is_number = _is_whole(value) or isinstance(value, float)
        # `value > most` would let NaN pass.
        if is_number and (0 < value <= most or (or_zero and value == 0)):
            return float(value)
        least = "of at least 0" if or_zero else "above 0"
        raise ValueError(f"wanted a number {least}, and at most {most:g}.")

    return BeforeValidator(check)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: Any) -> Any:
    if not _is_whole(value):
        raise ValueError("wanted a whole number.")
    return value


def _end_tokens(value: Any) -> Any:
    for token in value if isinstance(value, list) else [value]:
        if token is not None:
            _whole(token)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError("wanted true or false.")
    return bool(value)


def _object(value: Any) -> dict[str, Any]:
    """Returns the fields of an object that are not null; none if there is no object."""
    if not isinstance(value, Mapping | None):
        raise ValueError("wanted an object or null.")
    return {k: v for k, v in (value or {}).items() if v is not None}


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, count()]
VocabSize = Annotated[int, count(2**24)]
Width = Annotated[int, count(2**18)]
InnerWidth = Annotated[int, count(2**20)]
Layers = Annotated[int, count(1000)]
Heads = Annotated[int, count(2**12)]
HeadDim = Annotated[int, count(2**12)]
Share = Annotated[float, number(1.0)]
Theta = Annotated[float, number(1e15)]
Factor = Annotated[float, number(1e6)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Object = Annotated[dict[str, Any], BeforeValidator(_object)]


class _Ropes(pydantic.BaseModel):
    full_attention: Object = {}
    sliding_attention: Object = {}


class DefaultRope(pydantic.BaseModel):
    """The keys of rotary positions, of one `rope_type`."""

    rope_theta: Theta
    partial_rotary_factor: Annotated[Any, only(1.0)] = 1.0

    def build(self) -> Rope:
        """Returns the rotary positions."""
        return Rope(theta=self.rope_theta)


class _LinearRope(DefaultRope):
    factor: Factor

    def build(self) -> Rope:
        scaling = LinearRopeScaling(factor=self.factor)
        return Rope(theta=self.rope_theta, scaling=scaling)


class _Llama3Rope(DefaultRope):
    factor: Factor
    low_freq_factor: Annotated[float, number(1e9)]
    high_freq_factor: Annotated[float, number(1e9)]
    original_max_position_embeddings: Count

    def build(self) -> Rope:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            raise ModelError(
                f"config.json has high_freq_factor={high:g}, which must be above "
                f"low_freq_factor={low:g}."
            )
        scaling = Llama3RopeScaling(
            factor=self.factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=self.original_max_position_embeddings,
        )
        return Rope(theta=self.rope_theta, scaling=scaling)


class YarnRope(DefaultRope):
    """The keys of YaRN."""

    factor: Factor
    original_max_position_embeddings: Count
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    attention_factor: Factor | None = None
    mscale: Annotated[float, number(1e6, or_zero=True)] = 0.0
    mscale_all_dim: Annotated[float, number(1e6, or_zero=True)] = 0.0
    truncate: Flag = True

    def build(self) -> Rope:
        return Rope(theta=self.rope_theta, scaling=self.scaling())

    def scaling(self) -> YarnScaling:
        """Returns how the frequencies are stretched."""
        if self.beta_fast < self.beta_slow:
            raise ModelError(
                f"config.json has beta_fast={self.beta_fast:g}, which must be at least "
                f"beta_slow={self.beta_slow:g}. Are the two exchanged?"
            )
        if self.rope_theta == 1:
            raise ModelError(
                "config.json has rope_theta=1, with which all waves of YaRN have one "
                "length. Correct it; most models have 10000 or more."
            )
        kind = YarnScaling if self.truncate else UnroundedYarnScaling
        return kind(
            factor=self.factor,
            fast=self.beta_fast,
            slow=self.beta_slow,
            original_max_positions=self.original_max_position_embeddings,
            magnitude=self.attention_factor or self._magnitude(),
        )

    def _magnitude(self) -> float:
        def magnitude(multiplier: float) -> float:
            # Below 1, transformers has no such factor.
            return 0.1 * multiplier * math.log(max(self.factor, 1.0)) + 1

        if not (self.mscale and self.mscale_all_dim):
            return magnitude(1.0)
        return magnitude(self.mscale) / magnitude(self.mscale_all_dim)


ROPES: Mapping[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": _LinearRope,
    "llama3": _Llama3Rope,
    "yarn": YarnRope,
}


def read_rope(
    rope: dict[str, Any], kinds: Mapping[str, type[DefaultRope]] = ROPES
) -> Rope:
    """Reads one object of rotary positions, which has at least a `rope_theta`.

    Args:
        rope: The object.
        kinds: The keys of each `rope_type` that the family has.
    """
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelError(
            f"config.json has rope_type={shown(kind)}; supported: {', '.join(kinds)}."
        )
    missing = f"config.json has rope_type={kind!r} without {{key!r}}."
    read = validated(kinds[kind], rope, missing)
    if unread := rope.keys() - type(read).model_fields.keys():
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} for rope_type={kind!r}, which "
            "are not read here."
        )
    if read.rope_theta < 1:
        raise ModelError(
            f"config.json has rope_theta={read.rope_theta:g}; wanted at least 1."
        )
    return read.build()


def refuse_unread(config: Mapping[str, Any], known: Set[str]) -> None:
    """Refuses a file that sets other keys than those known and those of no effect."""
    for key, value in config.items():
        if key not in _IGNORED | known and value not in (None, False, [], {}):
            raise ModelError(
                f"config.json sets {key}={shown(value)}, which is not read here and "
                "may change what the model computes. If it does not, remove it from "
                "config.json."
            )


def validated[T: pydantic.BaseModel](
    kind: type[T], values: Mapping[str, Any], missing: str = ""
) -> T:
    """Returns the values of a file; the error of a missing `{key}` is `missing`."""
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if first["type"] == "missing":
            raise ModelError(missing.format(key=key)) from None
        # All others are errors of the validators above.
        reason = first["ctx"]["error"]
        raise ModelError(
            f"config.json has {key}={shown(values[key])}; {reason}"
        ) from None


class HfConfig(pydantic.BaseModel):
    """The keys that every family reads.

    Attributes:
        FAMILY: What the models of the family share.
        MODEL: Class of its models.
        IGNORED: Keys of the family without an effect on what a model computes.
        DIVIDES_WIDTH: Whether hidden_size must be a multiple of the number of heads
            even if head_dim is given.
    """

    FAMILY: ClassVar[Family]
    MODEL: ClassVar[type[ModelConfig]] = ModelConfig
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    DIVIDES_WIDTH: ClassVar[bool] = False

    model_type: str
    vocab_size: VocabSize
    hidden_size: Width
    intermediate_size: InnerWidth
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    max_position_embeddings: Count
    rms_norm_eps: Annotated[float, number(1.0)] | None = None
    rope_theta: Theta | None = None
    rope_scaling: Object = {}
    rope_parameters: Object = {}
    partial_rotary_factor: Annotated[Any, only(1.0)] | None = None
    attention_dropout: Annotated[Any, only(0)] | None = None
    tie_word_embeddings: Flag = False
    sliding_window: Any = None
    layer_types: Any = None
    bos_token_id: Whole | None = None
    eos_token_id: Annotated[Any, BeforeValidator(_end_tokens)] = None
    pad_token_id: Whole | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads the contents of a config.json.

        Raises:
            ModelError: A value is missing or unsupported, or a key is set that is not
                read and that may change the mathematics.
        """
        refuse_unread(config, cls.IGNORED | cls.model_fields.keys())
        missing = "config.json lacks {key!r}, so the model is not defined."
        return validated(cls, config, missing).build()

    def build(self, **fields: Any) -> ModelConfig:
        """Returns the configuration of the model.

        Args:
            **fields: The fields of `MODEL` that only some families have.
        """
        rope, local_rope = self.ropes()
        return self.MODEL(
            family=self.FAMILY,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self._kv_heads(),
            head_dim=self.features_of_head(),
            max_positions=self._max_positions(rope),
            rms_eps=self.rms_norm_eps or 1e-6,
            rope=rope,
            local_rope=local_rope,
            tie_embeddings=self.tie_word_embeddings,
            layer_windows=self.layer_windows(),
            **fields,
        )

    def _max_positions(self, rope: Rope) -> int:
        # YaRN is often added to a config.json whose maximum stays as it was.
        most = self.max_position_embeddings
        if isinstance(yarn := rope.scaling, YarnScaling):
            return max(most, int(yarn.factor * yarn.original_max_positions))
        return most

    def ropes(self) -> tuple[Rope, Rope | None]:
        """Returns the rotary positions, and those of windowed layers if they differ.

        Version 4 of transformers has `rope_theta` and `rope_scaling`; version 5 has
        `rope_parameters`.
        """
        theta = self.rope_theta or 10000.0
        given = {"rope_theta": theta, **self.rope_scaling, **self.rope_parameters}
        return read_rope(given), None

    def ropes_by_type(
        self,
        theta: float,
        local_theta: float,
        kinds: Mapping[str, type[DefaultRope]] = ROPES,
    ) -> tuple[Rope, Rope]:
        """Returns the rotary positions of layers without a window, and with one.

        Version 4 of transformers scales the former alone, and version 5 has an object
        for each type of layer.

        Args:
            theta: Base of the frequencies of layers without a window.
            local_theta: Base of those of layers with a window.
            kinds: The keys of each `rope_type` that the family has.
        """
        given = self.rope_parameters
        if unread := given.keys() - {FULL, SLIDING}:
            raise ModelError(
                f"config.json sets {shown(sorted(unread))} in rope_parameters; wanted "
                f"an object for {FULL} and one for {SLIDING}."
            )
        by_type = validated(_Ropes, given)
        full = {"rope_theta": theta, **by_type.full_attention, **self.rope_scaling}
        sliding = {"rope_theta": local_theta, **by_type.sliding_attention}
        if False in (full.get("truncate"), sliding.get("truncate")):
            raise ModelError(
                "config.json has truncate=false for one type of layer, where "
                f"transformers does not read it for {self.model_type}. Remove it."
            )
        return read_rope(full, kinds), read_rope(sliding, kinds)

    def layer_windows(self) -> Windows:
        """Returns the attention window of each layer; None for a layer without one."""
        if self.sliding_window:
            raise ModelError(
                f"config.json sets sliding_window={shown(self.sliding_window)} for a "
                f"{self.model_type} model, which has none."
            )
        return self.typed_windows(None, [False] * self.num_hidden_layers)

    def typed_windows(
        self,
        window: int | None,
        has_window: Sequence[bool],
        *,
        may_differ: bool = False,
    ) -> Windows:
        """Returns the attention windows, by `layer_types` if the file has them.

        Args:
            window: Window of the layers that have one; None: no layer has one.
            has_window: Which layers have one, used if the file has no `layer_types`.
            may_differ: Whether `layer_types` may say otherwise.
        """
        windows = tuple(window if has else None for has in has_window)
        kinds, known = self.layer_types, {FULL: None, SLIDING: window}
        if kinds is None:
            return windows
        fits = isinstance(kinds, list) and len(kinds) == len(windows)
        if not fits or any(kind not in list(known) for kind in kinds):
            raise ModelError(
                f"config.json has layer_types={shown(kinds)}; wanted one of "
                f"{sorted(known)} for each of the {len(windows)} layers."
            )
        if SLIDING in kinds and window is None:
            raise ModelError(
                "config.json has layer_types with sliding_attention, and no sliding "
                f"window is in use for this {self.model_type} model. Set "
                "sliding_window (and, for a Qwen, use_sliding_window), or make the "
                "layers full_attention."
            )
        typed = tuple(known[kind] for kind in kinds)
        if not may_differ and typed != windows:
            raise ModelError(
                f"config.json has layer_types={shown(kinds)}, and all layers of a "
                f"{self.model_type} model have sliding_window={window}. Remove "
                "layer_types."
            )
        return typed

    def _kv_heads(self) -> int:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if heads % kv_heads:
            raise ModelError(
                f"config.json has num_attention_heads={heads}, not a multiple of "
                f"num_key_value_heads={kv_heads}."
            )
        return kv_heads

    def features_of_head(self) -> int:
        """Returns `head_dim`, which is hidden_size / num_attention_heads by default."""
        width, heads = self.hidden_size, self.num_attention_heads
        if (not self.head_dim or self.DIVIDES_WIDTH) and width % heads:
            remedy = "" if self.DIVIDES_WIDTH else ", and no head_dim"
            raise ModelError(
                f"config.json has hidden_size={width}, not a multiple of "
                f"num_attention_heads={heads}{remedy}."
            )
        head_dim = self.head_dim or width // heads
        if head_dim > 2**12:
            raise ModelError(
                f"config.json has head_dim={head_dim}; wanted at most 4096."
            )
        if head_dim % 2:
            raise ModelError(
                f"config.json has head_dim={head_dim}; rotary positions need an even "
                "one."
            )
        return head_dim
