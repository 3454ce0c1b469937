"""The table of model families: how the decoders of each family differ.

A family that needs no new mathematics takes one row of `FAMILIES` and a golden file of
its logits. Sizes, biases and windows vary within a family and are in `ModelConfig`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]

# Which layers have a sliding window. `from_layer` means those from `max_window_layers`
# on, and `pattern` means all but every n-th.
WindowRule = Literal["none", "all", "from_layer", "pattern"]


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """The values that a key of config.json may have.

    Attributes:
        kind: `count`, a whole number above 0; `number`, any number above 0; `whole`, a
            whole number of either sign; `flag`, true or false; or `any`, as nothing
            here depends on it.
        most: The largest value of a count or number, several times that of any known
            model. Without bounds, a damaged file could make this library allocate
            arbitrarily much for each layer or feature.
    """

    kind: Literal["count", "number", "whole", "flag", "any"]
    most: float = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """One linear of a decoder layer; LoRA can adapt each of them.

    Attributes:
        name: Its path inside a layer, the same here and in Hugging Face's checkpoints.
        in_features: Attribute of `ModelConfig` that holds K.
        out_features: Attribute of `ModelConfig` that holds N.
        bias: Attribute of `ModelConfig` that says whether the linear adds a bias.
        gguf: Its name inside a layer of a GGUF file.
    """

    name: str
    in_features: str
    out_features: str
    bias: str
    gguf: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One RMS norm of a decoder layer.

    Attributes:
        name: Its path inside a layer here, which says what it normalizes.
        hf_name: Its path inside a layer in Hugging Face's checkpoints.
        features: Attribute of `ModelConfig` that holds the size of its weight.
        gguf: Its name inside a layer of a GGUF file.
    """

    name: str
    hf_name: str
    features: str
    gguf: str


# The order keys the dropout masks. If it changed, resumed runs would draw other masks.
_LINEARS = (
    Linear(
        name="self_attn.q_proj",
        in_features="hidden_size",
        out_features="query_features",
        bias="qkv_bias",
        gguf="attn_q",
    ),
    Linear(
        name="self_attn.k_proj",
        in_features="hidden_size",
        out_features="kv_features",
        bias="qkv_bias",
        gguf="attn_k",
    ),
    Linear(
        name="self_attn.v_proj",
        in_features="hidden_size",
        out_features="kv_features",
        bias="qkv_bias",
        gguf="attn_v",
    ),
    Linear(
        name="self_attn.o_proj",
        in_features="query_features",
        out_features="hidden_size",
        bias="o_bias",
        gguf="attn_output",
    ),
    Linear(
        name="mlp.gate_proj",
        in_features="hidden_size",
        out_features="intermediate_size",
        bias="mlp_bias",
        gguf="ffn_gate",
    ),
    Linear(
        name="mlp.up_proj",
        in_features="hidden_size",
        out_features="intermediate_size",
        bias="mlp_bias",
        gguf="ffn_up",
    ),
    Linear(
        name="mlp.down_proj",
        in_features="intermediate_size",
        out_features="hidden_size",
        bias="mlp_bias",
        gguf="ffn_down",
    ),
)


def _layer_norm(name: str, hf_name: str, gguf: str) -> Norm:
    return Norm(name=name, hf_name=hf_name, features="hidden_size", gguf=gguf)


_LLAMA_NORMS = (
    _layer_norm("attention_norm", "input_layernorm", "attn_norm"),
    _layer_norm("mlp_norm", "post_attention_layernorm", "ffn_norm"),
)
_QK_NORMS = (
    Norm(
        name="self_attn.q_norm",
        hf_name="self_attn.q_norm",
        features="head_dim",
        gguf="attn_q_norm",
    ),
    Norm(
        name="self_attn.k_norm",
        hf_name="self_attn.k_norm",
        features="head_dim",
        gguf="attn_k_norm",
    ),
)
_GEMMA_NORMS = (
    _layer_norm("attention_norm", "input_layernorm", "attn_norm"),
    _layer_norm(
        "attention_output_norm", "post_attention_layernorm", "post_attention_norm"
    ),
    _layer_norm("mlp_norm", "pre_feedforward_layernorm", "ffn_norm"),
    _layer_norm("mlp_output_norm", "post_feedforward_layernorm", "post_ffw_norm"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Properties that all models of one `model_type` share.

    Attributes:
        models: Names of the models, for error messages.
        defaults: Values in transformers of the keys that a config.json may lack.
        keys: Keys of config.json that only some families read, with the values that
            they may have. Other families refuse these keys.
        linears: Linears of a layer, in the order that keys the dropout masks.
        norms: Norms of a layer. If there is an `attention_output_norm` or an
            `mlp_output_norm`, it normalizes that output before the residual sum.
        norm_offset: Whether norms multiply by 1 + weight, in float32, instead of by the
            weight.
        activation: Activation of the gate of the MLP.
        activation_key: Key of config.json that holds the activation.
        scales_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        qkv_bias: Whether q, k and v add a bias, or the key of config.json that says so.
        o_bias: The same for the output projection of attention.
        mlp_bias: The same for the MLP.
        windows: Which layers have a sliding window.
        window_pattern: For the rule `pattern`, the default of n.
        local_rope: Whether layers with a window have RoPE frequencies of their own.
        divides_width: Whether hidden_size must be a multiple of the number of heads
            even if head_dim is given.
    """

    models: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    linears: tuple[Linear, ...] = _LINEARS
    norms: tuple[Norm, ...] = _LLAMA_NORMS
    norm_offset: bool = False
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    scales_embedding: bool = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: WindowRule
    window_pattern: int = 1
    local_rope: bool = False
    divides_width: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        models="Llama 2 and 3, SmolLM2",
        defaults={"max_position_embeddings": 2048},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="none",
        divides_width=True,
    ),
    "mistral": Family(
        models="Mistral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows="all",
    ),
    "qwen2": Family(
        models="Qwen2, Qwen2.5",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        qkv_bias=True,
        windows="from_layer",
    ),
    "qwen3": Family(
        models="Qwen3",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "head_dim": 128,
        },
        norms=(*_LLAMA_NORMS, *_QK_NORMS),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="from_layer",
    ),
    "gemma2": Family(
        models="Gemma 2",
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        keys={
            "query_pre_attn_scalar": Field("number", 1e9),
            "attn_logit_softcapping": Field("number", 1e9),
            "final_logit_softcapping": Field("number", 1e9),
        },
        norms=_GEMMA_NORMS,
        norm_offset=True,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        scales_embedding=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="pattern",
        window_pattern=2,
        divides_width=True,
    ),
    # In transformers its attention ignores attn_logit_softcapping. Here it is refused.
    "gemma3_text": Family(
        models="Gemma 3 text models",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        keys={
            "query_pre_attn_scalar": Field("number", 1e9),
            "final_logit_softcapping": Field("number", 1e9),
            "rope_local_base_freq": Field("number", 1e15),
            "sliding_window_pattern": Field("count"),
            "_sliding_window_pattern": Field("any"),
        },
        norms=(*_GEMMA_NORMS, *_QK_NORMS),
        norm_offset=True,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        scales_embedding=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="pattern",
        window_pattern=6,
        local_rope=True,
        divides_width=True,
    ),
}
