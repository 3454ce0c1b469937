"""Baselines for a sweep: one configuration at a time, and packs in a row."""

import heapq
from collections.abc import Sequence

from jaxlora.scheduler.sweep.problem import Costs, Group, Sweep, SweepPlan
from jaxlora.scheduler.sweep.rounds import Kinds, Roster


def fewest_gpus(sweep: Sweep, costs: Costs) -> int:
    """Returns the smallest degree of which a group can run any configuration.

    Raises:
        ValueError: No degree fits every configuration.
    """
    kinds = Kinds(sweep, costs)
    for degree in kinds.degrees:
        if all(s.fits[kind] for kind, s in enumerate(kinds.smallest(degree))):
            return degree
    raise ValueError(
        f"no number of GPUs fits every configuration: {kinds.degrees} were tried."
    )


def one_at_a_time(sweep: Sweep, costs: Costs, degree: int) -> SweepPlan:
    """Trains each configuration alone, on groups of `degree` GPUs side by side.

    The longest configurations start first, each on the group that is free first.
    `fewest_gpus` and the largest degree are PLoRA's baselines "Min GPU" and "Max GPU".

    Raises:
        ValueError: A configuration does not fit.
    """
    kinds = Kinds(sweep, costs)
    shapes = kinds.smallest(degree)
    each = [k for k, count in enumerate(kinds.count) for _ in range(count)]
    each.sort(key=lambda k: (-kinds.steps[k] * shapes[k].round_alone(k), k))
    return _in_a_row(kinds, degree, [[kind] for kind in each])


def sequential_packs(sweep: Sweep, costs: Costs, degree: int) -> SweepPlan:
    """Trains packs of configurations on groups of `degree` GPUs side by side.

    A pack takes the configurations of most steps that are left, first-fit, until its
    memory is full. It ends with its longest configuration.

    Raises:
        ValueError: A configuration does not fit.
    """
    kinds = Kinds(sweep, costs)
    shape = kinds.shape(degree, kinds.slot_ranks[-1])
    packs: list[list[int]] = []
    room: list[float] = []
    # Kinds are in the order of most steps.
    for kind, count in enumerate(kinds.count):
        size = shape.bytes_of[kind]
        for _ in range(count):
            at = next((i for i, free in enumerate(room) if free >= size), len(packs))
            if at == len(packs):
                packs.append([])
                room.append(shape.free)
            packs[at].append(kind)
            room[at] -= size
    return _in_a_row(kinds, degree, packs)


def _in_a_row(kinds: Kinds, degree: int, packs: Sequence[Sequence[int]]) -> SweepPlan:
    """Runs packs in their order, each on the group that is free first."""
    roster = Roster(kinds)
    groups: list[Group] = []
    lanes = [
        (0.0, i, tuple(range(i * degree, (i + 1) * degree)))
        for i in range(kinds.sweep.num_gpus // degree)
    ]
    for pack in packs:
        shape = kinds.shrink(kinds.shape(degree, kinds.slot_ranks[-1]), pack)
        if not all(shape.fits[kind] for kind in pack):
            name = kinds.first[pack[0]].name
            raise ValueError(
                f"configuration {name!r} does not fit into groups of {degree} GPUs. "
                f"fewest_gpus says how many it takes."
            )
        start, i, gpus = heapq.heappop(lanes)
        groups.append(roster.group(shape, gpus, pack, start))
        heapq.heappush(lanes, (groups[-1].end, i, gpus))
    return SweepPlan(sweep=kinds.sweep, groups=tuple(groups))
