"""RMS norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.modules.multi_lora_linear import BaseParam


class RmsNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, in float32 (arXiv 1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.scale = BaseParam(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        return self.scale[...] * normed.astype(x.dtype)
