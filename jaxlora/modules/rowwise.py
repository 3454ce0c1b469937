"""Row-wise functions of the decoder: norms and gates, in float32 inside.

Each is plain `jax.numpy` on whole rows. Kernels that compute such a function beside the
products of its results are generated from it; see `jaxlora.pallas_kernels.produce`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class NormRows:
    """`x / sqrt(mean(x^2) + eps) * scale`, rounded as in transformers.

    It takes the rows' sums of squares, so that a kernel need not read whole rows first.

    Attributes:
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`; it is then applied before rounding.
    """

    eps: float
    offset: bool = False

    def __call__(
        self,
        x: Float[Array, "*B D"],
        squares: Float[Array, "*B 1"],
        scale: Float[Array, "*C D"],
    ) -> tuple[Float[Array, "*B D"]]:
        normed = x.astype(jnp.float32) * inverse_rms(squares, x.shape[-1], self.eps)
        if self.offset:
            return ((normed * (1 + scale.astype(jnp.float32))).astype(x.dtype),)
        return (scale * normed.astype(x.dtype),)


def sum_of_squares(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """Returns the sum of squares of each row, in float32."""
    wide = x.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=-1, keepdims=True)


def inverse_rms(
    squares: Float[Array, "*B 1"], num_features: int, eps: float
) -> Float[Array, "*B 1"]:
    """Returns `1 / sqrt(mean(x^2) + eps)` of rows with these sums of squares."""
    return jax.lax.rsqrt(squares / num_features + eps)


def swiglu_rows(
    gate: Float[Array, "T F"], up: Float[Array, "T F"]
) -> tuple[Float[Array, "T F"]]:
    """`silu(gate) * up` (arXiv 2002.05202), in float32, rounded once."""
    wide = gate.astype(jnp.float32)
    return ((jax.nn.silu(wide) * up.astype(jnp.float32)).astype(gate.dtype),)


def swiglu_gradient_rows(
    gate: Float[Array, "T F"], up: Float[Array, "T F"], dy: Float[Array, "T F"]
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Returns the gradients of gate and up from that of `swiglu_rows`."""
    wide, dy = gate.astype(jnp.float32), dy.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(wide)
    dup = dy * wide * sigmoid
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    dgate = dy * up.astype(jnp.float32) * slope
    return dgate.astype(gate.dtype), dup.astype(up.dtype)
