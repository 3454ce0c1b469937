"""The memory of a run as a function of its jobs, fitted while it runs.

A plan estimates what the base, the jobs and a step take. The device then reports its
peak after steps of different kinds, and each report corrects the estimate: the more,
the less certain a part of it was.

References:
    mLoRA, https://arxiv.org/abs/2312.02515, section 3.4 and equation 5: memory is
    b0 + b1 B L + b2 B L^2, with nonnegative coefficients that are fitted to what is
    observed. Here, b0 has a part for each job, and a plan gives a first estimate.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

_MOST_LOADS = 64  # that are remembered; those observed longest ago are forgotten
_NOISE = 0.003  # of observations, as a fraction: fragments, and sizes rounded up
_FEW = 3  # observations, before which the margin is that of a plan
_PLAN_MARGIN, _MARGIN = 0.05, 0.01
_SURPLUS = 1.25  # of a predicted difference


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Sizes that determine the memory of a step.

    Attributes:
        jobs: Jobs that run.
        tokens: Tokens of a microbatch.
        squares: Sum of the squared lengths of its samples; 0 if its memory does not
            depend on them.
    """

    jobs: int
    tokens: int
    squares: int = 0

    @property
    def row(self) -> tuple[float, ...]:
        """The factors of the coefficients."""
        return 1.0, self.jobs, self.tokens, self.squares


@dataclasses.dataclass(frozen=True, slots=True)
class Coefficients:
    """Bytes: `base + per_job * jobs + per_token * tokens + per_square * squares`."""

    base: float
    per_job: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def __post_init__(self):
        if not min(self.row) >= 0 or not np.isfinite(self.row).all():
            raise ValueError(
                f"{self} has a coefficient that is negative or not finite, but a "
                "larger load cannot take less memory."
            )

    @property
    def row(self) -> tuple[float, ...]:
        """The coefficients, in the order of `Load.row`."""
        return self.base, self.per_job, self.per_token, self.per_square

    def __call__(self, load: Load) -> float:
        """Returns the bytes of a load."""
        return float(np.dot(self.row, load.row))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """Standard deviation of the error of each part of a plan's estimate.

    Each is a fraction of the whole estimate at the largest load.
    """

    base: float = 0.5  # a process may hold other arrays
    per_job: float = 0.0005
    per_token: float = 0.05
    per_square: float = 0.01

    @property
    def row(self) -> tuple[float, ...]:
        """The deviations, in the order of `Load.row`."""
        return self.base, self.per_job, self.per_token, self.per_square


class MemoryModel:
    """The memory of a run.

    Attributes:
        coefficients: The present estimate.
    """

    def __init__(
        self,
        planned: Coefficients,
        largest: Load,
        doubt: Doubt | None = None,
        *,
        peak: float = 0.0,
    ):
        """Begins with the estimate of a plan.

        Args:
            planned: The estimate.
            largest: A load that has at least as much of everything as most others.
            doubt: How wrong the estimate may be; None: as `Doubt` says.
            peak: Peak of the device before anything has run, such as that of loading.
        """
        doubt = doubt or Doubt()
        self.coefficients = self._planned = planned
        self._scale = np.maximum(largest.row, 1.0)
        whole = planned(largest)
        self._deviation = np.array(doubt.row) * whole / self._scale
        self._observed: dict[Load, float] = {}
        self._peak = peak

    @property
    def num_observed(self) -> int:
        """Number of loads whose memory is known."""
        return len(self._observed)

    def predict(self, load: Load) -> float:
        """Predicts the peak of a load, in bytes."""
        return self.coefficients(load)

    @property
    def margin(self) -> float:
        """Fraction by which a prediction may be too low."""
        least = _PLAN_MARGIN if self.num_observed < _FEW else _MARGIN
        errors = [b / self.predict(load) - 1 for load, b in self._observed.items()]
        return least + max(errors, default=0.0)

    def bound(self, load: Load) -> float:
        """Returns the bytes that a load is not expected to exceed.

        It is the prediction with its margin; or what another load has taken, and a
        little more than the predicted difference to it, if that is less.
        """
        predicted = self.predict(load)
        others = [
            (1 + _MARGIN) * peak + _SURPLUS * max(0.0, predicted - self.predict(other))
            for other, peak in self._observed.items()
        ]
        return min([(1 + self.margin) * predicted, *others])

    def observe(self, load: Load, peak: float) -> None:
        """Corrects the estimate by the peak that a device reports after a load.

        An allocator's peak never falls: it is that of the largest load so far. So it is
        the load's own only if it has risen, or if it is the first one. Otherwise it
        only bounds what the load takes.

        Args:
            load: What has run.
            peak: The highest number of bytes since the start.
        """
        has_risen = peak > self._peak
        self._peak = max(self._peak, peak)
        if has_risen or self.predict(load) > peak:
            self._observed.pop(load, None)
            self._observed[load] = peak
            while len(self._observed) > _MOST_LOADS:
                del self._observed[next(iter(self._observed))]
            self.coefficients = self._fitted(self._observed)

    def _fitted(self, observed: Mapping[Load, float]) -> Coefficients:
        """Fits nonnegative coefficients to the observations and to the plan."""
        bytes_ = np.array(list(observed.values()))
        weights = 1 / (_NOISE * bytes_)
        x = np.array([load.row for load in observed]) * weights[:, None]
        x = np.concatenate([x, np.diag(1 / self._deviation)])
        y = np.concatenate([bytes_ * weights, self._planned.row / self._deviation])
        # The columns are normalized, because they differ by orders of magnitude.
        size = np.abs(x).max(axis=0)
        return Coefficients(*(_nonnegative_solution(x / size, y) / size).tolist())


def _nonnegative_solution(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Solves a least squares problem of few unknowns, none of which is negative.

    The solution minimizes over those unknowns that are not zero in it, so one of the
    sets of unknowns gives it. SciPy would take longer to import than all of a run's
    fits take.
    """
    best, least = np.zeros(x.shape[1]), float(y @ y)
    for number in range(1, 2 ** x.shape[1]):
        some = [i for i in range(x.shape[1]) if number >> i & 1]
        found = np.linalg.lstsq(x[:, some], y, rcond=None)[0]
        error = float(((x[:, some] @ found - y) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(x.shape[1]), error
            best[some] = found
    return best
