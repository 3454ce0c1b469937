"""Bridges: other jobs run between two batches of a job with more work than all others.

A pipeline drains between two batches of a job that runs alone. If other jobs run in
between, with microbatches about as large as those around them, it drains after two
batches instead of one: the first batch is only the rising half of a ramp, and the
second one only the falling half.

The others have too little work to bridge all gaps, so their work has a price. The gaps
that are bridged, and the heights of the bridges, are those that save the most time
beyond the price. The price is the one at which the bridges take all of the others'
work.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack.fill import fill_slot
from jaxlora.scheduler.pack.jobs import Item, JobQueue, WorkModel, job_batches
from jaxlora.scheduler.pack.ramps import Ramps
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    batches_by_job,
    in_order,
)

# Work of the smallest microbatch of a batch, relative to that of its largest.
_ENDS = (0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
# Numbers of microbatches that are tried, beyond the fewest, in units of stages. They
# are a quarter of a stage apart.
_MAX_MORE = 2
# Halvings of the interval that holds the price.
_HALVINGS = 24

# The items of each microbatch.
_Split = list[list[Item]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The ways to split a batch into microbatches that rise in size.

    Attributes:
        splits: The ways.
        sizes: Padded tokens of each microbatch, after no-ops, and sums of the squared
            sample lengths [2, ticks, ways].
        top: Work of the last and largest microbatch [ways].
    """

    splits: list[_Split]
    sizes: np.ndarray
    top: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """The ways to join two batches, and where the other jobs run between them.

    Attributes:
        sides: The splits of the first batch, and of the second one from its end.
        saved: How much less time they take than the two batches alone [ways]. Way i * n
            + j has split i of the first batch and split j of the n of the second.
        levels: Work of the others in each tick between them [ticks, ways].
    """

    sides: tuple[_Side, _Side]
    saved: np.ndarray
    levels: np.ndarray

    def splits(self, way: int) -> tuple[_Split, _Split]:
        """Returns the microbatches of both batches."""
        first, second = self.sides
        i, j = divmod(way, len(second.splits))
        return first.splits[i], second.splits[j][::-1]


def pack(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline, cost: CostModel
) -> list[Microbatch] | None:
    """Packs the job with the most work, and the others between its batches.

    Returns:
        The microbatches, with no-ops; None if no job has more work than all others
        together, or if the others have more work than bridges can take.
    """
    model, jobs = WorkModel.from_cost(cost), batches_by_job(samples)
    work = {
        job: sum(model.item(sample)[0] for batch in batches for sample in batch)
        for job, batches in jobs.items()
    }
    long = max(work, key=work.__getitem__)
    total = sum(work.values()) - work[long]
    if not 0 < total < work[long]:
        return None
    ramps = Ramps(limits, pipeline, cost)
    batches = [list(map(model.item, batch)) for batch in jobs[long]]
    for items in batches:
        items.sort(key=lambda item: (-item[0], item[2].index))
    alone = [ramps.shortest(items) for items in batches]
    sides = [_side(items, ramps, limits, pipeline) for items in batches]
    pairs = [
        _pair(both, first[1] + second[1], ramps, limits, pipeline)
        for both, (first, second) in zip(
            itertools.pairwise(sides), itertools.pairwise(alone), strict=True
        )
    ]
    per_token = sum(s.forward.per_token + s.backward.per_token for s in cost.stages)
    chosen = _buy(pairs, total, per_token)
    if chosen is None:
        return None
    splits = [
        [[items[i] for i in part] for part in split]
        for items, (split, _) in zip(batches, alone, strict=True)
    ]
    others = [s for s in samples if s.owner != long]
    lanes = Lanes(pipeline=pipeline)
    queue = JobQueue.of(job_batches(others), limits, lanes, cost)
    slots = _joined(splits, pairs, chosen, queue, total, limits, pipeline.distance)
    return [in_order(item[2] for item in items) for items in slots]


def _joined(
    alone: Sequence[_Split],
    pairs: Sequence[_Pair],
    chosen: dict[int, int],
    queue: JobQueue,
    total: float,
    limits: Limits,
    distance: int,
) -> _Split:
    """Returns the items of each slot; the other jobs are advanced to their ends."""
    out: _Split = []
    # Samples are not divisible, so the following ticks share what one tick lacks.
    planned = sum(float(pairs[i].levels[:, way].sum()) for i, way in chosen.items())
    batch = 0
    while batch < len(alone):
        if out:
            out += [[]] * (distance - 1)
        if batch not in chosen:
            out += alone[batch]
            batch += 1
            continue
        first, second = pairs[batch].splits(chosen[batch])
        levels = pairs[batch].levels[:, chosen[batch]]
        out += first
        for level in levels:
            target = max(limits.block_tokens, int(level * total / planned))
            out.append(fill_slot(queue, len(out), target, limits, distance))
            total -= sum(item[0] for item in out[-1])
            planned -= level
        while queue and batch == max(chosen):
            target = max(limits.block_tokens, int(levels.max()))
            out.append(fill_slot(queue, len(out), target, limits, distance))
        out += second
        batch += 2
    return out


