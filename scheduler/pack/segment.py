"""Simulates many variants of some ticks of a schedule at once."""

import functools

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Pipeline

# Forward and backward times [stages, variants], and the time of a transfer from the
# neighboring stage [variants]. None is a no-op in all variants.
_Tick = tuple[np.ndarray, np.ndarray, np.ndarray] | None


class Segment:
    """Consecutive ticks of a schedule, whose variants are simulated together.

    The makespan of `simulate.simulate` is the longest path through the passes. The
    paths before the segment and after it are computed once, so a variant only costs the
    passes in between.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        first: int,
        last: int,
        cost: CostModel,
        pipeline: Pipeline,
    ):
        """Simulates the ticks before and after the segment.

        Args:
            sizes: Tokens of each tick of the schedule, padded to blocks, of which a
                no-op has none; and sums of the squared sample lengths [2, ticks].
            first: First tick of the segment.
            last: Tick after the last one of the segment.
            cost: Times of the passes.
            pipeline: The pipeline.
        """
        self._cost = cost
        self._smoothing = 0.0
        self._warm_up = [pipeline.warm_up(s) for s in range(cost.num_stages)]
        self._ticks = self._times(sizes[:, :, None])
        self._first, self._last = first, last
        self._start = first - self._warm_up[0]
        clock = [np.zeros(1)] * cost.num_stages
        self._before = self._advance(
            self._ticks, clock, {}, -self._warm_up[0], self._start
        )
        self._tails = self._paths_after()

    def makespans(self, sizes: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
        """Returns the makespan of the whole schedule with each variant of the segment.

        Args:
            sizes: Padded tokens of the segment's ticks, and sums of the squared sample
                lengths [2, ticks, variants].
            smoothing: Paths whose lengths differ by less than this time count together,
                so that the result also decreases if only one of several longest paths
                becomes shorter. With 0, the makespan is exact.
        """
        self._smoothing = smoothing
        ticks = self._ticks.copy()
        ticks[self._first : self._last] = self._times(sizes)
        clock, ends = self._advance(ticks, *self._before, self._start, self._last)
        paths = [c + self._tails[s] for s, c in enumerate(clock)]
        paths += [end + self._tails[key] for key, end in ends.items()]
        return functools.reduce(self._later, paths, np.zeros(sizes.shape[2]))

    def _later(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the maximum, or a smooth approximation that is no smaller."""
        if not self._smoothing:
            return np.maximum(a, b)
        near = np.abs(a - b)
        np.subtract(self._smoothing, near, out=near)
        np.maximum(near, 0, out=near)
        near *= near
        near *= 0.25 / self._smoothing
        near += np.maximum(a, b)
        return near

    def _times(self, sizes: np.ndarray) -> list[_Tick]:
        tokens, squares = sizes
        is_real = tokens > 0
        if self._cost.buckets:
            buckets = np.array((0, *self._cost.buckets))
            shapes = buckets[np.searchsorted(buckets, tokens)]
            tokens = tokens + self._cost.padding * (shapes - tokens)
        forward, backward = self._cost.times(tokens, squares, is_real)
        wait = np.where(is_real, self._cost.communication, -np.inf)
        return [
            (forward[:, m], backward[:, m], wait[m]) if is_real[m].any() else None
            for m in range(len(tokens))
        ]

    def _advance(
        self,
        ticks: list[_Tick],
        clock: list[np.ndarray],
        ends: dict[tuple[int, int], np.ndarray],
        start: int,
        stop: int,
    ) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
        """Runs the passes in the order of `simulate`.

        Args:
            ticks: All ticks.
            clock: Time of each stage.
            ends: For (stage, tick), the end of a forward pass that the next stage has
                not run yet.
            start: Tick of the last stage to start with. Each stage s has run its
                forward passes of the ticks before start + warm_up(s).
            stop: Tick of the last stage to stop before.

        Returns:
            Clocks and ends after these passes.
        """
        clock, ends, last = list(clock), dict(ends), self._cost.num_stages - 1
        for i in range(start, stop):
            for s, warm_up in enumerate(self._warm_up):
                m = i + warm_up
                tick = ticks[m] if 0 <= m < len(ticks) else None
                if tick is not None:
                    begin = clock[s]
                    if s:
                        begin = self._later(begin, ends.pop((s - 1, m)) + tick[2])
                    clock[s] = begin + tick[0][s]
                    if s < last:
                        ends[s, m] = clock[s]
            tick = ticks[i] if i >= 0 else None
            if tick is not None:
                clock[last] = clock[last] + tick[1][last]
                for s in reversed(range(last)):
                    begin = self._later(clock[s], clock[s + 1] + tick[2])
                    clock[s] = begin + tick[1][s]
        return clock, ends

    def _paths_after(self) -> dict[int | tuple[int, int], float]:
        """Computes the longest paths from the segment's end to that of the schedule.

        Returns:
            The length of the path that continues from each stage's clock, by stage, and
            of that from the end of a forward pass to the next stage, by (stage, tick).
        """
        stages, wait = range(self._cost.num_stages), self._cost.communication
        out: dict = dict.fromkeys(stages, 0.0)
        for i in reversed(range(self._last, len(self._ticks))):
            tick, path = self._ticks[i], 0.0
            if tick is not None:
                for s in stages:
                    out[s] = float(tick[1][s, 0]) + max(out[s], path)
                    path = wait + out[s]
            for s in reversed(stages):
                m = i + self._warm_up[s]
                tick = self._ticks[m] if m < len(self._ticks) else None
                if tick is not None:
                    path = out.pop((s, m), 0.0)
                    out[s] = float(tick[0][s, 0]) + max(out[s], path)
                    if s:
                        out[s - 1, m] = wait + out[s]
        return out
