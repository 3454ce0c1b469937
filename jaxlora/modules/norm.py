"""RMS norm."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.config import ModelConfig
from jaxlora.modules.multi_lora_linear import BaseParam


class RmsNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, in float32 (arXiv 1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.scale = BaseParam(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self.scale[...], self.eps)


def make_norm(config: ModelConfig, name: str, *, dtype: jnp.dtype) -> RmsNorm:
    """Makes a norm of a layer, given by its path inside the layer."""
    return RmsNorm(config.norms()[name], eps=config.rms_eps, dtype=dtype)


def optional_norm(
    config: ModelConfig, name: str, *, dtype: jnp.dtype
) -> RmsNorm | None:
    """Makes a norm of a layer as `make_norm` does; None if the family has none."""
    return make_norm(config, name, dtype=dtype) if name in config.norms() else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    """`x / sqrt(mean(x^2) + eps) * scale`; the backward pass keeps x and no more.

    Args:
        x: Rows to normalise.
        scale: Factor of each feature.
        eps: Added to the mean square.
    """
    normed = x.astype(jnp.float32) * _inverse_rms(x, eps)
    return scale * normed.astype(x.dtype)


def _inverse_rms(x, eps):
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def _forward(x, scale, eps):
    return rms_norm(x, scale, eps), (x, scale)


def _backward(eps, residuals, dy):
    x, scale = residuals
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = _inverse_rms(x, eps)
    dnormed = dy * scale.astype(jnp.float32)
    # A sum that needs no other first: XLA makes both in one pass over x.
    along = inverse * inverse * jnp.mean(dnormed * wide, axis=-1, keepdims=True)
    dx = inverse * (dnormed - along * wide)
    dscale = jnp.sum(dy * (wide * inverse), axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)
