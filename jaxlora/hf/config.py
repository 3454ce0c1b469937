"""Reads a Hugging Face config.json as a `ModelConfig` and refuses unknown settings."""

from collections.abc import Mapping
from typing import Any

from jaxlora.common.json_file import shown
from jaxlora.errors import ModelError
from jaxlora.families.model_config import ModelConfig
from jaxlora.families.table import FAMILIES, Activation, Family
from jaxlora.hf.config_rope import read_ropes
from jaxlora.hf.config_values import flag, integer, number
from jaxlora.hf.config_windows import read_windows
from jaxlora.hf.quantized.config import KEY, read_quantization

_ACTIVATIONS: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Fields that all families accept: they are read, checked to have the only supported
# value, or, where transformers ignores them for a family, ignored.
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
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)


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
    _check_unread(config, family)
    read_quantization(config)
    _check_supported(config, family)
    _check_token_ids(config)
    # An explicit null is not the same as a missing key: it disables the default.
    values = {**family.defaults, **config}
    values = {key: value for key, value in values.items() if value is not None}
    for key in (*_REQUIRED, "max_position_embeddings"):
        if key not in values:
            raise ModelError(f"config.json lacks {key!r}, so the model is not defined.")
    return _build(model_type, family, values)


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


def _check_unread(config: Mapping[str, Any], family: Family) -> None:
    known = _READ | _HARMLESS | family.keys | {family.activation_key}
    for key, value in config.items():
        if key not in known and value not in (None, False, [], {}):
            raise ModelError(
                f"config.json sets {key}={shown(value)}, which is not read here and "
                "may change what the model computes. If it does not, remove it from "
                "config.json."
            )


def _check_supported(config: Mapping[str, Any], family: Family) -> None:
    activation_key = family.activation_key
    supported = {
        activation_key: _ACTIVATIONS[family.activation],
        "attention_dropout": 0,
        "partial_rotary_factor": 1.0,
    }
    for key, wanted in supported.items():
        value = config.get(key, wanted)
        # transformers has no default for an activation that is null.
        is_null = value is None and key != activation_key
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


def _build(model_type: str, family: Family, values: dict[str, Any]) -> ModelConfig:
    heads, width = (integer(values, k) for k in ("num_attention_heads", "hidden_size"))
    values.setdefault("num_key_value_heads", heads)
    if ("head_dim" not in values or family.divides_width) and width % heads:
        remedy = "" if family.divides_width else ", and no head_dim"
        raise ModelError(
            f"config.json has hidden_size={width}, not a multiple of "
            f"num_attention_heads={heads}{remedy}."
        )
    values.setdefault("head_dim", width // heads)
    _check_heads(values)

    def has_bias(source: bool | str) -> bool:
        return flag(values, source) if isinstance(source, str) else source

    rope, local_rope = read_ropes(values, local=family.local_rope)
    return ModelConfig(
        model_type=model_type,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=width,
        intermediate_size=integer(values, "intermediate_size"),
        num_layers=integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        max_positions=integer(values, "max_position_embeddings"),
        rms_eps=number(values, "rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        score_scale=_score_scale(family, values),
        score_softcap=_softcap(family, values, "attn_logit_softcapping"),
        logit_softcap=_softcap(family, values, "final_logit_softcapping"),
        qkv_bias=has_bias(family.qkv_bias),
        o_bias=has_bias(family.o_bias),
        mlp_bias=has_bias(family.mlp_bias),
        tie_embeddings=flag(values, "tie_word_embeddings"),
        layer_windows=read_windows(model_type, values),
    )


def _score_scale(family: Family, values: Mapping[str, Any]) -> float | None:
    key = "query_pre_attn_scalar"
    if key not in family.keys:
        return None
    if key not in values:
        raise ModelError(f"config.json has {key}=null; wanted a number above 0.")
    return number(values, key) ** -0.5


def _softcap(family: Family, values: Mapping[str, Any], key: str) -> float | None:
    return number(values, key) if key in family.keys and key in values else None


def _check_heads(values: Mapping[str, Any]) -> None:
    heads = integer(values, "num_attention_heads")
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
