"""Fills microbatches from samples that wait, where later ones are not known yet."""

from collections.abc import Iterable

from jaxlora.scheduler.types import Limits, Microbatch, Sample, in_order


def fill_oldest_first(waiting: Iterable[Sample], limits: Limits) -> Microbatch:
    """Returns the next microbatch: each sample that still has room, the oldest first.

    The oldest one is always in it, so no sample waits forever.

    Args:
        waiting: The samples in the order in which they came, which may share a
            microbatch; none is longer than the capacity.
        limits: Capacity, block size, and numbers of samples and owners.
    """
    chosen: list[Sample] = []
    tokens: dict[int, int] = {}  # unpadded, by owner
    room = limits.capacity
    for sample in waiting:
        before = tokens.get(sample.owner, 0)
        after = before + sample.num_tokens
        added = limits.padded(after) - limits.padded(before)
        if sample.owner not in tokens and len(tokens) >= limits.most_jobs:
            continue
        if added <= room and len(chosen) < limits.most_samples:
            chosen.append(sample)
            tokens[sample.owner], room = after, room - added
    return in_order(chosen)
