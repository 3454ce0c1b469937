"""Lower bounds of the time of steps on given replicas, and prices that prove them.

Let a step of t seconds serve samples s, each of c[i, s] seconds on a replica of kind i.
For prices y[i] >= 0 of a second of each kind,

    sum over s of (min over kinds i that hold s of y[i] c[i, s])
        <= sum over replicas r of y[kind of r] max(0, t - start[r]),

as each sample is on some replica, which has no more seconds than those after its start.
The smallest t that satisfies this is a lower bound for any prices. The best prices are
the dual solution of a linear program; where all kinds that are busy have costs in
proportion, they are the speeds of the kinds above some length (the closed form: the
work above the length over the speed of the replicas that may take it).
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.optimize

from jaxlora.scheduler.replicas.problem import Deployment, ReplicaKind, check_fit

_STEP_BINS = 48  # of lengths, in the linear program of a step
_BINS = 24  # of lengths, in many steps
_TAILS = 6  # groups of steps by their longest sample


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepBound:
    """A lower bound of the time of a step.

    Attributes:
        seconds: No dispatch ends earlier.
        prices: Prices of a second of each kind [kinds]. Samples go to a kind on which
            they are about cheapest.
    """

    seconds: float
    prices: np.ndarray


def step_bound(
    deployment: Deployment,
    lengths: np.ndarray,
    start: Sequence[float] | np.ndarray | None = None,
) -> StepBound:
    """Bounds the time of a step.

    Args:
        deployment: The replicas.
        lengths: Length of each sample of the step.
        start: Seconds at which each replica is free; None: at once.

    Raises:
        ValueError: A sample fits into no replica.
    """
    seconds = sample_seconds(deployment, lengths)
    return bound_of(deployment, seconds, free_at(deployment, start), lengths)


def sample_seconds(deployment: Deployment, lengths: np.ndarray) -> np.ndarray:
    """Returns the seconds of each sample on each kind [kinds, samples].

    Raises:
        ValueError: A sample fits into no replica.
    """
    longest = int(np.max(lengths, initial=0))
    if longest > deployment.longest:
        raise ValueError(
            f"a sample of {longest} tokens fits into no replica of {deployment}, whose "
            f"longest are {deployment.longest} tokens. Deploy a larger replica."
        )
    return np.stack([kind.seconds(lengths) for kind in deployment.kinds])


def free_at(
    deployment: Deployment, start: Sequence[float] | np.ndarray | None
) -> np.ndarray:
    """Returns when each replica can begin with samples, after its base [replicas]."""
    kinds = deployment.kinds
    bases = np.array([kinds[i].cost.base for i in deployment.kind_of])
    if start is None:
        return bases
    if len(start) != len(bases):
        raise ValueError(
            f"start has {len(start)} numbers, and there are {len(bases)} replicas."
        )
    return bases + np.asarray(start, float)


def bound_of(
    deployment: Deployment, seconds: np.ndarray, free: np.ndarray, lengths: np.ndarray
) -> StepBound:
    """Bounds the time of a step, whose samples take `seconds` [kinds, samples]."""
    kind_of = deployment.kind_of
    if not len(lengths):
        return StepBound(0.0, np.ones(len(seconds)))
    first = np.array([free[kind_of == i].min() for i in range(len(seconds))])
    alone = float((first[:, None] + seconds).min(axis=0).max())
    distinct, at = np.unique(lengths, return_inverse=True)
    limits = [kind.longest for kind in deployment.kinds]
    bins = bin_numbers(distinct, np.bincount(at), limits, _STEP_BINS)[at]
    work = np.stack([np.bincount(bins, row) for row in seconds])
    offsets = np.bincount(kind_of, free)
    dual = divide(work, np.array(deployment.counts, float), offsets)

    def proved_by(prices: np.ndarray) -> float:
        worth = priced(prices, seconds).min(axis=0).sum()
        return float(proved(worth, prices[kind_of], free))

    t, prices = proved_by(dual), dual
    for other in _speeds(deployment, seconds):
        if (more := proved_by(other)) > t:
            t, prices = more, other
    return StepBound(max(t, alone), prices)


def priced(prices: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Multiplies the finite seconds of each kind [kinds, ...] by its price [kinds]."""
    out = np.full_like(seconds, np.inf)
    return np.multiply(prices[:, None], seconds, out=out, where=np.isfinite(seconds))


