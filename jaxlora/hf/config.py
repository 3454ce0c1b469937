"""Reads a Hugging Face config.json as a `ModelConfig` and refuses unknown settings."""

from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ModelError
from jaxlora.hf.config_values import flag, integer, number
from jaxlora.json_file import shown
from jaxlora.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig

# The defaults of transformers for keys that config.json lacks, by family.
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
# Fields that are read below, or checked to have the only supported value.
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
# Fields that have no effect on what the model computes in training.
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
            f"config.json sets {experts[0]}={shown(config[experts[0]])}: "
            "mixture-of-experts models are not supported. Supported: "
            f"{', '.join(_DEFAULTS)}."
        )
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise ModelError(
            f"config.json has model_type={shown(family)}. Supported: "
            f"{', '.join(_DEFAULTS)} "
            "(Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3)."
        )
    _check_unread(config)
    _check_supported(config)
    _check_token_ids(config)
    # An explicit null is not the same as a missing key: it disables the default.
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
            f"config.json sets {key}={shown(value)}, which is not read here and may "
            "change what the model computes. If it does not, remove it from "
            "config.json."
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    supported = {
        "hidden_act": "silu",
        "attention_dropout": 0,
        "partial_rotary_factor": 1.0,
    }
    for key, wanted in supported.items():
        value = config.get(key, wanted)
        # transformers has no default for an activation that is null.
        is_null = value is None and key != "hidden_act"
        if not is_null and value != wanted:
            raise ModelError(
                f"config.json sets {key}={shown(value)}; only {wanted!r} is supported."
            )


def _check_token_ids(config: Mapping[str, Any]) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        ids = ids if isinstance(ids, list) and key == "eos_token_id" else [ids]
        if any(isinstance(i, bool) or not isinstance(i, int | None) for i in ids):
            raise ModelError(
                f"config.json has {key}={shown(config[key])}; wanted a whole number."
            )


def _build(family: str, values: dict[str, Any]) -> ModelConfig:
    heads, width = (integer(values, k) for k in ("num_attention_heads", "hidden_size"))
    values.setdefault("num_key_value_heads", heads)
    # In transformers, Llama requires this even with a head_dim.
    if ("head_dim" not in values or family == "llama") and width % heads:
        raise ModelError(
            f"config.json has hidden_size={width}, not a multiple of "
            f"num_attention_heads={heads}, and no head_dim that would do without."
        )
    values.setdefault("head_dim", width // heads)
    kv_heads = integer(values, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(
            f"config.json has num_attention_heads={heads}, not a multiple of "
            f"num_key_value_heads={kv_heads}."
        )
    if integer(values, "head_dim") % 2:
        raise ModelError(
            f"config.json has head_dim={values['head_dim']}; rotary positions need an "
            "even one."
        )
    # transformers ignores this field for the other families.
    attention_bias = family in ("llama", "qwen3") and flag(values, "attention_bias")
    theta, scaling = _rope(values)
    return ModelConfig(
        model_type=family,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=width,
        intermediate_size=integer(values, "intermediate_size"),
        num_layers=integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=values["head_dim"],
        max_positions=integer(values, "max_position_embeddings"),
        rms_eps=number(values, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and flag(values, "mlp_bias"),
        qk_norm=family == "qwen3",
        tie_embeddings=flag(values, "tie_word_embeddings"),
        layer_windows=_windows(family, values),
    )


def _rope(values: Mapping[str, Any]):
    """Reads (theta, scaling) in the spelling of transformers 4 or 5."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(key, {}), Mapping):
            raise ModelError(
                f"config.json has {key}={shown(values[key])}; wanted an object or null."
            )
        rope.update({k: v for k, v in values.get(key, {}).items() if v is not None})
    theta = number(rope, "rope_theta", number(values, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = kind if isinstance(kind, str) else shown(kind)
    if number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            "config.json sets partial_rotary_factor; only 1.0 is supported."
        )
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        rope.pop(key, None)
    if kind not in _ROPE_FIELDS:
        raise ModelError(
            f"config.json has rope_type={shown(kind)}; supported: "
            f"{', '.join(_ROPE_FIELDS)}."
        )
    scaling = _rope_scaling(kind, rope)
    unread = set(rope) - _ROPE_FIELDS[kind]
    if unread:
        raise ModelError(
            f"config.json sets {shown(sorted(unread))} for rope_type={kind!r}, which "
            "are not read here."
        )
    if theta < 1:
        raise ModelError(f"config.json has rope_theta={theta:g}; wanted at least 1.")
    return theta, scaling


def _rope_scaling(
    kind: str, rope: Mapping[str, Any]
) -> LinearRopeScaling | Llama3RopeScaling | None:
    """Reads the scaling of RoPE frequencies, of one of the kinds in `_ROPE_FIELDS`."""
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


def _windows(family: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Reads the attention window of each layer; None for a layer without one."""
    num_layers = integer(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family == "llama" and window:
        raise ModelError(
            f"config.json sets sliding_window={shown(window)} for a llama model, which "
            "has none."
        )
    if window is not None and family != "llama":
        window = integer(values, "sliding_window")
    uses_window = family == "mistral" or flag(values, "use_sliding_window")
    if family == "llama" or not uses_window:
        window = None
    # Only Qwen models let layers differ; in a Mistral all layers have the window.
    first = values.get("max_window_layers", 28) if family.startswith("qwen") else 0
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(
            f"config.json has max_window_layers={shown(first)}; wanted a whole number."
        )
    windows = tuple(window if i >= first else None for i in range(num_layers))
    if "layer_types" not in values:
        return windows
    return _typed_windows(family, values["layer_types"], window, windows)


def _typed_windows(
    family: str, kinds: Any, window: int | None, windows: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Returns the attention windows by `layer_types`.

    Args:
        family: Family of the model.
        kinds: Value of `layer_types`.
        window: Window of the layers that have one; None: no layer has one.
        windows: Windows of the layers without `layer_types`.
    """
    known = {"full_attention": None, "sliding_attention": window}
    fits = isinstance(kinds, list) and len(kinds) == len(windows)
    if not fits or any(kind not in list(known) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types={shown(kinds)}; wanted one of "
            f"{sorted(known)} for each of the {len(windows)} layers."
        )
    if "sliding_attention" in kinds and window is None:
        raise ModelError(
            "config.json has layer_types with sliding_attention, and no sliding window "
            f"is in use for this {family} model. Set sliding_window (and, for a Qwen, "
            "use_sliding_window), or make the layers full_attention."
        )
    typed = tuple(known[kind] for kind in kinds)
    if not family.startswith("qwen") and typed != windows:
        raise ModelError(
            f"config.json has layer_types={shown(kinds)}, and all layers of a {family} "
            f"model have sliding_window={window}. Remove layer_types."
        )
    return typed
