"""The models that training benchmarks run, with random weights made on the device."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields of config.json, which transformers reads as well.
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
    "llama-3.1-70b": {  # with fewer layers: 80 do not fit one GPU
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
    "tiny": {
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
SCORES = 2.0  # standard deviation of attention's scores


def config_json(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """A model's config.json, with another number of layers if asked for."""
    config = dict(_MODELS[name])
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return config


def random_base(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """Weights that keep activations near 1, and gradients as different as in training.

    At its power limit, a device multiplies numbers faster that resemble each other.
    Where scores of attention have a standard deviation of 1, attention is so even that
    gradients of a sample's prompt do (mean cosine 0.2 to 0.4, where a trained
    SmolLM2-135M has 0.02 to 0.12). A standard deviation of 2 makes them as different.
    """
    base = {}
    for i, (path, like) in enumerate(shapes.items()):
        if path.endswith("norm.scale"):
            base[path] = jnp.ones(like.shape, like.dtype)
        elif path.endswith(".bias"):
            base[path] = jnp.zeros(like.shape, like.dtype)
        else:
            inputs = like.shape[-1 if path.startswith("embed") else -2]
            scale = inputs**-0.5
            if path.endswith(("q_proj.kernel", "k_proj.kernel")):
                scale *= SCORES**0.5
            key = jax.random.fold_in(jax.random.key(0), i)
            base[path] = _normal(key, scale, like.shape, like.dtype)
    return base


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(key, scale, shape, dtype):
    return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)
