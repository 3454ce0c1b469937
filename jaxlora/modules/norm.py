"""RMS norm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.modules.base_param import BaseParam
from jaxlora.modules.rowwise import NormRows, inverse_rms, sum_of_squares
from jaxlora.pallas_kernels import norm_gradient, unsupported_norm_gradient
from jaxlora.pallas_kernels.varying import vary, varying_axes


class RmsNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` (arXiv 1910.07467).

    With `offset`, as in Gemma, the factor is `1 + scale`, so a scale of 0 changes
    nothing.
    """

    def __init__(
        self, features: int, *, eps: float, offset: bool = False, dtype: jnp.dtype
    ):
        fill = jnp.zeros if offset else jnp.ones
        self.scale = BaseParam(fill((features,), dtype))
        self.eps, self.offset = eps, offset

    @property
    def rows(self) -> NormRows:
        """The norm as a row-wise function."""
        return NormRows(self.eps, self.offset)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return rms_norm(x, self.scale[...], self.eps, self.offset)

    def of_residual(
        self, h: Float[Array, "T D"], implementation: str, w: Any = None
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Returns h, and its normalized rows.

        Where the back end has a kernel for it, the gradients of both are added up in
        one pass over memory. So the h that is returned must take the place of h.

        Args:
            h: Rows to normalize, which also go on to the residual sum.
            implementation: Name of the kernel back end.
            w: The frozen weight of a linear behind the norm, or None.
        """
        if unsupported_norm_gradient(h, w, implementation=implementation) is not None:
            return h, self(h)
        arrays = h, self.scale[...]
        arrays = vary(arrays, varying_axes(arrays))
        return _residual_norm(self.rows, implementation, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    eps: float,
    offset: bool = False,
) -> Float[Array, "*B D"]:
    """Normalizes rows in float32; the backward pass keeps x and no more.

    Without `offset` the normalized row is rounded to the dtype of x before it is
    multiplied by the scale, and with it after, as in transformers.

    Args:
        x: Rows to normalize.
        scale: Factor of each feature, or the factor less 1.
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`.
    """
    return NormRows(eps, offset)(x, sum_of_squares(x), scale)[0]


def _forward(x, scale, eps, offset):
    return rms_norm(x, scale, eps, offset), (x, scale)


def rms_norm_gradient(
    eps: float,
    offset: bool,
    residuals: tuple[Float[Array, "*B D"], Float[Array, " D"]],
    dy: Float[Array, "*B D"],
) -> tuple[Float[Array, "*B D"], Float[Array, " D"]]:
    """Returns the gradients of x and of the scale, which are the residuals."""
    x, scale = residuals
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = inverse_rms(sum_of_squares(x), x.shape[-1], eps)
    factor = scale.astype(jnp.float32)
    dnormed = dy * (1 + factor if offset else factor)
    # This sum does not depend on another one, so XLA needs a single pass over x.
    along = inverse * inverse * jnp.mean(dnormed * wide, axis=-1, keepdims=True)
    dx = inverse * (dnormed - along * wide)
    dscale = jnp.sum(dy * (wide * inverse), axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_forward, rms_norm_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _residual_norm(rows, implementation, h, scale):
    del implementation
    return h, rms_norm(h, scale, rows.eps, rows.offset)


def _residual_forward(rows, implementation, h, scale):
    return _residual_norm(rows, implementation, h, scale), (h, scale)


def residual_norm_gradient(
    rows: NormRows,
    implementation: str,
    residuals: tuple[Float[Array, "T D"], Float[Array, " D"]],
    gradients: tuple[Float[Array, "T D"], Float[Array, "T D"]],
) -> tuple[Float[Array, "T D"], Float[Array, " D"]]:
    """Returns the gradients of h and of the scale, which are the residuals.

    Args:
        rows: The norm.
        implementation: Name of the kernel back end.
        residuals: h and the scale.
        gradients: Those of h and of its normalized rows.
    """
    (h, scale), (dh, dx) = residuals, gradients
    own, dscale = rms_norm_gradient(rows.eps, rows.offset, residuals, dx)
    if unsupported_norm_gradient(h, implementation=implementation) is not None:
        return dh + own, dscale
    given = dict(eps=rows.eps, offset=rows.offset, implementation=implementation)
    return norm_gradient(h, scale, dx, dh, **given), dscale


_residual_norm.defvjp(_residual_forward, residual_norm_gradient)
