"""The samples of many steps, summed in bins of lengths, and bounds of all these steps.

A deployment is chosen for a hundred steps of data, which have too many samples to look
at each of them for each deployment.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxlora.scheduler.replicas.bound import bin_numbers, divide, priced, proved
from jaxlora.scheduler.replicas.problem import ReplicaKind, check_fit

_BINS = 24  # of lengths
_TAILS = 6  # groups of steps by their longest sample


class Steps:
    """Steps of all jobs together.

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
