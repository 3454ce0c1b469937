"""NaN, infinity and overflow in weights, found by one cheap reduction."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jaxlora.errors import JaxloraError


def largest(array: np.ndarray) -> np.ndarray:
    """The element of the largest magnitude, where infinity tops all and NaN infinity.

    Without their signs, the bits of floats have the order of their magnitudes. Integers
    are compared several times as fast as floats are classified, bfloat16 above all.
    """
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    magnitude = unsigned.type(2 ** (8 * unsigned.itemsize - 1) - 1)
    bits = np.bitwise_and(array.view(unsigned), magnitude).max(initial=0)
    return np.asarray(bits, unsigned).view(array.dtype)


def check_finite(
    peaks: np.ndarray | Iterable[np.ndarray],
    where: str,
    kind: type[JaxloraError],
    dtype: np.dtype | None = None,
) -> None:
    """Refuses a tensor that holds NaN or infinity, or whose cast would.

    Args:
        peaks: The tensor itself, or what `largest` says of its parts.
        where: Its file and name, for the error.
        kind: What to raise.
        dtype: What the tensor will be cast to; None: nothing.

    Raises:
        JaxloraError: Of `kind`.
    """
    peak = largest(peaks if isinstance(peaks, np.ndarray) else np.array([*peaks]))
    if not np.isfinite(peak.astype(np.float64)):
        what = "NaN" if np.isnan(peak.astype(np.float64)) else "infinity"
        raise kind(
            f"{where} holds {what}, so nothing can be computed with it. The file is "
            "damaged, or what wrote it had diverged: use another copy or checkpoint."
        )
    with np.errstate(over="ignore"):
        is_finite = dtype is None or np.isfinite(peak.astype(dtype).astype(np.float64))
    if not is_finite:
        raise kind(
            f"{where} holds a value of magnitude {float(peak):.4g}, which overflows "
            f"{jnp.dtype(dtype).name}. Choose a dtype of a wider range."
        )
