"""Drives a sweep over several groups: which group trains what, and what ends early.

Each round takes what the workers have sent, decides, writes what has happened, and
sends what follows. A second start continues from the ledger.
"""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError, ProcessError
from jaxlora.run.folder import clean_up
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.groups import (
    Group,
    choose,
    free_slots,
    keep_adapter,
    moves,
    remove_unused,
)
from jaxlora.sweeps.engine.launch import Lost
from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.state import GROUPS, Configuration, Record, SweepState
from jaxlora.sweeps.engine.transport import Workers
from jaxlora.sweeps.suggesting import Suggestions

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 0.5  # to wait for messages
_RETRY_SECONDS = 5.0  # between two attempts to start a group whose devices are gone
_MOST_FAILURES = 3  # losses in a row, without a step between them
_SILENT_SECONDS = 1800.0  # the longest compilation, after which a worker has hung
_STOPPED_SECONDS = 120.0  # without a sign of life, after which a process is stopped
_START_SECONDS = 300.0  # until the first one, as imports may take long
_END_SECONDS = 120.0
_REMOVE_SECONDS = 10.0  # between two looks for checkpoints that nobody needs


class Driver:
    """Drives the groups of a sweep until nothing is left to train.

    Attributes:
        state: The configurations.
        groups: The groups, by number.
        is_ending: Whether no further work is given.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        state: SweepState,
        ledger: Ledger,
        workers: Workers,
        groups: list[Group],
        search: Suggestions | None = None,
    ):
        """Takes up a sweep from its state before the records of the ledger.

        Its folder is locked, and no older worker lives.
        """
        self._folder, self._workers, self._search = folder, workers, search
        self.state, self.groups, self._removed = state, groups, 0.0
        self._ledger, self._looked, self.is_ending = ledger, time.monotonic(), False
        self._records: list[Record] = []  # that are not on the disk yet
        self._outbox: dict[int, list[m.ToWorker]] = {}  # what follows from them
        ledger.replay(state.apply)
        if search is not None:
            search.restore(state.places)
        self.record("begin")
        self.review()

    # ---- the loop ------------------------------------------------------------------

    def run(
        self,
        is_asked_to_end: Callable[[], bool] = lambda: False,
        each_round: Callable[["Driver"], None] = lambda driver: None,
    ) -> bool:
        """Drives the sweep to its end.

        Args:
            is_asked_to_end: Whether a signal asks for the end of this process.
            each_round: Is called in each round: takes requests and writes the status.

        Returns:
            Whether configurations are left, as it was asked to end.

        Raises:
            JaxloraError: A worker cannot train, or no group is left.
        """
        try:
            each_round(self)  # it may resume what was paused
            while not is_asked_to_end() and not self._is_over():
                self._start_due()
                self._assign()
                self.flush()
                self._take(self._workers.receive(_ROUND_SECONDS))
                each_round(self)
            self.flush()
            self._end_all(is_finished=self.state.is_over())
            remove_unused(self._folder, self.state)
            each_round(self)
        except (ConfigError, ProcessError):
            logger.warning("the sweep ends here: the groups save what they have done")
            self._end_all(is_finished=False)
            raise
        finally:
            self._workers.close()
        return not self.state.is_over()

    # ---- records, and the messages that follow from them ---------------------------

    def record(self, kind: str, **values: Any) -> None:
        """Follows a record, and keeps it until `flush`."""
        record = {"kind": kind, **values}
        self.state.apply(record)
        self._records.append(record)

    def send(self, group: int, *messages: m.ToWorker) -> None:
        """Sends messages to the worker of a group when the records are on the disk.

        So after a kill at any time, the ledger has all that a worker was told.
        """
        self._outbox.setdefault(group, []).extend(messages)

    def ask(self, found: Configuration, action: m.Action, reason: str = "") -> None:
        """Sends a request about a configuration to its group, if it is in one."""
        if found.group is not None:
            ask = m.Ask(action=action, name=found.name, reason=reason)
            self.send(found.group, ask)

    def flush(self) -> None:
        """Writes the records, and then sends the messages."""
        self._ledger.append(self._records)
        self._records = []
        outbox, self._outbox = self._outbox, {}
        for group, messages in outbox.items():
            self._workers.send(group, messages)

    # ---- the workers ---------------------------------------------------------------

    def _start_due(self) -> None:
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
            elif group.is_given_up or now < group.next_start:
                continue
            elif self.state.queue() or not self.state.starts.get(number):
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

    def _start(self, number: int, group: Group) -> None:
        name = self.state.next_folder(number)
        folder = self._folder / name
        self.record("start", group=number, folder=name)
        self.flush()  # so that the next driver knows of the folder
        if not self._workers.start(number, folder):
            self.record("lost", group=number, reason="its devices are not there")
            group.next_start = time.monotonic() + _RETRY_SECONDS
            return
        group.is_live, group.heard = True, time.monotonic()
        group.beat = group.heard + _START_SECONDS
        run = {**group.run, "output_dir": str(folder)}
        self.send(number, m.Begin(run=run))
        logger.info("group %d: started in %s", number, folder)

    def _lose(self, number: int, reason: str) -> None:
        """Takes note of the end of a worker."""
        group = self.groups[number]
        group.is_live, group.tokens_per_second = False, None
        self._outbox.pop(number, None)
        clean_up(self._folder / self.state.folders[number])
        if self.is_ending:
            return
        num_held = len(self.state.of_group(number))
        self.record("lost", group=number, reason=reason)
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

    def _end_all(self, *, is_finished: bool) -> None:
        """Lets all workers end; `is_finished` if nothing is left to train."""
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
            self._take(self._workers.receive(_ROUND_SECONDS))
            self.flush()

    # ---- which group trains what ---------------------------------------------------

    def _assign(self) -> None:
        """Gives configurations to groups that have free slots, in the queue's order."""
        for found, number in self.state.copies():
            self._give(found, number)
        free = free_slots(self.state, self.groups)
        while any(count > 0 for count in free.values()):
            if not (self.state.queue() or self._suggest()):
                break
            chosen = choose(self.state.queue(), self.groups, free)
            if chosen is None:
                break
            found, number = chosen
            self._give(found, number)
            free[number] -= 1
        if self.state.queue():
            return
        for found in list(moves(self.state, self.groups)):
            assert found.group is not None
            logger.info("%s leaves group %d", found.name, found.group)
            self.ask(found, "release")
            self.record("moving", name=found.name)

    def _suggest(self) -> bool:
        """Adds a configuration that the search suggests; whether there was one."""
        if self._search is None:
            return False
        num_slots = sum(g.num_slots for g in self.groups if not g.is_given_up)
        found = self.state.configurations.values()
        job = self._search.next([(c.settings, c.progress) for c in found], num_slots)
        if job is None:
            return False
        self.add(job, place=self._search.points[job.name])
        logger.info("sweep: Optuna suggests %s", job.name)
        return True

    def add(self, job: LoraJob, *, place: dict[str, float] | None = None) -> None:
        """Adds a configuration to the queue, with its place if the search suggests it.

        Raises:
            ConfigError: Its name is taken.
        """
        if job.name.lower() in {name.lower() for name in self.state.configurations}:
            raise ConfigError(f"a job named {job.name!r} is in this run already.")
        settings = job.model_dump(mode="json")
        self.record("job", settings=settings, place=place)

    def _is_over(self) -> bool:
        return self.state.is_over() and not self._suggest()

    def _give(self, found: Configuration, number: int) -> None:
        sources = tuple(str(self._folder / name) for name in found.sources)
        settings = found.settings if found.is_late else None
        if (verdict := self.state.verdict(found.name)) is not None:
            self.send(number, verdict)
        self.record("given", name=found.name, group=number)
        self.send(number, m.Give(name=found.name, sources=sources, settings=settings))
        if found.stop is not None:
            self.ask(found, "stop", found.stop)

    # ---- messages from workers -----------------------------------------------------

    def _take(self, found: list[tuple[int, m.FromWorker | Lost]]) -> None:
        """Follows what the workers have sent.

        Raises:
            ConfigError: One of them cannot train, nor could another one.
        """
        failure = None
        for number, message in found:
            group, now = self.groups[number], time.monotonic()
            group.beat = now
            if not isinstance(message, m.Alive):
                group.heard = now
            match message:
                case Lost(reason=reason):
                    self._lose(number, reason)
                case m.Ready(jobs=jobs):
                    self._ready(number, jobs)
                case m.Evaluated(number=count, points=points):
                    group.failures = 0
                    self._note(number, points)
                    self._verdicts(number, [name for name, *_ in points])
                    self.send(number, m.Judged(number=count))
                case m.Progress():
                    self._follow(number, message)
                case m.Ended(name=name, progress=progress, folder=folder):
                    group.failures = 0
                    self.note_end(number, name, progress, folder)
                case m.Saved(name=name, is_released=is_released):
                    self._saved(number, name, is_released=is_released)
                case m.Failed(reason=reason):
                    logger.warning("group %d: %s", number, reason)
            if isinstance(message, m.Failed | Lost) and message.is_final:
                failure = failure or f"group {number} cannot train: {message.reason}"
        if failure is not None and not self.is_ending:
            raise ConfigError(failure)

    def _ready(self, number: int, jobs: Sequence[m.JobFacts]) -> None:
        known = self.state.configurations
        new = [job for job in jobs if known[job.name].facts is None]
        if new:
            self.record("facts", jobs=[job.model_dump() for job in new])
        for job in jobs:
            if job.clone_step:
                self.send(number, m.Ask(action="begin", name=job.name))

    def _follow(self, number: int, message: m.Progress) -> None:
        group = self.groups[number]
        group.tokens_per_second = message.tokens_per_second
        group.memory = message.memory
        for name, progress in message.jobs.items():
            found = self.state.configurations[name]
            if found.is_closed or found.group != number:
                continue
            if progress.step > found.progress.step:
                group.failures = 0
            found.progress = progress

    def _note(self, number: int, points: Sequence[m.Point]) -> None:
        """Decides after evaluations, but for those that were made before."""
        known, found = self.state.decisions, self.state.configurations
        new = [
            point
            for point in points
            if found[point[0]].group == number and not known.has(*point[:2])
        ]
        if not new:
            return
        self._keep_decisions(self.state.note(new))

    def review(self) -> None:
        """Decides what follows from an end or a pause."""
        if (record := self.state.review()) is not None:
            self._keep_decisions(record)

    def _keep_decisions(self, record: Record) -> None:
        """Keeps a record of decisions, and sends them to all groups concerned."""
        self._records.append(record)
        for name, (rule, reason) in record["stops"].items():
            logger.info("%s ends: %s (%s)", name, rule, reason)
        stopped = set(record["stops"])
        for number in self.state.folders:
            held = [c.name for c in self.state.of_group(number)]
            has_cut = bool(record["cutoffs"])
            self._verdicts(number, [n for n in held if has_cut or n in stopped])

    def _verdicts(self, number: int, names: list[str]) -> None:
        found = [self.state.verdict(name) for name in names]
        self.send(number, *(verdict for verdict in found if verdict is not None))

    def note_end(
        self,
        number: int | None,
        name: str,
        progress: JobProgress,
        folder: str | None = None,
    ) -> None:
        """Takes note of an end in a group; one that is known changes nothing."""
        found = self.state.configurations[name]
        if found.is_closed or found.group != number:
            return
        kept = None
        if folder is not None:
            kept = keep_adapter(self._folder, name, pathlib.Path(folder))
        values = dataclasses.asdict(progress)
        self.record("ended", name=name, progress=values, folder=kept)
        logger.info(
            "%s: %s (%s); %d left",
            name,
            progress.status,
            progress.reason,
            len(self.state.open()),
        )
        self.review()

    def _saved(self, number: int, name: str, *, is_released: bool) -> None:
        found = self.state.configurations[name]
        if found.is_closed or found.group != number:
            return
        if is_released and found.is_moving:
            self.record("released", name=name)
            return
        left = {n for n, f in self.state.folders.items() if f in found.sources}
        self.record("saved", name=name, folder=self.state.folders[number])
        for other in left - {number}:
            self.send(other, m.Ask(action="drop", name=name))
        if time.monotonic() - self._removed > _REMOVE_SECONDS:
            self._removed = time.monotonic()
            remove_unused(self._folder, self.state)
