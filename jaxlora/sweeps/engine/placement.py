"""Assigns configurations to groups."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlora.sweeps.engine.state import Configuration, SweepState


@dataclasses.dataclass(kw_only=True, slots=True)
class Group:
    """A group of devices as the driver sees it.

    Attributes:
        num_slots: Configurations that it trains at once.
        run: Settings of its run, without `output_dir`, as JSON values.
        is_live: Whether it has a worker.
        is_given_up: Whether it gets no further worker.
        failures: Losses of its workers in a row.
        heard: Time of the last message, but for signs of life.
        beat: Time of the last message of any kind; of a worker that has just started,
            the time by which the first one must come.
        next_start: Time before which no worker is started.
        tokens_per_second: Speed of its latest window.
        resources: What its host reports.
    """

    num_slots: int
    run: Mapping[str, Any]
    is_live: bool = False
    is_given_up: bool = False
    failures: int = 0
    heard: float = 0.0
    beat: float = 0.0
    next_start: float = 0.0
    tokens_per_second: float | None = None
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)


def free_slots(state: SweepState, groups: Sequence[Group]) -> dict[int, int]:
    """Returns the free slots of each live group; negative where more wait than fit."""
    return {
        number: group.num_slots - state.num_active(number)
        for number, group in enumerate(groups)
        if group.is_live
    }


def choose_group(found: Configuration, free: Mapping[int, int]) -> int:
    """Returns the group with the most free slots, for a configuration.

    One that has moved goes to another group than before, if that has room.

    Args:
        found: The configuration.
        free: Free slots of each live group, of which one has some.
    """
    return max(free, key=lambda n: (free[n] > 0, n != found.left, free[n], -n))


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
            if _may_move(state, found):
                yield found
                count += 1
                num_free -= 1


def _may_move(state: SweepState, found: Configuration) -> bool:
    is_idle = found.progress.status in ("waiting", "paused")
    is_free = found.held is None and found.stop is None and not found.is_moving
    return is_idle and is_free and not state.waits(found)
