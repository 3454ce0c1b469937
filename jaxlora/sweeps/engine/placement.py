"""Assigns configurations to groups."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxlora.sweeps.engine.groups import Group
from jaxlora.sweeps.engine.state import Configuration, SweepState


def free_slots(state: SweepState, groups: Sequence[Group]) -> dict[int, int]:
    """Returns the free slots of each live group; negative where more wait than fit."""
    return {
        number: group.num_slots - state.num_active(number)
        for number, group in enumerate(groups)
        if group.is_live
    }


def choose(
    queue: Sequence[Configuration],
    groups: Sequence[Group],
    free: Mapping[int, int],
) -> tuple[Configuration, int] | None:
    """Returns the next configuration to give, and its group; None if none fits.

    A planned group takes its own configurations, in their order. When it has no more,
    it takes over the last one of the group that has most of them left. So a plan whose
    times were wrong leaves no group idle.

    Args:
        queue: Configurations that may train, in their order.
        groups: The groups.
        free: Free slots of each live group.
    """
    open_groups = sorted((n for n in free if free[n] > 0), key=lambda n: (-free[n], n))
    if not any(groups[n].names for n in open_groups):
        fitting = ((c, [n for n in open_groups if _fits(c, groups, n)]) for c in queue)
        found, places = next((one for one in fitting if one[1]), (None, []))
        return None if found is None else (found, _emptiest(found, places, free))
    of_plan = {
        name: (number, place)
        for number, group in enumerate(groups)
        for place, name in enumerate(group.names)
    }
    late = -1, 0
    for _, level in itertools.groupby(queue, key=lambda c: c.priority):
        waiting: dict[int, list[Configuration]] = {}
        for found in sorted(level, key=lambda c: of_plan.get(c.name, late)):
            number, _ = of_plan.get(found.name, late)
            waiting.setdefault(number, []).append(found)
        for number in open_groups:
            for found in waiting.get(number, ()):
                if found.left != number:
                    return found, number
        for number in open_groups:
            for other in sorted(waiting, key=lambda n: (-len(waiting[n]), n)):
                for found in reversed(waiting[other]):
                    if _fits(found, groups, number):
                        return found, number
    return None


def _fits(found: Configuration, groups: Sequence[Group], number: int) -> bool:
    """Whether the slots of a group hold a configuration, or none hold more."""
    limit = groups[number].slot_rank
    if limit is None:
        return True
    most = max(group.slot_rank or 0 for group in groups)
    return limit == most or found.rank <= limit


def _emptiest(
    found: Configuration, places: Sequence[int], free: Mapping[int, int]
) -> int:
    """Returns the group with the most free slots, another one than before if it can."""
    return max(places, key=lambda n: (n != found.left, free[n], -n))


def moves(state: SweepState, groups: Sequence[Group]) -> Iterator[Configuration]:
    """Yields configurations that wait for a slot while other groups have free ones.

    Args:
        state: The sweep, whose queue is empty.
        groups: The groups.
    """
    spare = free_slots(state, groups)
    num_moving = sum(found.is_moving for n in spare for found in state.of_group(n))
    num_free = sum(max(0, count) for count in spare.values()) - num_moving
    for number, count in spare.items():
        for found in state.of_group(number):
            if count >= 0 or num_free <= 0:
                break
            if _may_move(state, found) and any(
                spare[n] > 0 and n != number and _fits(found, groups, n) for n in spare
            ):
                yield found
                count += 1
                num_free -= 1


def _may_move(state: SweepState, found: Configuration) -> bool:
    is_idle = found.progress.status in ("waiting", "paused")
    is_free = found.held is None and found.stop is None and not found.is_moving
    return is_idle and is_free and not state.waits(found) and state.may_leave(found)
