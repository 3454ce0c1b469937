"""Reads values of a config.json, and checks their types and bounds."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError

# Upper bounds, several times the values of any known model. Without them a damaged file
# could make this library allocate arbitrarily much for each layer or feature.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "rope_theta": 1e15,
    "rope_local_base_freq": 1e15,
    "factor": 1e6,
    "rms_norm_eps": 1.0,
}
_MOST_POSITIONS = 2**31 - 1


def integer(values: Mapping[str, Any], key: str) -> int:
    """Reads a whole number above 0, within its key's bound; else raises ModelError."""
    value, most = values[key], _MOST.get(key, _MOST_POSITIONS)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json has {key}={shown(value)}; wanted a positive whole number."
        )
    if value > most:
        raise ModelError(
            f"config.json has {key}={shown(value)}; wanted at most {most}, which is "
            "more than any known model has. Is the file damaged?"
        )
    return value


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Reads a number above 0, within its key's bound; else raises ModelError."""
    value = values[key] if default is None else values.get(key, default)
    most = _MOST.get(key, 1e9)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # `value > most` would let NaN pass.
    if not is_number or not 0 < value <= most:
        raise ModelError(
            f"config.json has {key}={shown(value)}; wanted a number above 0, and at "
            f"most {most:g}."
        )
    return float(value)


def flag(values: Mapping[str, Any], key: str) -> bool:
    """Reads true or false, false if the key is missing; else raises ModelError."""
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json has {key}={shown(value)}; wanted true or false.")
    return value
