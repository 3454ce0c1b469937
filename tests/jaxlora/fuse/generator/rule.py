"""When the results of a fused function are as good as those of the function."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

FACTOR = 2.0  # how many times the original's error is allowed
# Roundings of the result's dtype at its largest value that are allowed beside.
_ULPS = {"bfloat16": 1, "float16": 2, "float32": 8, "float64": 16}


# The largest of fewer errors than this may be small by luck.
_FEW = 16


def relative_error(original: Any, exact: Any, slack: Any) -> float:
    """Returns the largest error of one result over its largest value."""
    if not jnp.issubdtype(original.dtype, jnp.floating):
        return 0.0
    error = np.abs(np.asarray(original).astype(exact.dtype) - exact) - slack
    size = np.max(np.abs(exact), initial=0.0, where=np.isfinite(exact))
    error = np.max(error, initial=0.0, where=np.isfinite(error))
    return float(error / size) if size else 0.0


def faults(
    actual: Any, original: Any, exact: Any, slack: Any, name: str, pooled: float
) -> Sequence[str]:
    """Says what is wrong with one result; nothing if it obeys the rule.

    Args:
        actual: The fused function's result.
        original: The original's result.
        exact: The reference, in float64 or wider.
        slack: How far each element may be from it, for the author's roundings.
        name: The result's name, for the message.
        pooled: The largest relative error of all of the original's results.
    """
    if (actual.shape, actual.dtype) != (original.shape, original.dtype):
        return [
            f"{name}: {actual.dtype}{actual.shape}, not "
            f"{original.dtype}{original.shape}"
        ]
    if not jnp.issubdtype(original.dtype, jnp.floating):
        same = np.array_equal(np.asarray(actual), np.asarray(original))
        return [] if same else [f"{name}: other integers"]
    wide = exact.dtype
    actual, plain = (np.asarray(v).astype(wide) for v in (actual, original))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if not np.array_equal(kind(actual), kind(plain)):
            extra, lost = (
                int(np.sum(one & ~other))
                for one, other in (
                    (kind(actual), kind(plain)),
                    (kind(plain), kind(actual)),
                )
            )
            return [f"{name}: {kind.__name__[2:]} in {extra} more, {lost} fewer places"]
    compared = np.isfinite(plain) & np.isfinite(exact)
    if not compared.any():
        return []
    actual, plain, exact, slack = (
        v[compared] for v in (actual, plain, exact, np.nan_to_num(slack))
    )
    found = []
    filled = (plain == 0) & (exact == 0) & (slack == 0) & (actual != 0)
    if filled.any():
        found.append(f"{name}: {int(filled.sum())} zeros are other numbers")
    dtype = original.dtype
    ulps = _ULPS[dtype.name] * float(jnp.finfo(dtype).eps) * np.max(np.abs(exact))
    of_plain = np.maximum(np.abs(plain - exact) - slack, 0)
    largest = np.max(of_plain)
    if of_plain.size < _FEW:
        largest = max(largest, pooled * np.max(np.abs(exact)))
    allowed = FACTOR * largest + ulps + FACTOR * slack
    error = np.abs(actual - exact)
    if np.any(error > allowed):
        worst = np.argmax(error - allowed)
        found.append(
            f"{name}: error {error[worst]:.2e} > {allowed[worst]:.2e} at a value of "
            f"{exact[worst]:.2e}; the original's largest error is "
            f"{np.max(np.abs(plain - exact)):.2e}"
        )
    return found
