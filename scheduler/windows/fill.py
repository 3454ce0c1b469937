"""Fills the microbatch of one slot."""

import itertools
from collections.abc import Iterator, Sequence

from jaxlora.scheduler.types import Limits
from jaxlora.scheduler.windows.cursor import Item
from jaxlora.scheduler.windows.job_queue import JobQueue

_MAX_SUBSETS = 6
# Jobs that may be looked at to fill a slot.
_MAX_JOBS = 64


def fill_slot(
    jobs: JobQueue, slot: int, target: int, limits: Limits, distance: int
) -> list[Item]:
    """Fills the microbatch of a slot with up to about `target` work.

    Jobs in the middle of a batch come first, then the jobs that need the most slots.

    Args:
        jobs: Progress of each job, which is advanced.
        slot: Number of the slot.
        target: Work to fill the slot with. A first item is placed even if it exceeds
            the target.
        limits: Capacity and block size.
        distance: Distance of the pipeline.

    Returns:
        The items of the microbatch; none if no job may run in this slot.
    """
    out: list[Item] = []
    work, tokens = 0, 0
    for index in jobs.first(slot, _MAX_JOBS):
        room, token_room = target - work, limits.capacity - tokens
        if out and min(room, token_room) < limits.block_tokens:
            break  # the part of a job takes at least one block
        items = jobs[index].items
        if limits.max_samples is not None:
            items = items[: limits.max_samples - len(out)]
            if not items:
                break
        if out and items[-1][0] > room:
            continue  # not even the job's smallest item fits
        chosen = _choose(items, room, token_room, limits, must_choose=not out)
        if chosen:
            jobs.take(index, chosen, slot, distance)
            taken = [items[i] for i in chosen]
            real = sum(i[1] for i in taken)
            tokens += limits.padded(real)
            work += sum(i[0] for i in taken) + limits.padded(real) - real
            out += taken
    return out


def _choose(
    items: list[Item], room: int, token_room: int, limits: Limits, *, must_choose: bool
) -> list[int]:
    """Chooses the items of one job for a microbatch.

    Args:
        items: The job's items, in descending order of work.
        room: Work that the items may add, including padding.
        token_room: Tokens that the items may add, including padding.
        limits: Block size.
        must_choose: Whether to choose an item even if none fits in `room`.

    Returns:
        Indices of the items.
    """

    def fits(chosen: Sequence[int]) -> bool:
        tokens = work = 0
        for i in chosen:
            work += items[i][0]
            tokens += items[i][1]
        padded = limits.padded(tokens)
        return padded <= token_room and work + padded - tokens <= room

    everything = range(len(items))
    if fits(everything):
        return list(everything)
    weights = [i[0] for i in items]
    for chosen in itertools.islice(best_subsets(weights, room), _MAX_SUBSETS):
        if fits(chosen):
            return chosen
    # Padding to blocks may make even the heaviest subset too large. A subset that is
    # lighter by a block always fits.
    weights = [i[1] for i in items] if room > token_room else weights
    subsets = best_subsets(weights, min(token_room, room - limits.block_tokens + 1))
    chosen = next(subsets, [])
    if not chosen and must_choose:
        # Every sample exceeds the target, so the microbatch is a single sample.
        return [0]
    return chosen


def best_subsets(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yields subsets of items whose total weight is at most `room`, the heaviest first.

    Subset sum is solved exactly with bit sets: bit w of an integer is 1 if the
    total weight w exists.

    It yields one nonempty subset, as indices, for each total weight. Among equal totals
    it prefers early items. Callers sort the items by descending weight, because small
    items are easier to place later.

    Args:
        weights: Positive weights of the items.
        room: Maximum total weight of a subset.
    """
    if room <= 0:
        return
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for weight in weights:
        reach.append((reach[-1] | reach[-1] << weight) & mask)
        if reach[-1] >> room:  # a subset fills the room, so no item can improve it
            break
    sums = reach[-1]
    while True:
        total = sums.bit_length() - 1
        if total <= 0:
            return
        yield _backtrack(weights, reach, total)
        sums ^= 1 << total


def _backtrack(weights: Sequence[int], reach: list[int], total: int) -> list[int]:
    chosen = []
    for i in range(len(reach) - 2, -1, -1):
        if not total:
            break
        if not reach[i] >> total & 1:  # the total is impossible without item i
            chosen.append(i)
            total -= weights[i]
    return chosen
