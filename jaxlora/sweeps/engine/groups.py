"""The groups of devices of a sweep: what each of them trains, and their files."""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.errors import StorageError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, is_own
from jaxlora.sweeps.engine.state import GROUPS, Configuration, SweepState


@dataclasses.dataclass(kw_only=True, slots=True)
class Group:
    """A group of devices as the driver sees it.

    Attributes:
        num_slots: Configurations that it trains at once.
        run: Settings of its run, without `output_dir`, as JSON values.
        slot_rank: Largest rank that its slots hold; None: they hold all.
        names: The configurations that the plan gives it, in their order.
        is_live: Whether it has a worker.
        is_given_up: Whether it gets no further worker.
        failures: Losses of its workers in a row.
        heard: Time of the last message, but for signs of life.
        beat: Time of the last message of any kind; of a worker that has just started,
            the time by which the first one must come.
        next_start: Time before which no worker is started.
        tokens_per_second: Speed of its latest window.
        memory: Share of its host's memory that is in use; None: it is not known.
    """

    num_slots: int
    run: Mapping[str, Any]
    slot_rank: int | None = None
    names: tuple[str, ...] = ()
    is_live: bool = False
    is_given_up: bool = False
    failures: int = 0
    heard: float = 0.0
    beat: float = 0.0
    next_start: float = 0.0
    tokens_per_second: float | None = None
    memory: float | None = None


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
    """
    open_groups = sorted((n for n in free if free[n] > 0), key=lambda n: (-free[n], n))
    if not any(groups[n].names for n in open_groups):
        fitting = ((c, [n for n in open_groups if _fits(c, groups, n)]) for c in queue)
        found, places = next((one for one in fitting if one[1]), (None, []))
        if found is None:
            return None
        # The one with the most free slots; another one than before if it can.
        return found, max(places, key=lambda n: (n != found.left, free[n], -n))
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


def moves(state: SweepState, groups: Sequence[Group]) -> Iterator[Configuration]:
    """Yields configurations that wait for a slot while other groups have free ones."""
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


# ---- the checkpoints of all groups, and the adapters that stay -----------------------


def keep_adapter(sweep: pathlib.Path, name: str, folder: pathlib.Path) -> str | None:
    """Moves a PEFT folder to its place, where an earlier attempt may have put it.

    The move is on the disk when this returns, so that a record may name the place.

    Returns:
        Its place, within the folder of the sweep; None if there is no such folder.

    Raises:
        StorageError: It cannot be moved, or a link leads out of the sweep's folder.
    """
    kept = f"{ADAPTERS}/{name}"
    if folder.is_dir():
        is_inside = folder.resolve().is_relative_to(sweep.resolve())
        if not (is_inside and is_own(sweep, kept)):
            raise StorageError(
                f"{folder} is not moved to {sweep / kept}: a link leads out of the "
                "folder of the sweep. Replace it by a folder."
            )
        with wrap_os_errors(sweep / kept):
            make_folder(sweep / ADAPTERS)
            if (sweep / kept).exists():
                shutil.rmtree(sweep / kept)
            folder.rename(sweep / kept)
            sync_folder(sweep / ADAPTERS)
    return kept if (sweep / kept).is_dir() else None


def remove_unused(sweep: pathlib.Path, state: SweepState) -> None:
    """Removes checkpoints of ended workers that no configuration needs."""
    names = [f"{GROUPS}/{path.name}" for path in (sweep / GROUPS).glob("*")]
    with_states = [
        name
        for name in names
        if (sweep / name / CHECKPOINTS).is_dir()
        and is_own(sweep, f"{name}/{CHECKPOINTS}")
    ]
    for name in state.unused_folders(with_states):
        shutil.rmtree(sweep / name / CHECKPOINTS, ignore_errors=True)
