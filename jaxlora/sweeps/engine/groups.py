"""The groups of devices, whose workers are started, watched and ended."""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlora.common.counted import counted
from jaxlora.errors import ProcessError
from jaxlora.run.folder import clean_up
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.launch import Lost
from jaxlora.sweeps.engine.ledger import Journal
from jaxlora.sweeps.engine.state import GROUPS, SweepState
from jaxlora.sweeps.engine.transport import Workers

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.5  # to wait for messages
_RETRY_SECONDS = 5.0  # between two attempts to start a group whose devices are gone
_MOST_FAILURES = 3  # losses in a row, without a step between them
_SILENT_SECONDS = 1800.0  # the longest compilation, after which a worker has hung
_STOPPED_SECONDS = 120.0  # without a sign of life, after which a process is stopped
_START_SECONDS = 300.0  # until the first one, as imports may take long
_END_SECONDS = 120.0


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
        resources: What its host reports.
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
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Supervisor:
    """Keeps a worker in each group that has work.

    Attributes:
        groups: The groups, by number.
        is_ending: Whether no further work is given.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        state: SweepState,
        groups: list[Group],
        workers: Workers,
        journal: Journal,
    ):
        """Makes the object; no worker runs.

        Args:
            folder: Folder of the sweep.
            state: The sweep.
            groups: The groups.
            workers: Starts workers.
            journal: Gets what happens to them.
        """
        self._folder, self._state, self.groups = folder, state, groups
        self._workers, self._journal = workers, journal
        self.is_ending = False
        self._looked = time.monotonic()

    def start_due(self) -> None:
        """Starts workers where there are none, and ends those that hang."""
        now = time.monotonic()
        # Where this process was stopped itself, their messages have not been read yet.
        was_away = now - self._looked > _STOPPED_SECONDS / 2
        self._looked = now
        for number, group in enumerate(self.groups):
            if group.is_live:
                if was_away:
                    group.beat = max(group.beat, now)
                self._kill_if_silent(number, group, now)
            elif (
                not group.is_given_up
                and now >= group.next_start
                and self._needs(number)
            ):
                self._start(number, group)
        if all(group.is_given_up for group in self.groups):
            raise ProcessError(
                f"the workers of all {counted(len(self.groups), 'group')} have ended "
                f"{_MOST_FAILURES} times in a row without a step. See their logs in "
                f"{self._folder / GROUPS}; then continue with --resume."
            )

    def _kill_if_silent(self, number: int, group: Group, now: float) -> None:
        """Kills a worker that is stopped, or whose thread that trains hangs."""
        for since, limit, what in (
            (group.heard, _SILENT_SECONDS, "message"),
            (group.beat, _STOPPED_SECONDS, "sign of life"),
        ):
            if now - since > limit:
                logger.warning(
                    "group %d: no %s in %g s; its worker is killed", number, what, limit
                )
                group.heard = group.beat = now
                self._workers.kill(number)
                return

    def _needs(self, number: int) -> bool:
        """Whether there is work for another group."""
        return bool(self._state.queue()) or not self._state.starts.get(number)

    def _start(self, number: int, group: Group) -> None:
        name = self._state.next_folder(number)
        folder = self._folder / name
        self._journal.record("start", group=number, folder=name)
        self._journal.flush()  # so that the next driver knows of the folder
        if not self._workers.start(number, folder):
            self._journal.record(
                "lost", group=number, reason="its devices are not there"
            )
            group.next_start = time.monotonic() + _RETRY_SECONDS
            return
        group.is_live, group.heard = True, time.monotonic()
        group.beat = group.heard + _START_SECONDS
        run = {**group.run, "output_dir": str(folder)}
        self._journal.send(number, m.Begin(run=run))
        logger.info("group %d: started in %s", number, folder)

    def lose(self, number: int, reason: str) -> None:
        """Takes note of the end of a worker."""
        group = self.groups[number]
        group.is_live, group.tokens_per_second = False, None
        self._journal.forget(number)
        clean_up(self._folder / self._state.folders[number])
        if self.is_ending:
            return
        num_held = len(self._state.of_group(number))
        self._journal.record("lost", group=number, reason=reason)
        group.failures += 1
        group.is_given_up = group.failures >= _MOST_FAILURES
        logger.warning(
            "group %d is lost: %s. Its %s from the last checkpoint%s",
            number,
            reason,
            counted(num_held, "configuration")
            + (" go on" if num_held != 1 else " goes on"),
            "; the group is given up" if group.is_given_up else "",
        )

    def end(
        self,
        take: Callable[[list[tuple[int, m.FromWorker | Lost]]], None],
        *,
        is_finished: bool,
    ) -> None:
        """Lets all workers end.

        Args:
            take: Follows what they still send.
            is_finished: Whether nothing is left to train.
        """
        self.is_ending = True
        end = time.monotonic() + _END_SECONDS
        live = [g for g, group in enumerate(self.groups) if group.is_live]
        for group in live:
            self._workers.send(group, [m.Finish() if is_finished else m.End()])
        while any(group.is_live for group in self.groups):
            if time.monotonic() > end:
                late = [g for g, group in enumerate(self.groups) if group.is_live]
                logger.warning("groups %s do not end; killing them", late)
                for group in late:
                    self._workers.kill(group)
                    self.groups[group].is_live = False
            take(self._workers.receive(ROUND_SECONDS))
            self._journal.flush()
