"""A Hugging Face config.json as a `ModelConfig`, with nothing overlooked."""

import math
from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ModelError
from jaxlora.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig

# What transformers assumes where config.json is silent, by family.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
        "attention_bias": False,
    },
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Read below, or checked to be the only value that is supported.
_READ = {
    *_REQUIRED,
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
}
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
# Of no effect on what the model computes in training.
_HARMLESS = {
    "_name_or_path",
    "_attn_implementation_autoset",
    "architectures",
    "bos_token_id",
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
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json of the Llama family.

    Args:
        config: The file's contents, in the spelling of transformers 4 or 5.

    Raises:
        ModelError: The family is unknown, a value is missing or unsupported, or a field
            is set that this library does not read and that may change the mathematics.
    """
    family = config.get("model_type")
    experts = [key for key in _EXPERTS if config.get(key)]
    if experts:
        raise ModelError(
            f"config.json sets {experts[0]}={config[experts[0]]}: mixture-of-experts "
            f"models are not supported. Supported: {', '.join(_DEFAULTS)}."
        )
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise ModelError(
            f"config.json has model_type={family!r}. Supported: {', '.join(_DEFAULTS)} "
            "(Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3)."
        )
    _check_unread(config)
    _check_supported(config)
    # An explicit null is not silence: it switches the family's default off.
    values = {**_DEFAULTS[family], **config}
    values = {key: value for key, value in values.items() if value is not None}
    for key in (*_REQUIRED, "max_position_embeddings"):
        if key not in values:
            raise ModelError(f"config.json lacks {key!r}, so the model is not defined.")
    return _build(family, values)


def _check_unread(config: Mapping[str, Any]) -> None:
    unread = {
        key: value
        for key, value in config.items()
        if key not in _READ | _HARMLESS and value not in (None, False, [], {})
    }
    for key, value in unread.items():
        raise ModelError(
            f"config.json sets {key}={value!r}, which is not read here and may change "
            "what the model computes. If it does not, remove it from config.json."
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    supported = {
        "hidden_act": "silu",
        "attention_dropout": 0,
        "partial_rotary_factor": 1.0,
    }
    for key, wanted in supported.items():
        if config.get(key, wanted) not in (wanted, None):
            raise ModelError(
                f"config.json sets {key}={config[key]!r}; only {wanted!r} is supported."
            )


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json has {key}={value!r}; wanted a positive whole number."
        )
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values[key] if default is None else values.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ModelError(f"config.json has {key}={value!r}; wanted a number above 0.")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json has {key}={value!r}; wanted true or false.")
    return value


def _build(family: str, values: dict[str, Any]) -> ModelConfig:
    heads, width = (_integer(values, k) for k in ("num_attention_heads", "hidden_size"))
    values.setdefault("num_key_value_heads", heads)
    if "head_dim" not in values and width % heads:
        raise ModelError(
            f"config.json has hidden_size={width}, not a multiple of "
            f"num_attention_heads={heads}, and no head_dim."
        )
    values.setdefault("head_dim", width // heads)
    kv_heads = _integer(values, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(
            f"config.json has num_attention_heads={heads}, not a multiple of "
            f"num_key_value_heads={kv_heads}."
        )
    if _integer(values, "head_dim") % 2:
        raise ModelError(
            f"config.json has head_dim={values['head_dim']}; rotary positions need an "
            "even one."
        )
    # The other families have no such field in transformers, which ignores it there.
    attention_bias = family in ("llama", "qwen3") and _flag(values, "attention_bias")
    theta, scaling = _rope(values)
    return ModelConfig(
        model_type=family,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=width,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=values["head_dim"],
        max_positions=_integer(values, "max_position_embeddings"),
        rms_eps=_number(values, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and _flag(values, "mlp_bias"),
        qk_norm=family == "qwen3",
        tie_embeddings=_flag(values, "tie_word_embeddings"),
        layer_windows=_windows(family, values),
    )


def _rope(values: Mapping[str, Any]):
    """(theta, scaling), as transformers 4 or 5 spell them."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(key, {}), Mapping):
            raise ModelError(
                f"config.json has {key}={values[key]!r}; wanted an object or null."
            )
        rope.update({k: v for k, v in values.get(key, {}).items() if v is not None})
    theta = _number(rope, "rope_theta", _number(values, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            "config.json sets partial_rotary_factor; only 1.0 is supported."
        )
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        rope.pop(key, None)
    if kind not in _ROPE_FIELDS:
        raise ModelError(
            f"config.json has rope_type={kind!r}; supported: {', '.join(_ROPE_FIELDS)}."
        )
    try:
        if kind == "default":
            scaling = None
        elif kind == "linear":
            scaling = LinearRopeScaling(factor=_number(rope, "factor"))
        else:
            scaling = Llama3RopeScaling(
                factor=_number(rope, "factor"),
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
                original_max_positions=_integer(
                    rope, "original_max_position_embeddings"
                ),
            )
    except KeyError as error:
        raise ModelError(
            f"config.json has rope_type={kind!r} without {error.args[0]!r}."
        ) from None
    unread = set(rope) - _ROPE_FIELDS[kind]
    if unread:
        raise ModelError(
            f"config.json sets {sorted(unread)} for rope_type={kind!r}, which are not "
            "read here."
        )
    return theta, scaling


def _windows(family: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers = _integer(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family == "llama":
        if window:
            raise ModelError(
                f"config.json sets sliding_window={window} for a llama model, which "
                "has none."
            )
        return (None,) * num_layers
    if window is not None:
        _integer(values, "sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    if not _flag(values, "use_sliding_window"):
        return (None,) * num_layers
    first = values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(
            f"config.json has max_window_layers={first!r}; wanted a whole number."
        )
    kinds = values.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention"
        for i in range(num_layers)
    ]
    known = {"sliding_attention": window, "full_attention": None}
    fits = isinstance(kinds, list) and len(kinds) == num_layers
    if not fits or any(kind not in list(known) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types={kinds!r}; wanted one of {sorted(known)} for "
            f"each of the {num_layers} layers."
        )
    return tuple(known[kind] for kind in kinds)