def _side(items: list[Item], ramps: Ramps, limits: Limits, pipeline: Pipeline) -> _Side:
    """Returns the ways to split a batch, whose items are in descending order.

    A way is kept if none that takes less time, with both batches of a pair split alike,
    has room for as much work of the others.
    """
    fewest = ramps.fewest(items)
    most = max(fewest, min(len(items), fewest + _MAX_MORE * pipeline.num_stages))
    found: dict[tuple, list[list[int]]] = {}
    for num in range(fewest, most + 1, max(1, pipeline.num_stages // 4)):
        for end in _ENDS if num > 1 else (1.0,):
            shape = np.linspace(end, 1.0, num)
            split = ramps.assign(items, (shape / shape.sum()).tolist())
            if split is not None:
                split.sort(key=lambda part: sum(items[i][0] for i in part))
                found[tuple(map(tuple, split))] = split
    splits = [[[items[i] for i in part] for part in split] for split in found.values()]
    if not splits:
        splits = [[[item] for item in reversed(items)]]
    sizes = np.zeros((2, max(map(len, splits)), len(splits)))
    for k, split in enumerate(splits):
        for m, part in enumerate(reversed(split), 1):
            sizes[0, -m, k] = limits.padded(sum(item[1] for item in part))
            sizes[1, -m, k] = sum(item[1] ** 2 for item in part)
    top = np.array([sum(item[0] for item in split[-1]) for split in splits])
    between = np.tile(np.minimum(top, limits.capacity), (pipeline.distance - 1, 1))
    middle = np.stack([between, np.zeros_like(between)])
    both = np.concatenate([sizes, middle, sizes[:, ::-1]], axis=1)
    times = ramps.makespans(both)
    order = np.lexsort((-top, times))
    most_before = np.maximum.accumulate(np.append(0, top[order][:-1]))
    best = order[top[order] > most_before]
    splits = [splits[k] for k in best]
    return _Side(splits, sizes[:, :, best], top[best])


def _pair(
    sides: tuple[_Side, _Side],
    alone: float,
    ramps: Ramps,
    limits: Limits,
    pipeline: Pipeline,
) -> _Pair:
    """Returns the ways to join two batches, which take the time `alone` apart."""
    a, b = sides
    num_a, num_b = len(a.splits), len(b.splits)
    part = np.arange(1, pipeline.distance)[:, None] / pipeline.distance
    tops = np.repeat(a.top, num_b), np.tile(b.top, num_a)
    levels = np.minimum((1 - part) * tops[0] + part * tops[1], limits.capacity)
    middle = np.stack([levels, np.zeros_like(levels)])
    first, second = np.repeat(a.sizes, num_b, axis=2), np.tile(b.sizes[:, ::-1], num_a)
    sizes = np.concatenate([first, middle, second], axis=1)
    return _Pair(sides, alone - ramps.makespans(sizes), levels)


def _buy(
    pairs: Sequence[_Pair], total: float, per_token: float
) -> dict[int, int] | None:
    """Chooses the pairs, and how they are joined, that save the most time.

    Args:
        pairs: The pairs of consecutive batches. No batch is in two of them.
        total: Work of the other jobs.
        per_token: Time that a token takes on all stages.

    Returns:
        The way of each chosen pair, by the number of its first batch; None if the other
        jobs have more work than all pairs take.
    """
    between = [pair.levels.sum(axis=0) for pair in pairs]

    def at(price: float) -> tuple[dict[int, int], float]:
        values = [p.saved + price * w for p, w in zip(pairs, between, strict=True)]
        ways = [int(np.argmax(value)) for value in values]
        best = [0.0] * (len(pairs) + 2)  # from each batch on
        for i in reversed(range(len(pairs))):
            best[i] = max(best[i + 1], float(values[i][ways[i]]) + best[i + 2])
        chosen, i = {}, 0
        while i < len(pairs):
            if best[i] > best[i + 1]:
                chosen[i] = ways[i]
                i += 1
            i += 1
        return chosen, sum(float(between[i][way]) for i, way in chosen.items())

    low, high = 0.0, per_token
    if at(high)[1] < total:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] < total else (low, middle)
    return at(high)[0]