def proved(
    worth: np.ndarray | float, weights: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Returns the least t with `sum of weights * max(0, t - free)` of at least `worth`.

    Args:
        worth: Price of the samples of one step, or of each of many.
        weights: Price of a second of each replica, or of all replicas of a kind.
        free: Seconds at which they can begin.
    """
    order = np.argsort(free, kind="stable")
    total = np.cumsum(weights[order])
    offsets = np.cumsum((weights * free)[order])
    later = np.append(free[order][1:], np.inf)
    # The first n are busy: worth = total t - offsets, unless another one is, too.
    worth = np.asarray(worth, float)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(total > 0, (worth + offsets) / total, np.inf)
    first = (t <= later).argmax(axis=-1)[..., None]
    return np.where(worth > 0, np.take_along_axis(t, first, axis=-1), 0.0)[..., 0]


def _speeds(deployment: Deployment, seconds: np.ndarray):
    """Yields the prices of the closed form, of each set of the larger kinds."""
    at = np.isfinite(seconds).all(axis=0)
    if not at.any():
        return
    speeds = 1 / seconds[:, at].sum(axis=1)
    limits = np.array([kind.longest for kind in deployment.kinds])
    for limit in sorted({0, *limits.tolist()}):
        prices = np.where(limits > limit, speeds, 0.0)
        if prices.any():
            yield prices


def divide(seconds: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Prices a second of each kind, as bins of samples are divided among the kinds.

    The linear program divides them so that the last replica ends first, and the prices
    are its dual solution [kinds].

    Args:
        seconds: Seconds of all samples of a bin on each kind; infinite if they do not
            fit [kinds, bins].
        counts: Number of replicas of each kind [kinds].
        offsets: Sum of the seconds at which the replicas of each kind can begin.
    """
    kinds, bins = np.nonzero(np.isfinite(seconds))
    columns = np.arange(len(kinds))
    scale = seconds[kinds, bins].mean()
    busy = np.zeros((len(seconds), len(kinds) + 1))
    busy[kinds, columns] = seconds[kinds, bins] / scale
    busy[:, -1] = -counts
    served = np.zeros((seconds.shape[1], len(kinds) + 1))
    served[bins, columns] = 1.0
    goal = np.zeros(len(kinds) + 1)
    goal[-1] = 1.0
    found = scipy.optimize.linprog(
        goal,
        A_ub=busy,
        b_ub=-offsets / scale,
        A_eq=served,
        b_eq=np.ones(seconds.shape[1]),
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"HiGHS stopped with {found.message!r}.")
    return np.maximum(0.0, -found.ineqlin.marginals)


def bin_numbers(
    lengths: np.ndarray, counts: np.ndarray, limits: Sequence[int], num_bins: int
) -> np.ndarray:
    """Sorts lengths into bins of about equal numbers of tokens.

    The samples of a bin fit into the same kinds, and bins are numbered by length from
    zero on, without gaps.

    Args:
        lengths: Different lengths, in ascending order.
        counts: Number of samples of each length.
        limits: Longest length of each kind.
        num_bins: Most bins, beside those that the limits add.
    """
    part = np.arange(len(lengths))
    if len(lengths) > num_bins:
        share = np.cumsum(lengths * counts) / np.dot(lengths, counts)
        part = np.minimum(num_bins - 1, (share * num_bins).astype(int))
    fits = np.searchsorted(np.unique(limits), lengths)
    begins = (np.diff(part, prepend=-1) != 0) | (np.diff(fits, prepend=-1) != 0)
    return np.cumsum(begins) - 1


# ---- many steps ----------------------------------------------------------------------


class Steps:
    """Steps of all jobs together, summed in bins of lengths.

    A deployment is chosen for a hundred steps of data, which have too many samples to
    look at each of them for each deployment.

    Attributes:
        kinds: Kinds of replicas.
        longest: Tokens of the longest sample.
        base: Least base of the kinds, in seconds.
        more: What the base of each kind is more [kinds].
        work_of: Work of each step in each bin, in seconds of one kind [steps, bins].
        work: Its mean over the steps [bins].
        rates: Least seconds of each kind for a unit of the work of a bin's samples;
            infinite if they do not fit [kinds, bins].
        tails: Seconds, beyond the least base, of the longest sample of groups of steps,
            weighted by the group's share of the steps [kinds, groups].
    """

    def __init__(
        self,
        kinds: Sequence[ReplicaKind],
        batches: Sequence[np.ndarray],
        longest: int = 0,
    ):
        """Sums samples; no step is empty. Other steps may have samples up to `longest`.

        Raises:
            ValueError: There are no samples, or the longest one fits into no replica.
        """
        self.kinds = tuple(kinds)
        self.longest = check_fit(kinds, batches, longest)
        bases = np.array([kind.cost.base for kind in kinds])
        self.base = float(bases.min())
        self.more = bases - self.base
        limits = [kind.longest for kind in kinds]
        counts = np.stack([np.bincount(b, minlength=self.longest + 1) for b in batches])
        lengths = np.flatnonzero(counts.sum(axis=0))
        counts = counts[:, lengths]
        bins = bin_numbers(lengths, counts.sum(axis=0), limits, _BINS)
        seconds = np.stack([kind.seconds(lengths) for kind in kinds])
        # Any kind that holds all samples measures their work.
        whole = next(row for row in seconds if np.isfinite(row).all())
        first = np.flatnonzero(np.diff(bins, prepend=-1))
        self.work_of = np.add.reduceat(counts * whole, first, axis=1)
        self.work = self.work_of.mean(axis=0)
        self.rates = np.minimum.reduceat(seconds / whole, first, axis=1)
        last = np.array([int(batch.max()) for batch in batches])
        alone = np.stack([kind.seconds(last) for kind in kinds])
        self._alone = alone + bases[:, None]
        ordered, group = np.unique(last, return_inverse=True)
        bins = bin_numbers(ordered, np.bincount(group), limits, _TAILS)[group]
        beyond = self._alone - self.base
        self.tails = np.stack([np.bincount(bins, row) for row in beyond]) / len(batches)

    def holds_all(self, counts: Sequence[int]) -> bool:
        """Whether some replica holds the longest sample."""
        pairs = zip(self.kinds, counts, strict=True)
        return max((k.longest for k, n in pairs if n), default=0) >= self.longest

    def bounds(self, counts: Sequence[int]) -> np.ndarray:
        """Returns a lower bound of the seconds of each step [steps].

        The replicas, as many of each kind, hold all samples together.
        """
        at = np.flatnonzero(counts)
        replicas = np.asarray(counts, float)[at]
        free, rates = (self.base + self.more)[at], self.rates[at]
        most = self._alone[at].min(axis=0)
        for prices in self._prices(at, replicas, free):
            worth = self.work_of @ priced(prices, rates).min(axis=0)
            most = np.maximum(most, proved(worth, prices * replicas, free))
        return most

    def _prices(
        self, at: np.ndarray, replicas: np.ndarray, free: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yields prices of the kinds: of the mean step, and in the closed form."""
        rates = self.rates[at]
        yield divide(rates * self.work, replicas, free * replicas)
        speeds = 1 / rates[:, np.isfinite(rates).all(axis=0)].mean(axis=1)
        limits = np.array([self.kinds[i].longest for i in at])
        for limit in (0, *np.unique(limits)[:-1].tolist()):
            yield np.where(limits > limit, speeds, 0.0)

    def rough_means(self, counts: np.ndarray) -> np.ndarray:
        """Returns about the mean seconds of the steps, for many deployments at once.

        It is the closed form for all limits of lengths, as if all replicas were busy.
        """
        speeds = 1 / self.rates[:, np.isfinite(self.rates).all(axis=0)].mean(axis=1)
        limits = np.array([kind.longest for kind in self.kinds])
        out = np.where((counts > 0)[:, :, None], self._alone, np.inf).min(axis=1)
        for limit in (0, *np.unique(limits)[:-1].tolist()):
            longer = ~np.isfinite(self.rates[limits <= limit]).any(axis=0)
            own = np.where(limits > limit, speeds, 0.0)
            speed = (counts @ own)[:, None]
            begun = (counts @ (own * (self.base + self.more)))[:, None]
            work = self.work_of[:, longer].sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                ends = np.where(work > 0, (work + begun) / speed, 0.0)
            out = np.maximum(out, ends)
        return out.mean(axis=1)
