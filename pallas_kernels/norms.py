"""Public op: the gradient of a norm, added to the one that its input has already.

The input h of a decoder's norm is also added to the hidden states behind, so its
gradient is a sum. See `Backend.norm_backward` and docs/kernels.md.
"""

import typing
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.backends import get_backend
from jaxlora.pallas_kernels.op import own_settings
from jaxlora.pallas_kernels.varying import vary, varying_axes


def unsupported_norm_gradient(
    h: jax.Array | jax.ShapeDtypeStruct, w: Any = None, *, implementation: str
) -> str | None:
    """Returns why a back end leaves the gradient of a norm of such rows to XLA.

    Args:
        h: The rows that are normalized, or their shape.
        w: The frozen weight of a linear behind the norm, or None.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        The reason as a clause without a full stop; None if it can.
    """
    norm_backward = get_backend(implementation).norm_backward
    if norm_backward is None:
        return f"{implementation} has no such kernel"
    return norm_backward.unsupported(h, w)


@typing.no_type_check  # the shapes are those of the norm
def norm_gradient(
    h: Float[Array, "T D"],
    scale: Float[Array, " D"],
    dx: Float[Array, "T D"],
    dh: Float[Array, "T D"],
    *,
    eps: float,
    offset: bool = False,
    implementation: str,
) -> Float[Array, "T D"]:
    """`dh + inverse * (dnormed - inverse^2 * mean(dnormed * h) * h)`, in one pass.

    Here `inverse = 1 / sqrt(mean(h^2) + eps)` and `dnormed = dx * scale`. Each array is
    read once. The sum is in float32 and rounded once. A row depends on its own rows of
    the arguments alone, and each call gives the same bits.

    Args:
        h: The rows that were normalized.
        scale: Factor of each feature, or the factor less 1.
        dx: Gradient of the normalized rows.
        dh: Gradient that h has from elsewhere.
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`.
        implementation: Name of a kernel back end for which
            `unsupported_norm_gradient` returns None.
    """
    norm_backward = get_backend(implementation).norm_backward
    assert norm_backward is not None
    arrays = h, scale, dx, dh
    axes = varying_axes(arrays)
    with own_settings(jax.config.jax_default_matmul_precision):
        result = norm_backward.gradient(*vary(arrays, axes), eps=eps, offset=offset)
    return vary(result, axes)
