"""Drives a sweep over several groups: which group trains what, and what ends early.

Each round takes what the workers have sent, decides, and lets `Journal` write what has
happened and send what follows. A second start continues from the ledger.
"""

import dataclasses
import logging
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlora.common.atomic import make_folder, sync_folder, wrap_os_errors
from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError, ProcessError, StorageError
from jaxlora.run.clone_settings import clone_settings
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, is_own
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.groups import ROUND_SECONDS, Group, Supervisor
from jaxlora.sweeps.engine.launch import Lost
from jaxlora.sweeps.engine.ledger import Journal, Ledger
from jaxlora.sweeps.engine.placement import choose, free_slots, moves
from jaxlora.sweeps.engine.state import GROUPS, Configuration, Record, SweepState
from jaxlora.sweeps.engine.transport import Workers
from jaxlora.sweeps.suggesting import Suggestions

logger = logging.getLogger(__name__)

_REMOVE_SECONDS = 10.0  # between two looks for checkpoints that nobody needs


class Driver:
    """Drives the groups of a sweep until nothing is left to train.

    Attributes:
        state: The configurations.
        groups: The groups, by number.
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
        """Takes up a sweep; its folder is locked, and no older worker lives.

        Args:
            folder: Folder of the sweep.
            state: The sweep as it is before the records of the ledger.
            ledger: The ledger.
            workers: Starts workers.
            groups: The groups.
            search: Suggests further configurations; None: there are none.
        """
        self._folder, self._workers, self._search = folder, workers, search
        self.state, self.groups, self._removed = state, groups, 0.0
        self._journal = Journal(state, ledger, workers)
        self._supervisor = Supervisor(folder, state, groups, workers, self._journal)
        ledger.replay(state.apply)
        self._settings: dict[str, LoraJob] = {}  # that were read, for the search
        if search is not None:
            search.restore(state.places)
        self._journal.record("begin")
        self._review()

    @property
    def is_ending(self) -> bool:
        """Whether no further work is given."""
        return self._supervisor.is_ending

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
                self._supervisor.start_due()
                self._assign()
                self._journal.flush()
                self._take(self._workers.receive(ROUND_SECONDS))
                each_round(self)
            self._journal.flush()
            self._supervisor.end(self._take, is_finished=self.state.is_over())
            remove_unused(self._folder, self.state)
            each_round(self)
        except (ConfigError, ProcessError):
            logger.warning("the sweep ends here: the groups save what they have done")
            self._supervisor.end(self._take, is_finished=False)
            raise
        finally:
            self._workers.close()
        return not self.state.is_over()

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
            self._ask(found, "release")
            self._journal.record("moving", name=found.name)

    def _suggest(self) -> bool:
        """Adds a configuration that the search suggests; whether there was one."""
        if self._search is None:
            return False
        num_slots = sum(g.num_slots for g in self.groups if not g.is_given_up)
        job = self._search.next(self._jobs(), num_slots)
        if job is None:
            return False
        self.add(job, place=self._search.points[job.name])
        logger.info("sweep: Optuna suggests %s", job.name)
        return True

    def _jobs(self) -> list[tuple[LoraJob, JobProgress]]:
        """Returns the configurations as the search sees them."""
        known, configurations = self._settings, self.state.configurations
        for name in configurations.keys() - known.keys():
            known[name] = LoraJob.model_validate(configurations[name].settings)
        return [(known[name], one.progress) for name, one in configurations.items()]

    def _is_over(self) -> bool:
        return self.state.is_over() and not self._suggest()

    def _give(self, found: Configuration, number: int) -> None:
        sources = tuple(str(self._folder / name) for name in found.sources)
        settings = dict(found.settings) if found.is_late else None
        if (verdict := self.state.verdict(found.name)) is not None:
            self._journal.send(number, verdict)
        self._journal.record("given", name=found.name, group=number)
        self._journal.send(
            number, m.Give(name=found.name, sources=sources, settings=settings)
        )
        if found.stop is not None:
            self._ask(found, "stop", found.stop)

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
                    self._supervisor.lose(number, reason)
                case m.Ready(jobs=jobs):
                    self._ready(number, jobs)
                case m.Evaluated(number=count, points=points):
                    group.failures = 0
                    self._note(number, points)
                    self._verdicts(number, [name for name, *_ in points])
                    self._journal.send(number, m.Judged(number=count))
                case m.Progress():
                    self._follow(number, message)
                case m.Ended(name=name, progress=progress, folder=folder):
                    group.failures = 0
                    self._end(number, name, progress, folder)
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
            self._journal.record("facts", jobs=list(map(dataclasses.asdict, new)))
        for job in jobs:
            if job.clone_step:
                self._journal.send(number, m.Ask(action="begin", name=job.name))

    def _follow(self, number: int, message: m.Progress) -> None:
        group = self.groups[number]
        group.tokens_per_second = message.tokens_per_second
        group.resources = message.resources
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
        num_cutoffs = len(known.cutoffs)
        record = self.state.note(new)
        self._journal.keep(record)
        self._tell_decisions(record, has_cut=len(known.cutoffs) > num_cutoffs)

    def _review(self) -> None:
        """Decides what follows from an end or a pause."""
        record = self.state.review()
        if record is not None:
            self._journal.keep(record)
            self._tell_decisions(record, has_cut=bool(record["cutoffs"]))

    def _tell_decisions(self, record: Record, *, has_cut: bool) -> None:
        """Sends verdicts to all groups that a decision concerns."""
        for name, (rule, reason) in record["stops"].items():
            logger.info("%s ends: %s (%s)", name, rule, reason)
        stopped = set(record["stops"])
        for number in self.state.folders:
            held = [c.name for c in self.state.of_group(number)]
            names = held if has_cut else [name for name in held if name in stopped]
            self._verdicts(number, names)

    def _verdicts(self, number: int, names: list[str]) -> None:
        found = [self.state.verdict(name) for name in names]
        self._journal.send(
            number, *(verdict for verdict in found if verdict is not None)
        )

    def _end(
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
        self._journal.record("ended", name=name, progress=values, folder=kept)
        logger.info(
            "%s: %s (%s); %d left",
            name,
            progress.status,
            progress.reason,
            len(self.state.open()),
        )
        self._review()

    def _saved(self, number: int, name: str, *, is_released: bool) -> None:
        found = self.state.configurations[name]
        if found.is_closed or found.group != number:
            return
        if is_released and found.is_moving:
            self._journal.record("released", name=name)
            return
        left = {n for n, f in self.state.folders.items() if f in found.sources}
        self._journal.record("saved", name=name, folder=self.state.folders[number])
        for other in left - {number}:
            self._journal.send(other, m.Ask(action="drop", name=name))
        if time.monotonic() - self._removed > _REMOVE_SECONDS:
            self._removed = time.monotonic()
            remove_unused(self._folder, self.state)

    # ---- requests ------------------------------------------------------------------

    def add(self, job: LoraJob, *, place: dict[str, float] | None = None) -> None:
        """Adds a configuration to the queue.

        Args:
            job: Its settings.
            place: Its place on each axis of the search, if that has suggested it.

        Raises:
            ConfigError: Its name is taken.
        """
        if job.name.lower() in {name.lower() for name in self.state.configurations}:
            raise ConfigError(f"a job named {job.name!r} is in this run already.")
        settings = job.model_dump(mode="json")
        self._journal.record("job", settings=settings, place=place)

    def clone(self, name: str, settings: Mapping[str, Any]) -> str:
        """Adds a copy of a configuration, which starts in its group.

        Args:
            name: The configuration.
            settings: Settings that differ, and the copy's name if it is given.

        Returns:
            The name of the copy.

        Raises:
            ConfigError: The configuration is in no group or has not begun itself, a
                setting cannot change, or the name is taken.
        """
        found = self._open(name)
        if found.group is None or found.is_moving or found.awaits_origin:
            raise ConfigError(
                f"job {name!r} has no state in a group now: it waits for a slot, or to "
                "start as a copy itself. Ask again when it trains."
            )
        changes = dict(settings)
        new_name = changes.pop("name", None)
        job = LoraJob.model_validate(found.settings)
        copy = clone_settings(job, changes, new_name)
        self.add(copy)
        return copy.name

    def stop(self, name: str, reason: str) -> None:
        """Ends a configuration, after its current global batch."""
        found = self._open(name)
        self._journal.record("asked_to_stop", name=name, reason=reason)
        if found.group is not None:
            self._ask(found, "stop", reason)
        elif not found.sources:
            progress = JobProgress(status="stopped", reason=reason)
            self._end(None, name, progress)

    def pause(self, name: str, reason: str) -> None:
        """Lets a configuration leave its slot."""
        found = self._open(name)
        self._journal.record("held", name=name, reason=reason)
        self._ask(found, "pause", reason)
        self._review()

    def resume(self, name: str) -> None:
        """Lets a configuration that was paused go on."""
        found = self._open(name)
        self._journal.record("held", name=name, reason=None)
        self._ask(found, "resume")

    def _ask(self, found: Configuration, action: m.Action, reason: str = "") -> None:
        if found.group is not None:
            ask = m.Ask(action=action, name=found.name, reason=reason)
            self._journal.send(found.group, ask)

    def _open(self, name: str) -> Configuration:
        found = self.state.configurations.get(name)
        if found is None:
            names = ", ".join(self.state.configurations)
            raise ConfigError(f"there is no job {name!r}; there are: {names}.")
        if found.is_closed:
            raise ConfigError(f"job {name!r} has ended: {found.progress.reason}.")
        return found


# ---- the checkpoints of all groups, and the adapters that stay -----------------------


def keep_adapter(sweep: pathlib.Path, name: str, folder: pathlib.Path) -> str | None:
    """Moves a PEFT folder to its place, where an earlier attempt may have been.

    The move is on the disk when this returns, so that a record may name the place.

    Args:
        sweep: Folder of the sweep.
        name: The configuration.
        folder: Its PEFT folder in the run of a group; missing if it was moved before.

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
    """Removes checkpoints of ended workers that no configuration needs.

    Args:
        sweep: Folder of the sweep.
        state: The sweep.
    """
    names = [f"{GROUPS}/{path.name}" for path in (sweep / GROUPS).glob("*")]
    with_states = [
        name
        for name in names
        if (sweep / name / CHECKPOINTS).is_dir()
        and is_own(sweep, f"{name}/{CHECKPOINTS}")
    ]
    for name in state.unused_folders(with_states):
        shutil.rmtree(sweep / name / CHECKPOINTS, ignore_errors=True)
