"""Shapes that the benchmarks and the kernel tuner share: models and kernel cases."""

import dataclasses
from typing import Any


def _model(
    vocab_size: int,
    width: int,
    mlp_width: int | None,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    model_type: str = "llama",
    positions: int = 131072,
    theta: float = 500000.0,
    rope_factor: float | None = None,
    eps: float = 1e-5,
    **others: Any,
) -> dict[str, Any]:
    """Returns a config.json, in the form that transformers reads too.

    Without a width of an MLP, no layer has one.
    """
    if mlp_width is not None:
        others["intermediate_size"] = mlp_width
    if rope_factor is not None:
        others["rope_scaling"] = {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "factor": rope_factor,
        }
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        **others,
    }


_QWEN = {
    "model_type": "qwen2",
    "positions": 32768,
    "theta": 1000000.0,
    "eps": 1e-6,
}
# A gated delta net in three of four layers.
_QWEN_35 = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "theta": 1e7,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
}
# Of 30B in all, a token passes 3B; no layer has an MLP.
_QWEN_3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "positions": 40960,
    "theta": 1e6,
    "eps": 1e-6,
}
_QWEN_36_MOE = {
    **_QWEN_35,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
# Every sixth layer sees all tokens, with other heads, and its values are its keys.
_GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 1024,
    "layer_types": [
        "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(60)
    ],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "tie_word_embeddings": True,
}
_TIED = {"tie_word_embeddings": True}
_LLAMA_32 = {"rope_factor": 32.0, **_TIED}
_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _model(128256, 4096, 14336, 32, 32, 8, rope_factor=8.0),
    # It needs fewer layers: all 80 do not fit on one GPU.
    "llama-3.1-70b": _model(128256, 8192, 28672, 80, 64, 8, rope_factor=8.0),
    "llama-3.2-1b": _model(128256, 2048, 8192, 16, 32, 8, head_dim=64, **_LLAMA_32),
    "llama-3.2-3b": _model(128256, 3072, 8192, 28, 24, 8, head_dim=128, **_LLAMA_32),
    "qwen2.5-7b": _model(152064, 3584, 18944, 28, 28, 4, **_QWEN),
    "qwen2.5-14b": _model(152064, 5120, 13824, 48, 40, 8, **_QWEN),
    "qwen2.5-32b": _model(152064, 5120, 27648, 64, 40, 8, **_QWEN),
    "qwen3.5-9b": _model(
        248320, 4096, 12288, 32, 16, 4, positions=262144, eps=1e-6, **_QWEN_35
    ),
    "qwen3-30b-a3b": _model(151936, 2048, 6144, 48, 32, 4, **_QWEN_3_MOE),
    "qwen3.6-35b-a3b": _model(
        248320, 2048, None, 40, 16, 2, positions=262144, eps=1e-6, **_QWEN_36_MOE
    ),
    "gemma-4-31b": _model(
        262144, 5376, 21504, 60, 32, 16, positions=262144, eps=1e-6, **_GEMMA_4
    ),
    # Experts of the width of the hidden states.
    "gpt-oss-20b": _model(
        *(201088, 2880, 2880, 24, 64, 8),
        model_type="gpt_oss",
        head_dim=64,
        num_local_experts=32,
        theta=150000.0,
    ),
    "smollm2-135m": _model(
        49152, 576, 1536, 30, 9, 3, positions=8192, theta=100000.0, **_TIED
    ),
    # The smallest model that the fused kernels support.
    "wide-2": _model(288, 256, 320, 2, 4, 2, positions=512, theta=10000.0, **_TIED),
    # It runs on any device, for tests.
    "tiny": _model(320, 64, 128, 2, 4, 2, positions=2048, theta=10000.0, **_TIED),
}
MODELS = tuple(_MODELS)
ANY_DEVICE = ("tiny", "wide-2")  # models small enough to be timed without a GPU
LARGE = "llama-3.1-8b"  # the model whose layers kernel benchmarks time
LinearGroup = tuple[int, tuple[int, ...]]  # K, and N of all linears with this input


def config_json(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """Returns a model's config.json, optionally with another number of layers."""
    config = dict(_MODELS[name])
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    return config


def linear_groups(name: str) -> tuple[LinearGroup, ...]:
    """Returns the linears of a model's layer, grouped by their shared inputs.

    The groups are: q, k and v; o; gate and up; down.
    """
    config = _MODELS[name]
    width, mlp_width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", width // heads)
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    return (
        (width, (q, kv, kv)),
        (q, (width,)),
        (width, (mlp_width, mlp_width)),
        (mlp_width, (width,)),
    )


def products(name: str) -> tuple[tuple[int, int], ...]:
    """Returns (K, N) of the distinct products `x W` and `dy W'` of a model's layer."""
    shapes = ((k, n) for k, widths in linear_groups(name) for n in widths)
    return tuple(dict.fromkeys(s for k, n in shapes for s in ((k, n), (n, k))))


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """Linears that are timed together.

    Attributes:
        name: Name in tables.
        tokens: T, the number of token rows.
        groups: K and the widths N of linears that share an input.
        ranks: Rank of each adapter. The adapters share the tokens equally.
        rate: Dropout rate.
    """

    name: str
    tokens: int
    groups: tuple[LinearGroup, ...]
    ranks: tuple[int, ...] = (16,)
    rate: float = 0.1


_SQUARE = ((4096, (4096,)),)
_FOUR = (16,) * 4
KERNEL_CASES = (
    KernelCase("4096x4096, 1 adapter", 8192, _SQUARE),
    KernelCase("4096x4096, 4 adapters", 8192, _SQUARE, _FOUR),
    KernelCase("4096x4096, 4 adapters, no dropout", 8192, _SQUARE, _FOUR, 0.0),
    KernelCase("4096x14336, 4 adapters", 8192, ((4096, (14336,)),), _FOUR),
    KernelCase("14336x4096, 4 adapters", 8192, ((14336, (4096,)),), _FOUR),
    KernelCase("16384 tokens, 4096x4096, 4 adapters", 16384, _SQUARE, _FOUR),
    KernelCase("4096x1024, 4 adapters", 8192, ((4096, (1024,)),), _FOUR),
    KernelCase(
        "Llama-3.1-8B layer, ranks 8 to 64", 8192, linear_groups(LARGE), (8, 16, 32, 64)
    ),
    KernelCase("32 adapters of rank 64, 256 tokens each", 8192, _SQUARE, (64,) * 32),
    KernelCase("4 adapters of rank 8", 8192, _SQUARE, (8,) * 4),
    KernelCase("3 adapters of rank 8, one of rank 128", 8192, _SQUARE, (8, 8, 8, 128)),
    KernelCase("4 adapters of rank 128", 8192, _SQUARE, (128,) * 4),
    KernelCase("Llama-3.1-8B layer, 4 adapters", 8192, linear_groups(LARGE), _FOUR),
    KernelCase("2048 tokens, 4096x4096, 4 adapters", 2048, _SQUARE, _FOUR),
    KernelCase("21504 tokens, 4096x4096, 4 adapters", 21504, _SQUARE, _FOUR),
    KernelCase("32768 tokens, 4096x4096, 4 adapters", 32768, _SQUARE, _FOUR),
    KernelCase("64 adapters of rank 16", 8192, _SQUARE, (16,) * 64),
    KernelCase("128 adapters of rank 16", 8192, _SQUARE, (16,) * 128),
)
