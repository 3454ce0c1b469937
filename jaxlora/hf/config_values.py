"""Checks the values of a Hugging Face config.json, each against its type and bound."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.model_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    Rope,
)
from jaxlora.families.table import Activation, Family, Field
from jaxlora.hf.quantized.config import KEY

_SIZES = {
    "vocab_size": Field("count", 2**24),
    "hidden_size": Field("count", 2**18),
    "intermediate_size": Field("count", 2**20),
    "num_hidden_layers": Field("count", 1000),
    "num_attention_heads": Field("count", 2**12),
    "max_position_embeddings": Field("count"),
}
_FIELDS = {
    **_SIZES,
    "num_key_value_heads": Field("count", 2**12),
    "head_dim": Field("count", 2**12),
    "rms_norm_eps": Field("number", 1.0),
    "rope_theta": Field("number", 1e15),
    "tie_word_embeddings": Field("flag"),
    "attention_bias": Field("flag"),
    "mlp_bias": Field("flag"),
    "sliding_window": Field("count"),
    "use_sliding_window": Field("flag"),
    "max_window_layers": Field("whole"),
}
# Fields that are read elsewhere, or checked to have the only supported value.
_OBJECTS = {"rope_scaling", "rope_parameters", "layer_types"}
_OTHERS = {
    "model_type",
    "hidden_act",
    "attention_dropout",
    "partial_rotary_factor",
    KEY,
}
# Fields that have no effect on what the model computes in training.
_HARMLESS = {
    "_name_or_path",
    "_attn_implementation_autoset",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "do_sample",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_length",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
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
    "vocab_file",
}
_ACTIVATIONS: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
# The keys of each kind of scaling.
_FACTOR, _FREQUENCY = Field("number", 1e6), Field("number", 1e9)
_SCALINGS = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _FREQUENCY,
        "high_freq_factor": _FREQUENCY,
        "original_max_position_embeddings": Field("count"),
    },
}
_THETA = {"rope_theta": Field("number", 1e15)}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def checked_values(
    config: Mapping[str, Any], model_type: str, family: Family
) -> dict[str, Any]:
    """Returns the values that determine the mathematics of a model.

    Args:
        config: Contents of config.json.
        model_type: The family's name.
        family: The family of models.

    Returns:
        Values by key, without nulls and without what transformers ignores for the
        family. All sizes are there, also those of the heads. Rope objects and
        `layer_types` are as in the file.

    Raises:
        ModelError: A value is missing or unsupported, or a field is set that this
            library does not read and that may change the mathematics.
    """
    _check_unread(config, family)
    _check_supported(config, model_type, family)
    _check_token_ids(config)
    # An explicit null is not the same as a missing key: it disables the default.
    given = {**family.defaults, **config}
    given = {key: value for key, value in given.items() if value is not None}
    for key in _SIZES:
        if key not in given:
            raise ModelError(f"config.json lacks {key!r}, so the model is not defined.")
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    fields = _fields(family)
    values = {k: _checked(k, given[k], f) for k, f in fields.items() if k in given}
    _set_head_dim(values, family)
    return values | {key: given[key] for key in _OBJECTS if key in given}


def _fields(family: Family) -> dict[str, Field]:
    """Returns the fields that transformers reads for a family."""
    ignored = {"attention_bias", "mlp_bias"}
    ignored -= {family.qkv_bias, family.o_bias, family.mlp_bias}
    if family.windows == "none":
        ignored.add("sliding_window")
    if family.windows != "from_layer":
        ignored |= {"use_sliding_window", "max_window_layers"}
    common = {key: field for key, field in _FIELDS.items() if key not in ignored}
    return {**common, **family.keys}


def _check_unread(config: Mapping[str, Any], family: Family) -> None:
    known = _FIELDS.keys() | _OBJECTS | _OTHERS | _HARMLESS | family.keys.keys()
    for key, value in config.items():
        is_known = key in known or key == family.activation_key
        if not is_known and value not in (None, False, [], {}):
            raise ModelError(
                f"config.json sets {key}={shown(value)}, which is not read here and "
                "may change what the model computes. If it does not, remove it from "
                "config.json."
            )


def _checked(key: str, value: Any, field: Field) -> Any:
    """Returns a value of the field, a number as a float; else raises ModelError."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or isinstance(value, float)
    wanted = None
    if field.kind == "flag" and not isinstance(value, bool):
        wanted = "true or false."
    elif field.kind == "whole" and not is_whole:
        wanted = "a whole number."
    elif field.kind == "count" and not (is_whole and value > 0):
        wanted = "a positive whole number."
    elif field.kind == "count" and value > field.most:
        wanted = (
            f"at most {field.most}, which is more than any known model has. Is the "
            "file damaged?"
        )
    # `value > field.most` would let NaN pass.
    elif field.kind == "number" and not (is_number and 0 < value <= field.most):
        wanted = f"a number above 0, and at most {field.most:g}."
    if wanted is not None:
        raise ModelError(f"config.json has {key}={shown(value)}; wanted {wanted}")
    return float(value) if field.kind == "number" else value


