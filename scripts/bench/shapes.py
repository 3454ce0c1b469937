"""Shapes that the benchmarks and the kernel tuner share: models and kernel cases."""

import dataclasses
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields of each config.json, in the form that transformers reads too.
_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "llama-3.1-70b": {  # needs fewer layers: all 80 do not fit on one GPU
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-14b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "wide-2": {  # the smallest model that the fused kernels support
        "model_type": "llama",
        "vocab_size": 288,
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {  # runs on any device, for tests
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
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
)
