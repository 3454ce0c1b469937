"""Sends the samples of a step to replicas so that all of them end together.

Longest first, each sample goes to the replica that would end first, among those of the
kinds on which it is about cheapest by the prices of the lower bound. Then samples move
off the replica that ends last, or change places with shorter ones. This is pure: the
same deployment, lengths and start give the same replicas.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.replicas.bound import (
    bound_of,
    free_at,
    priced,
    sample_seconds,
)
from jaxlora.scheduler.replicas.problem import Deployment

_TOLERANCE = 0.01  # of prices above the cheapest one
_CLOSE = 1 + 2e-4  # to the bound; better is not sought
_MAX_MOVES = 300
_NUM_RECEIVERS = 4  # replicas of each kind with the least to do, for exchanges


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Dispatch:
    """The replica of each sample of a step.

    Attributes:
        deployment: The replicas.
        replica_of: Number of the replica of each sample [samples].
        ends: Seconds at which each replica has done its samples; one without samples
            ends when it started [replicas].
        bound: Lower bound of the time of any dispatch, in seconds.
    """

    deployment: Deployment
    replica_of: np.ndarray
    ends: np.ndarray
    bound: float

    @property
    def seconds(self) -> float:
        """Seconds until the last replica has done its samples."""
        return float(self.ends.max())

    @property
    def idle(self) -> float:
        """Share of the GPUs' time, until the last one ends, in which they wait."""
        sizes = np.array([kind.num_gpus for kind in self.deployment.replicas])
        total = sizes.sum() * self.seconds
        return float(1 - (sizes * self.ends).sum() / total) if total else 0.0


def dispatch(
    deployment: Deployment,
    lengths: Sequence[int] | np.ndarray,
    *,
    start: Sequence[float] | np.ndarray | None = None,
) -> Dispatch:
    """Sends the samples of a step to replicas.

    Args:
        deployment: The replicas.
        lengths: Length of each sample, in tokens.
        start: Seconds at which each replica is free; None: at once.

    Raises:
        ValueError: A sample fits into no replica.

    References:
        LobRA, https://doi.org/10.14778/3742728.3742752, section 4.3, whose integer
        program divides buckets of padded samples among kinds of replicas instead.
    """
    lengths = np.asarray(lengths)
    seconds = sample_seconds(deployment, lengths)
    free = free_at(deployment, start)
    bound = bound_of(deployment, seconds, free, lengths)
    prices = priced(bound.prices, seconds)
    may = prices <= (1 + _TOLERANCE) * prices.min(axis=0)
    replica_of = _place(
        deployment.kind_of, np.where(may, seconds, np.inf), free, lengths
    )
    placed = _Placement(deployment.kind_of, seconds, free, replica_of)
    placed.improve(bound.seconds * _CLOSE)
    return Dispatch(
        deployment=deployment,
        replica_of=placed.replica_of,
        ends=placed.ends(start),
        bound=bound.seconds,
    )


class _Placement:
    """Samples on replicas, and when each replica would end."""

    def __init__(
        self,
        kind_of: np.ndarray,
        seconds: np.ndarray,
        free: np.ndarray,
        replica_of: np.ndarray,
    ):
        self._kind_of, self._seconds, self._free = kind_of, seconds, free
        self.replica_of = replica_of
        own = seconds[kind_of[replica_of], np.arange(len(replica_of))]
        self._load = free + np.bincount(replica_of, own, len(free))
        self._used = np.bincount(replica_of, minlength=len(free)) > 0

    @property
    def last(self) -> float:
        """Seconds at which the last replica with samples ends."""
        return float(self._load[self._used].max(initial=0.0))

    def ends(self, start: Sequence[float] | np.ndarray | None) -> np.ndarray:
        """Returns the end of each replica, which is its start if it has no samples."""
        begun = 0.0 if start is None else np.asarray(start, float)
        return np.where(self._used, self._load, begun)

    def improve(self, goal: float) -> None:
        """Moves samples off the replica that ends last until it ends at the goal."""
        for _ in range(_MAX_MOVES):
            if self.last <= goal:
                return
            source = int(np.argmax(np.where(self._used, self._load, -1.0)))
            own = np.flatnonzero(self.replica_of == source)
            if not (self._move(source, own) or self._exchange(source, own)):
                return

    def _move(self, source: int, own: np.ndarray) -> bool:
        """Moves one sample to the replica where both then end first."""
        kept = self._load[source] - self._seconds[self._kind_of[source], own]
        there = self._load[:, None] + self._seconds[:, own][self._kind_of]
        there[source] = np.inf
        later = np.maximum(kept, there)
        target, i = np.unravel_index(int(later.argmin()), later.shape)
        if not later[target, i] < self._load[source] * (1 - 1e-12):
            return False
        self._put(int(own[i]), source, int(target))
        return True

    def _exchange(self, source: int, own: np.ndarray) -> bool:
        """Exchanges a sample for one of a replica that ends early."""
        may_give = np.zeros(len(self._load), bool)
        by_load = np.argsort(self._load, kind="stable")
        for kind in np.unique(self._kind_of):
            if np.isfinite(self._seconds[kind, own]).any():
                of_kind = by_load[self._kind_of[by_load] == kind]
                may_give[of_kind[:_NUM_RECEIVERS]] = True
        others = np.flatnonzero(may_give[self.replica_of])
        if not len(others):
            return False
        targets = self.replica_of[others]
        kinds = self._kind_of[targets]
        here, last = self._kind_of[source], self._load[source]
        change = self._seconds[here, others] - self._seconds[here, own][:, None]
        with np.errstate(invalid="ignore"):
            there = self._seconds[kinds[None], own[:, None]]
            there = self._load[targets] + there - self._seconds[kinds, others]
            later = np.maximum(last + change, there)
        later[~np.isfinite(later)] = np.inf
        later[:, targets == source] = np.inf
        i, j = np.unravel_index(int(later.argmin()), later.shape)
        if not later[i, j] < last * (1 - 1e-12):
            return False
        target = int(targets[j])
        self._put(int(own[i]), source, target)
        self._put(int(others[j]), target, source)
        return True

    def _put(self, sample: int, source: int, target: int) -> None:
        self.replica_of[sample] = target
        for replica, sign in ((source, -1), (target, 1)):
            own = self._seconds[self._kind_of[replica], sample]
            self._load[replica] += sign * own
        self._used[target] = True
        self._used[source] = bool((self.replica_of == source).any())
        if not self._used[source]:
            self._load[source] = self._free[source]


def _place(
    kind_of: np.ndarray, seconds: np.ndarray, free: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Places samples, the longest first, each on the replica that would end first.

    Args:
        kind_of: Kind of each replica.
        seconds: Seconds of each sample on each kind; infinite if it may not go there
            [kinds, samples].
        free: Seconds at which each replica can begin.
        lengths: Length of each sample.

    Returns:
        The replica of each sample [samples].
    """
    heaps: list[list[tuple[float, int]]] = [[] for _ in seconds]
    for replica, i in enumerate(kind_of.tolist()):
        heapq.heappush(heaps[i], (float(free[replica]), replica))
    order = np.argsort(-lengths, kind="stable")
    columns = seconds.T.tolist()
    replica_of = np.zeros(seconds.shape[1], int)
    for s in order.tolist():
        ends = [heap[0][0] + own for heap, own in zip(heaps, columns[s], strict=True)]
        at = ends.index(min(ends))
        replica_of[s] = heaps[at][0][1]
        heapq.heapreplace(heaps[at], (ends[at], heaps[at][0][1]))
    return replica_of
