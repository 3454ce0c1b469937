"""Finds NaN, infinity and overflow in weights by one cheap reduction."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from jaxlora.errors import JaxloraError


def largest(array: np.ndarray) -> np.ndarray:
    """Returns the element of largest magnitude; NaN ranks above infinity.

    The bits of floats, read as integers, are ordered like the floats' magnitudes:
    signed integers for positive floats, unsigned ones for negative floats. Comparing
    integers is many times faster than classifying floats, especially bfloat16.
    """
    signed, unsigned = (np.dtype(f"{k}{array.dtype.itemsize}") for k in "iu")
    sign = 2 ** (8 * unsigned.itemsize - 1)
    positive = int(array.view(signed).max(initial=0))
    negative = int(array.view(unsigned).max(initial=0)) & (sign - 1)
    return np.asarray(max(positive, negative), unsigned).view(array.dtype)


def check_finite(
    peaks: np.ndarray | Iterable[np.ndarray],
    where: str,
    kind: type[JaxloraError],
    dtype: np.dtype | None = None,
) -> None:
    """Refuses a tensor that holds NaN or infinity, or would hold them after a cast.

    Args:
        peaks: The tensor itself, or the results of `largest` for its parts.
        where: File and name of the tensor, for the error.
        kind: Class of the error.
        dtype: Dtype that the tensor will be cast to; None: it is not cast.

    Raises:
        JaxloraError: A value is not finite; the error is of class `kind`.
    """
    peak = largest(peaks if isinstance(peaks, np.ndarray) else np.array([*peaks]))
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(peak.astype(np.float64))
        is_kept = dtype is None or np.isfinite(peak.astype(dtype).astype(np.float64))
    if not np.isfinite(value):
        what = "NaN" if np.isnan(value) else "infinity"
        raise kind(
            f"{where} holds {what}, so nothing can be computed with it. The file is "
            "damaged, or what wrote it had diverged: use another copy or checkpoint."
        )
    if not is_kept:
        raise kind(
            f"{where} holds a value of magnitude {value:.4g}, which overflows "
            f"{jnp.dtype(dtype).name}. Choose a dtype of a wider range."
        )
