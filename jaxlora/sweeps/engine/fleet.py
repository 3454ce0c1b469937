"""The workers of all groups: they are started, watched, started again, and ended."""

import logging
import pathlib
import time
from collections.abc import Callable

from jaxlora.common.counted import counted
from jaxlora.errors import ProcessError
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.ledger import Journal
from jaxlora.sweeps.engine.placement import Group
from jaxlora.sweeps.engine.state import GROUPS, SweepState
from jaxlora.sweeps.engine.workers import Lost, Workers

logger = logging.getLogger(__name__)

ROUND_SECONDS = 0.5  # to wait for messages
_RETRY_SECONDS = 5.0  # between two attempts to start a group whose devices are gone
_MOST_FAILURES = 3  # losses in a row, without a step between them
_SILENT_SECONDS = 1800.0  # the longest compilation, after which a worker has hung
_STOPPED_SECONDS = 120.0  # without a sign of life, after which a process is stopped
_START_SECONDS = 300.0  # until the first one, as imports may take long
_END_SECONDS = 120.0


class Fleet:
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
            if is_finished:
                self._workers.send(group, [m.Finish()])
            else:
                self._workers.interrupt(group)
        while any(group.is_live for group in self.groups):
            if time.monotonic() > end:
                late = [g for g, group in enumerate(self.groups) if group.is_live]
                logger.warning("groups %s do not end; killing them", late)
                for group in late:
                    self._workers.kill(group)
                    self.groups[group].is_live = False
            take(self._workers.receive(ROUND_SECONDS))
            self._journal.flush()