def _check_only(key: str, value: Any, wanted: Any) -> None:
    """Raises ModelError if a value is not the only one that is supported."""
    if value != wanted:
        raise ModelError(
            f"config.json sets {key}={shown(value)}; only {wanted!r} is supported."
        )


def _check_supported(
    config: Mapping[str, Any], model_type: str, family: Family
) -> None:
    # transformers has no default for an activation that is null.
    activation = _ACTIVATIONS[family.activation]
    key = family.activation_key
    _check_only(key, config.get(key, activation), activation)
    for key, wanted in (("attention_dropout", 0), ("partial_rotary_factor", 1.0)):
        if config.get(key) is not None:
            _check_only(key, config[key], wanted)
    window = config.get("sliding_window")
    if window and family.windows == "none":
        raise ModelError(
            f"config.json sets sliding_window={shown(window)} for a {model_type} "
            "model, which has none."
        )


def _check_token_ids(config: Mapping[str, Any]) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        ids = ids if isinstance(ids, list) and key == "eos_token_id" else [ids]
        if any(isinstance(i, bool) or not isinstance(i, int | None) for i in ids):
            raise ModelError(
                f"config.json has {key}={shown(config[key])}; wanted a whole number."
            )


def _set_head_dim(values: dict[str, Any], family: Family) -> None:
    """Checks the sizes of the heads against each other; sets `head_dim` if missing."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if ("head_dim" not in values or family.divides_width) and width % heads:
        remedy = "" if family.divides_width else ", and no head_dim"
        raise ModelError(
            f"config.json has hidden_size={width}, not a multiple of "
            f"num_attention_heads={heads}{remedy}."
        )
    if heads % values["num_key_value_heads"]:
        raise ModelError(
            f"config.json has num_attention_heads={heads}, not a multiple of "
            f"num_key_value_heads={values['num_key_value_heads']}."
        )
    head_dim = values.setdefault("head_dim", width // heads)
    if _checked("head_dim", head_dim, _FIELDS["head_dim"]) % 2:
        raise ModelError(
            f"config.json has head_dim={head_dim}; rotary positions need an even one."
        )


def read_ropes(values: Mapping[str, Any], *, local: bool) -> tuple[Rope, Rope | None]:
    """Reads the rotary positions of a model's layers.

    Version 4 of transformers has `rope_theta` and `rope_scaling`; version 5 has
    `rope_parameters`. In Gemma 3, whose layers with a window have frequencies of their
    own, version 4 scales the other layers alone, and version 5 has an object for each
    type of layer.

    Args:
        values: The values of `checked_values`.
        local: Whether layers with a window have rotary positions of their own.

    Returns:
        The rotary positions, and those of layers with a window if they differ.

    Raises:
        ModelError: A value is missing or unsupported, or a field is not read here.
    """
    given, scaling = (_object(values, k) for k in ("rope_parameters", "rope_scaling"))
    if not local:
        theta = values.get("rope_theta", 10000.0)
        return _rope({"rope_theta": theta, **scaling, **given}), None
    unread = set(given) - {_FULL, _SLIDING}
    if unread:
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} in rope_parameters; wanted an "
            f"object for {_FULL} and one for {_SLIDING}."
        )
    full, sliding = (_object(given, kind) for kind in (_FULL, _SLIDING))
    theta = values.get("rope_theta", 1e6)
    local_theta = values.get("rope_local_base_freq", 10000.0)
    return (
        _rope({"rope_theta": theta, **full, **scaling}),
        _rope({"rope_theta": local_theta, **sliding}),
    )


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the fields of an object that are not null; none if there is no object."""
    value = values.get(key, {})
    if not isinstance(value, Mapping):
        raise ModelError(
            f"config.json has {key}={shown(value)}; wanted an object or null."
        )
    return {k: v for k, v in value.items() if v is not None}


def _rope(rope: dict[str, Any]) -> Rope:
    """Reads one object, which has at least a `rope_theta`."""
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    _check_only("partial_rotary_factor", rope.pop("partial_rotary_factor", 1.0), 1.0)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ModelError(
            f"config.json has rope_type={shown(kind)}; supported: "
            f"{', '.join(_SCALINGS)}."
        )
    fields = _THETA | _SCALINGS[kind]
    for key in fields:
        if key not in rope:
            raise ModelError(f"config.json has rope_type={kind!r} without {key!r}.")
    values = {key: _checked(key, rope[key], field) for key, field in fields.items()}
    unread = rope.keys() - fields.keys()
    if unread:
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} for rope_type={kind!r}, which "
            "are not read here."
        )
    theta = values.pop("rope_theta")
    if theta < 1:
        raise ModelError(f"config.json has rope_theta={theta:g}; wanted at least 1.")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling=LinearRopeScaling(**values))
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise ModelError(
            f"config.json has high_freq_factor={high:g}, which must be above "
            f"low_freq_factor={low:g}."
        )
    positions = values.pop("original_max_position_embeddings")
    scaling = Llama3RopeScaling(**values, original_max_positions=positions)
    return Rope(theta=theta, scaling=scaling)
