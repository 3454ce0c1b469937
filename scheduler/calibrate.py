"""Costs and memory from measured steps: least squares without negative coefficients."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from jaxlora.scheduler.cost import AffineCost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimePoint:
    """A measured pass over samples of so many tokens together.

    Attributes:
        tokens: Tokens of the pass, padding included.
        squares: Sum of squared sample lengths.
        seconds: What it took.
    """

    tokens: int
    squares: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeFit:
    """`mape`: mean absolute error of `cost` at its points, as a share of the time."""

    cost: AffineCost
    mape: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    """The measured peak memory of a step of `batch_size` sequences of one length."""

    batch_size: int
    length: int
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """mLoRA's equation 5: b0 + b1 B L + b2 B L^2, for B sequences of L tokens.

    Attributes:
        base: b0, which the frozen model is in: it counts once, whatever runs on it.
        per_token: b1.
        per_square: b2.

    References:
        mLoRA, https://arxiv.org/abs/2312.02515, section 3.4.
    """

    base: float
    per_token: float
    per_square: float

    def __call__(self, batch_size: int, length: int) -> float:
        return self.of(batch_size * length, batch_size * length**2)

    def of(self, tokens: float, squares: float) -> float:
        """The same for sequences of different lengths."""
        return self.base + self.per_token * tokens + self.per_square * squares


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFit:
    """`mape`: mean absolute error of `model` at its points, as a share of the bytes."""

    model: MemoryModel
    mape: float


def fit_time(points: Sequence[TimePoint]) -> TimeFit:
    """Fits base + per_token * tokens + per_square * squares to measured times.

    Raises:
        ValueError: The points do not tell the three coefficients apart.
    """
    rows = [(1.0, p.tokens, p.squares) for p in points]
    (base, per_token, per_square), mape = _fit(rows, [p.seconds for p in points])
    cost = AffineCost(base=base, per_token=per_token, per_square=per_square)
    return TimeFit(cost=cost, mape=mape)


def fit_memory(points: Sequence[MemoryPoint]) -> MemoryFit:
    """Fits mLoRA's memory model to measured peaks.

    Raises:
        ValueError: The points do not tell the three coefficients apart.
    """
    rows = [(1.0, p.batch_size * p.length, p.batch_size * p.length**2) for p in points]
    (base, per_token, per_square), mape = _fit(rows, [p.num_bytes for p in points])
    model = MemoryModel(base=base, per_token=per_token, per_square=per_square)
    return MemoryFit(model=model, mape=mape)


def _fit(
    rows: Sequence[tuple[float, ...]], measured: Sequence[float]
) -> tuple[list[float], float]:
    x, y = np.array(rows, float), np.array(measured, float)
    if not len(y) or y.min() <= 0 or not np.isfinite(y).all():
        raise ValueError(
            f"measurements must be positive and finite, got {list(measured)}."
        )
    # The columns differ by orders of magnitude.
    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    rank = int(np.linalg.matrix_rank(x / scale))
    if rank < x.shape[1]:
        raise ValueError(
            f"{len(y)} points of {rank} independent shapes do not fit "
            f"{x.shape[1]} coefficients. Measure several numbers of tokens, and one "
            "of them with samples of several lengths."
        )
    # Errors count in shares of the time, as in the reported one.
    solution, _ = scipy.optimize.nnls(x / scale / y[:, None], np.ones_like(y))
    coefficients = solution / scale
    mape = float(np.mean(np.abs(x @ coefficients - y) / y))
    return coefficients.tolist(), mape
