"""Fits the time of passes to measurements by nonnegative least squares."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from jaxlora.scheduler.cost import AffineCost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimePoint:
    """A measured forward or backward pass.

    Attributes:
        tokens: Tokens of the pass, including padding.
        squares: Sum of squared sample lengths.
        seconds: Measured time.
    """

    tokens: int
    squares: int
    seconds: float


def fit_time(points: Sequence[TimePoint]) -> tuple[AffineCost, float]:
    """Fits `base + per_token * tokens + per_square * squares` to measured times.

    Returns:
        The model in seconds, and its mean absolute percentage error at the measured
        points, as a fraction.

    Raises:
        ValueError: The points do not determine the three coefficients, or a time is not
            positive and finite.
    """
    x = np.array([(1.0, p.tokens, p.squares) for p in points], float)
    y = np.array([p.seconds for p in points], float)
    if not len(y) or y.min() <= 0 or not np.isfinite(y).all():
        raise ValueError(f"measurements must be positive and finite, got {y.tolist()}.")
    # The columns are normalized, because they differ by orders of magnitude.
    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    rank = int(np.linalg.matrix_rank(x / scale))
    if rank < x.shape[1]:
        raise ValueError(
            f"{len(y)} points with {rank} independent shapes cannot determine "
            f"{x.shape[1]} coefficients. Measure several numbers of tokens, and at "
            "least one of them with samples of several lengths."
        )
    # Dividing by the measured value minimizes relative errors, like the reported one.
    solution, _ = scipy.optimize.nnls(x / scale / y[:, None], np.ones_like(y))
    base, per_token, per_square = (solution / scale).tolist()
    cost = AffineCost(base=base, per_token=per_token, per_square=per_square)
    mape = float(np.mean(np.abs(x @ (solution / scale) - y) / y))
    return cost, mape
