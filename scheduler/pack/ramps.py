"""Ramps: small first and last microbatches for a batch that runs alone.

A batch that has the pipeline to itself leaves stages idle while the pipeline fills and
drains. The larger its first and last microbatches are, the longer they are idle.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.pack.jobs import Item
from jaxlora.scheduler.pack.segment import Segment
from jaxlora.scheduler.types import Limits, Pipeline

# Work of the first and last microbatch, relative to that of the largest, and the part
# of the microbatches before the middle over which it rises.
_ENDS = (0.85, 0.7, 0.55, 0.4, 0.25, 0.15)
_RISES = (0.15, 0.3, 0.5, 0.75, 1.0)
# Numbers of microbatches that are tried, beyond the fewest, in units of stages.
_MAX_MORE = 4
# Profiles that are tried with the items of a batch.
_NUM_TRIED = 8
# Profiles are computed for amounts of work that are powers of this number.
_RATIO = 1.05


class Ramps:
    """Splits batches that run alone into microbatches.

    The number and sizes of the microbatches are chosen by simulation.
    """

    def __init__(self, limits: Limits, pipeline: Pipeline, cost: CostModel):
        """Starts without profiles."""
        self._limits, self._pipeline, self._cost = limits, pipeline, cost
        self._profiles = functools.lru_cache(maxsize=256)(self._best_profiles)

    def split(self, items: Sequence[Item]) -> list[list[int]]:
        """Returns the items of each microbatch of a batch; see `shortest`."""
        return self.shortest(items)[0]

    def shortest(self, items: Sequence[Item]) -> tuple[list[list[int]], float]:
        """Returns the items of each microbatch of a batch, and how long it takes.

        The items are those of the whole batch, in descending order of work.
        """
        work = sum(item[0] for item in items)
        rounded = round(np.log(work) / np.log(_RATIO))
        splits = [
            found
            for profile in self._profiles(rounded, self.fewest(items), len(items))
            if (found := self.assign(items, profile)) is not None
        ]
        if not splits:
            splits = [[[i] for i in range(len(items))]]
        longest = max(map(len, splits))
        sizes = np.zeros((2, longest, len(splits)))
        for k, split in enumerate(splits):
            for m, indices in enumerate(split):
                lengths = [items[i][1] for i in indices]
                sizes[0, m, k] = self._limits.padded(sum(lengths))
                sizes[1, m, k] = sum(n * n for n in lengths)
        times = self.makespans(sizes)
        best = int(np.argmin(times))
        return splits[best], float(times[best])

    def fewest(self, items: Sequence[Item]) -> int:
        """Returns the number of microbatches that a batch takes at least."""
        tokens = self._limits.padded(sum(item[1] for item in items))
        return max(
            -(-tokens // self._limits.capacity),
            math.ceil(len(items) / self._limits.most_samples),
        )

    def makespans(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the makespans of ticks that run alone; see `Segment.makespans`."""
        num = sizes.shape[1]
        alone = Segment(np.zeros((2, num)), 0, num, self._cost, self._pipeline)
        return alone.makespans(sizes)

    def _best_profiles(
        self, rounded: int, fewest: int, num_items: int
    ) -> list[tuple[float, ...]]:
        """Returns the profiles with the shortest makespans for divisible work."""
        most = max(fewest, min(num_items, fewest + _MAX_MORE * self._cost.num_stages))
        shapes = [p for num in range(fewest, most + 1) for p in _profiles(num)]
        sizes = np.zeros((2, most, len(shapes)))
        for k, shape in enumerate(shapes):
            sizes[0, : len(shape), k] = np.array(shape) * _RATIO**rounded
        times = self.makespans(np.minimum(sizes, self._limits.capacity))
        ranked = np.argsort(times, kind="stable")
        # Items are not divisible, so the best profile of each number of microbatches is
        # tried as well.
        of_number = {len(shapes[k]): k for k in reversed(ranked)}
        best = dict.fromkeys([*ranked[:_NUM_TRIED], *of_number.values()])
        return [shapes[k] for k in best]

    def assign(
        self, items: Sequence[Item], profile: Sequence[float]
    ) -> list[list[int]] | None:
        """Gives each item to the microbatch that lacks the most work, by the profile.

        The items are those of the whole batch, in descending order of work.

        Returns:
            The items of each microbatch that has some; None if they do not fit.
        """
        limits, work = self._limits, sum(item[0] for item in items)
        lacks = [work * part for part in profile]
        tokens = [0] * len(profile)
        out: list[list[int]] = [[] for _ in profile]
        for i, (item_work, num_tokens, _) in enumerate(items):
            fitting = (
                m
                for m, held in enumerate(tokens)
                if limits.padded(held + num_tokens) <= limits.capacity
                and len(out[m]) < limits.most_samples
            )
            m = max(fitting, key=lacks.__getitem__, default=None)
            if m is None:
                return None
            out[m].append(i)
            lacks[m] -= item_work
            tokens[m] += num_tokens
        return [indices for indices in out if indices]


@functools.cache
def _profiles(num: int) -> list[tuple[float, ...]]:
    """Returns shares of the work of `num` microbatches: equal ones, and ramps."""
    middle = (num - 1) / 2
    rises = sorted({max(1, round(rise * middle)) for rise in _RISES})
    out = [(1 / num,) * num]
    for end in _ENDS if num > 2 else ():
        for rise in rises:
            shape = [
                min(1.0, end + (1 - end) * min(m, num - 1 - m) / rise)
                for m in range(num)
            ]
            out.append(tuple(part / sum(shape) for part in shape))
    return out
