"""The one tolerance rule of this repository."""

import jax.numpy as jnp
import numpy as np


def assert_as_accurate_as(*, actual, baseline, exact, factor: float = 2.0) -> None:
    """`actual` errs at most `factor` times as much as plain JAX does in its dtype.

    Args:
        actual: The result on trial.
        baseline: The same mathematics in plain JAX, in `actual`'s dtype.
        exact: The definition in float32 or better.
        factor: How many times the baseline's largest error is allowed.
    """
    if actual.shape != exact.shape or actual.dtype != baseline.dtype:
        raise AssertionError(f"{actual.shape=} {actual.dtype=} vs {exact.shape=}")
    exact = np.asarray(exact, np.float64)
    error = np.max(np.abs(np.asarray(actual, np.float64) - exact))
    allowed = factor * np.max(np.abs(np.asarray(baseline, np.float64) - exact))
    # Where the baseline is the definition itself, allow its rounding in float32.
    allowed += 8 * float(jnp.finfo(jnp.float32).eps) * np.max(np.abs(exact))
    if not error <= allowed:
        raise AssertionError(f"max |error| {error:.3e} > allowed {allowed:.3e}")


def relative_error(actual, wanted) -> float:
    """Largest difference over the largest wanted magnitude."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape, f"{actual.shape} != {wanted.shape}"
    scale = np.max(np.abs(wanted), initial=np.finfo(np.float64).tiny)
    return float(np.max(np.abs(actual - wanted), initial=0.0) / scale)
