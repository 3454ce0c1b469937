"""Reads a Hugging Face config.json as a `ModelConfig` and refuses unknown settings."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.families.table import FAMILIES, Family
from jaxlora.hf.config_values import checked_values, read_ropes
from jaxlora.hf.quantized.config import read_quantization

_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)

Windows = tuple[int | None, ...]


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Args:
        config: The file's contents, in the spelling of transformers 4 or 5.

    Raises:
        ModelError: The family is unknown, a value is missing or unsupported, or a field
            is set that this library does not read and that may change the mathematics.
    """
    model_type = _model_type(config)
    family = FAMILIES[model_type]
    read_quantization(config)
    values = checked_values(config, model_type, family)

    def has_bias(source: bool | str) -> bool:
        return values.get(source, False) if isinstance(source, str) else source

    rope, local_rope = read_ropes(values, local=family.local_rope)
    return ModelConfig(
        model_type=model_type,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        max_positions=values["max_position_embeddings"],
        rms_eps=values.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        score_scale=_score_scale(family, values),
        score_softcap=values.get("attn_logit_softcapping"),
        logit_softcap=values.get("final_logit_softcapping"),
        qkv_bias=has_bias(family.qkv_bias),
        o_bias=has_bias(family.o_bias),
        mlp_bias=has_bias(family.mlp_bias),
        tie_embeddings=values.get("tie_word_embeddings", False),
        layer_windows=_windows(model_type, values),
    )


def _model_type(config: Mapping[str, Any]) -> str:
    """Returns the key of a model's family in `FAMILIES`."""
    model_type = config.get("model_type")
    experts = [key for key in _EXPERTS if config.get(key)]
    if experts:
        raise ModelError(
            f"config.json sets {experts[0]}={shown(config[experts[0]])}: "
            "mixture-of-experts models are not supported. Supported: "
            f"{', '.join(FAMILIES)}."
        )
    if model_type == "gemma3":
        raise ModelError(
            "config.json has model_type='gemma3': the text model is one part of the "
            "checkpoint, its tensors have other names (language_model.) and its "
            "settings lie in text_config. Only gemma3_text is supported: save the text "
            "model alone, as a Gemma3ForCausalLM."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"config.json has model_type={shown(model_type)}. Supported: "
            f"{', '.join(FAMILIES)} "
            f"({', '.join(family.models for family in FAMILIES.values())})."
        )
    return model_type


def _score_scale(family: Family, values: Mapping[str, Any]) -> float | None:
    key = "query_pre_attn_scalar"
    if key not in family.keys:
        return None
    if key not in values:
        raise ModelError(f"config.json has {key}=null; wanted a number above 0.")
    return values[key] ** -0.5


def _windows(model_type: str, values: Mapping[str, Any]) -> Windows:
    """Reads the attention window of each layer; None for a layer without one.

    Args:
        model_type: The family's name.
        values: The values of `checked_values`.

    Raises:
        ModelError: A value is unsupported, or two of them contradict each other.
    """
    rule, window = FAMILIES[model_type].windows, values.get("sliding_window")
    if rule == "from_layer" and not values.get("use_sliding_window"):
        window = None
    windows = tuple(
        window if _has_window(model_type, values, layer) else None
        for layer in range(values["num_hidden_layers"])
    )
    if "layer_types" in values:
        return _typed_windows(model_type, values["layer_types"], window, windows)
    if rule == "pattern" and window is None:
        raise ModelError(
            "config.json has sliding_window=null, and some layers of a "
            f"{model_type} model have a window. Set it, or list layer_types that are "
            "all full_attention."
        )
    return windows


def _has_window(model_type: str, values: Mapping[str, Any], layer: int) -> bool:
    """Tells whether a layer has a window if `layer_types` does not say so."""
    family = FAMILIES[model_type]
    match family.windows:
        case "none":
            return False
        case "all":
            return True
        case "from_layer":
            return layer >= values.get("max_window_layers", 28)
        case "pattern":
            period = values.get("sliding_window_pattern", family.window_pattern)
            return (layer + 1) % period != 0


def _typed_windows(
    model_type: str, kinds: Any, window: int | None, windows: Windows
) -> Windows:
    """Returns the attention windows by `layer_types`.

    Args:
        model_type: The family's name.
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
            f"is in use for this {model_type} model. Set sliding_window (and, for a "
            "Qwen, use_sliding_window), or make the layers full_attention."
        )
    typed = tuple(known[kind] for kind in kinds)
    if FAMILIES[model_type].windows in ("none", "all") and typed != windows:
        raise ModelError(
            f"config.json has layer_types={shown(kinds)}, and all layers of a "
            f"{model_type} model have sliding_window={window}. Remove layer_types."
        )
    return typed
