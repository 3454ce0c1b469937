"""Reads the rotary position embedding of a Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.model_config import LinearRopeScaling, Llama3RopeScaling, Rope
from jaxlora.hf.config_values import integer, number

_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_ropes(values: Mapping[str, Any], *, local: bool) -> tuple[Rope, Rope | None]:
    """Reads the rotary positions of a model's layers.

    Args:
        values: A config.json in the spelling of transformers 4 or 5, without nulls.
        local: Whether layers with a window have rotary positions of their own.

    Returns:
        The rotary positions, and those of layers with a window if they differ.

    Raises:
        ModelError: A value is missing or unsupported, or a field is not read here.
    """
    if local:
        return _by_layer_type(values)
    rope = _fields(values, "rope_scaling") | _fields(values, "rope_parameters")
    return _rope(rope, number(values, "rope_theta", 10000.0)), None


def _by_layer_type(values: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Reads the rotary positions of Gemma 3, which differ by the type of the layer.

    Version 4 of transformers scales the layers without a window by `rope_scaling`;
    version 5 has an object for each type of layer in `rope_parameters`.
    """
    given = _fields(values, "rope_parameters")
    unread = set(given) - {_FULL, _SLIDING}
    if unread:
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} in rope_parameters; wanted an "
            f"object for {_FULL} and one for {_SLIDING}."
        )
    rope = _fields(given, _FULL) | _fields(values, "rope_scaling")
    local = _fields(given, _SLIDING)
    return (
        _rope(rope, number(values, "rope_theta", 1e6)),
        _rope(local, number(values, "rope_local_base_freq", 10000.0)),
    )


def _fields(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the fields of an object that are not null; none if there is no object."""
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise ModelError(
            f"config.json has {key}={shown(value)}; wanted an object or null."
        )
    return {k: v for k, v in value.items() if v is not None}


def _rope(rope: dict[str, Any], default_theta: float) -> Rope:
    theta = number(rope, "rope_theta", default_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = kind if isinstance(kind, str) else shown(kind)
    if number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            "config.json sets partial_rotary_factor; only 1.0 is supported."
        )
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        rope.pop(key, None)
    if kind not in _FIELDS:
        raise ModelError(
            f"config.json has rope_type={shown(kind)}; supported: {', '.join(_FIELDS)}."
        )
    scaling = _scaling(kind, rope)
    unread = set(rope) - _FIELDS[kind]
    if unread:
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} for rope_type={kind!r}, which "
            "are not read here."
        )
    if theta < 1:
        raise ModelError(f"config.json has rope_theta={theta:g}; wanted at least 1.")
    return Rope(theta=theta, scaling=scaling)


def _scaling(
    kind: str, rope: Mapping[str, Any]
) -> LinearRopeScaling | Llama3RopeScaling | None:
    """Reads the scaling of RoPE frequencies, of one of the kinds in `_FIELDS`."""
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return LinearRopeScaling(factor=number(rope, "factor"))
        scaling = Llama3RopeScaling(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=integer(rope, "original_max_position_embeddings"),
        )
    except KeyError as error:
        raise ModelError(
            f"config.json has rope_type={kind!r} without {error.args[0]!r}."
        ) from None
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(
            f"config.json has high_freq_factor={scaling.high_freq_factor:g}, which "
            f"must be above low_freq_factor={scaling.low_freq_factor:g}."
        )
    return scaling
