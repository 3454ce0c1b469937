"""Looks for better replicas when jobs join or leave a run with `replicas: auto`.

The comparison, and the programs of other replicas, take seconds. So they are made in a
thread while the run trains, from the positions that the jobs had when one joined or
left. Jobs that have ended bound the choice no more; those that are paused, or wait, do.
The result takes effect a window later, counted in steps: at this border the run
waits for it if it is not there yet. So the border depends on the steps alone and never
on timing, and a checkpoint has what a resumed run needs to come to the same one.
"""

import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from jaxlora.common.background import in_background
from jaxlora.common.note import log_notes
from jaxlora.config.replicas_config import describe_list
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.run.saved_replan import SavedReplan
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.open_run import OpenedRun
from jaxlora.train.plan.auto_replicas.moving import WeighedMove, has_rest
from jaxlora.train.plan.job_slots import JobPosition
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.run_plan import RunPlan
from jaxlora.train.plan.slot_spec import check_fits
from jaxlora.train.saved.job_states import JobStates, reseat_jobs

logger = logging.getLogger(__name__)

_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Weighed:
    """A comparison that has ended, and the run that it has drafted.

    Attributes:
        move: The comparison.
        draft: The run on the other replicas, if moving pays.
        why_not: Why it cannot run there; empty if it can.
    """

    move: WeighedMove
    draft: OpenedRun | None = None
    why_not: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Due:
    """A comparison that was begun, and when it takes effect; see `SavedReplan`."""

    saved: SavedReplan
    found: Future[_Weighed | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """The jobs for which replicas are compared, by name.

    Attributes:
        training: Those that train or may.
        held: Those that replicas have to hold: also those that are paused or wait.
    """

    training: frozenset[str]
    held: frozenset[str]

    def changes(self, now: "_Compared") -> str:
        """Says which jobs have left and joined since."""
        left = self.training - now.training | self.held - now.held
        joined = now.training - self.training | now.held - self.held
        changes = {"left": sorted(left), "joined": sorted(joined)}
        return ", ".join(
            f"{_named(names)} {v}" for v, names in changes.items() if names
        )


class Replanning:
    """Compares the replicas of a run with others, and says when to move."""

    def __init__(
        self,
        run: OpenedRun,
        live: LiveJobs,
        saved: SavedReplan | None,
        holds_all: Callable[[], bool],
    ):
        """Begins with the jobs that there are, or with those of a checkpoint.

        Args:
            run: The run.
            live: Its jobs; more may join.
            holds_all: Whether jobs may follow that are like those that have ended, so
                that replicas have to hold these too.
            saved: What the checkpoint has from which the run resumes. If its replicas
                are not those of the run, what was due is done.
        """
        self._run, self._jobs, self._holds_all = run, live.jobs, holds_all
        self._is_asked_to_pause = live.is_asked_to_pause
        self._due: _Due | None = None
        self._draft: OpenedRun | None = None
        self._turn = threading.Lock()  # jobs may leave faster than replicas are weighed
        self._num_begun = 0
        self._compared = self._now(self._positions())
        if saved is not None and run.choice is not None:
            held = (
                [job.name for job in self._jobs] if saved.held is None else saved.held
            )
            self._compared = _Compared(
                training=frozenset(saved.jobs), held=frozenset(held)
            )
            if saved.steps and saved.deployment == _describe(run.plan):
                self._begin(saved)

    def look(self) -> OpenedRun | None:
        """Looks at a border; returns a draft of the run to move to, if there is one.

        It returns the same draft until `move`; none if no job is left to train.
        """
        if self._run.choice is None or not (positions := self._positions()):
            return None
        if self._draft is not None:
            return self._draft
        if (now := self._now(positions)) != self._compared:
            self._changed(positions, now)
        if self._due is None or self._num_steps < self._due.saved.due:
            return None
        self._draft = self._decide(self._due)
        if self._draft is None:
            self._due = None
        return self._draft

    def move(self, states: JobStates) -> OpenedRun:
        """Moves to the draft, as a run that is resumed there would begin.

        If a job has joined since the draft was made and does not fit there, the run
        stays where it is, and its jobs begin again from their states.

        Args:
            states: The states of the jobs. Nothing runs on the devices.

        Returns:
            The run, with the jobs in its slots.
        """
        draft = self._draft
        assert draft is not None
        began, parked = time.perf_counter(), states.read()
        if reason := self._why_not(draft.plan):
            text = "replicas: auto: not moving, as a job has joined meanwhile: %s"
            logger.warning(text, reason)
            num_compiled = self._run.layout.num_compilations()
            draft = dataclasses.replace(self._run, num_compiled=num_compiled)
        has_moved = self._run.plan is not draft.plan
        self._run.slots.delete()
        gc.collect()  # what the stream has left on the devices may be in cycles
        self._run = run = draft.placed()
        reseat_jobs(self._jobs, parked, run.slots, run.plan.num_slots)
        self._due = self._draft = None
        if has_moved:
            seconds = time.perf_counter() - began
            logger.info("replicas: auto: moved in %.1f s", seconds)
        return run

    def saved(self) -> SavedReplan | None:
        """Returns what a checkpoint at this border is to keep; None: replicas stay."""
        if self._run.choice is None:
            return None
        if self._due is not None:
            return self._due.saved
        return SavedReplan(
            deployment=_describe(self._run.plan),
            jobs=sorted(self._compared.training),
            held=sorted(self._compared.held),
        )

    # ---- the jobs ------------------------------------------------------------------

    def _positions(self) -> dict[str, JobPosition]:
        """Returns the positions of the jobs that train or may, by name."""
        return {
            job.name: _position(number, job, job.progress.step, job.progress.slot)
            for number, job in enumerate(self._jobs)
            if not (job.progress.is_over or job.awaits_parent)
            and not self._is_asked_to_pause(job.name)
        }

    def _now(self, positions: Collection[str]) -> _Compared:
        """Returns the jobs for which replicas would be compared now.

        A job that has ended holds its slot until its evaluation and export are done.
        """
        holds_all = self._holds_all()
        held = [
            job.name
            for job in self._jobs
            if holds_all or job.has_slot or not job.progress.is_over
        ]
        return _Compared(training=frozenset(positions), held=frozenset(held))

    def _why_not(self, plan: RunPlan) -> str:
        """Returns why a plan does not hold the jobs; empty if it does."""
        held, limits = self._now(()).held, plan.config.limits
        try:
            for job in self._jobs:
                if job.name in held:
                    check_fits(job.prepared, plan.spec, limits.capacity)
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def _num_steps(self) -> int:
        return sum(job.progress.step for job in self._jobs)

    def _changed(self, positions: dict[str, JobPosition], now: _Compared) -> None:
        """Begins a comparison that is due a window later, if the run is longer."""
        why = self._compared.changes(now)
        self._compared, self._due = now, None
        if not has_rest(self._run.plan, positions.values()):
            return
        running = {n: p.slot for n, p in positions.items() if p.slot is not None}
        window = self._run.plan.config.window_steps * len(running)
        saved = SavedReplan(
            deployment=_describe(self._run.plan),
            jobs=sorted(positions),
            held=sorted(now.held),
            steps={name: p.step for name, p in positions.items()},
            slots=running,
            why=why,
            due=self._num_steps + window,
        )
        self._begin(saved)

    # ---- the comparison --------------------------------------------------------------

    def _begin(self, saved: SavedReplan) -> None:
        """Begins a comparison in a thread."""
        run, jobs = self._run, [job.prepared for job in self._jobs]
        ended = [job.name for job in jobs if job.name not in self._compared.held]
        num_slots = run.plan.num_slots  # fewer, maybe, than where it was saved
        slots = {name: slot for name, slot in saved.slots.items() if slot < num_slots}
        positions = [
            _position(number, job, saved.steps[job.name], slots.get(job.name))
            for number, job in enumerate(self._jobs)
            if job.name in saved.steps
        ]
        self._num_begun = number = self._num_begun + 1

        def is_wanted() -> bool:
            return number == self._num_begun

        def weigh() -> _Weighed | None:
            with self._turn:
                return _weighed(run, jobs, positions, ended, is_wanted)

        self._due = _Due(saved=saved, found=in_background(weigh))

    def close(self) -> None:
        """Waits for the comparison that is being made; further ones are dropped."""
        self._num_begun += 1
        with self._turn:
            pass

    def _decide(self, due: _Due) -> OpenedRun | None:
        """Returns the draft of a comparison that is due, and logs what was decided."""
        why = due.saved.why
        try:
            found = due.found.result()
        except JaxloraError as error:
            logger.warning("replicas: auto: %s: not compared: %s", why, error)
            return None
        assert found is not None, "it is the last one that has begun"
        if found.why_not:
            text = "replicas: auto: %s: not moving to %s, which cannot run: %s"
            logger.warning(text, why, found.move.then, found.why_not)
            return None
        log_notes([found.move.note(why)])
        return found.draft


def _weighed(
    run: OpenedRun,
    jobs: Sequence[PreparedJob],
    positions: Sequence[JobPosition],
    ended: Collection[str],
    is_wanted: Callable[[], bool],
) -> _Weighed | None:
    """Compares replicas; if moving pays, compiles the programs of the other ones.

    It returns None if the comparison is no longer wanted: a job has left meanwhile, or
    the run has ended.
    """
    choice = run.choice
    assert choice is not None
    if not is_wanted():
        return None
    move = choice.weigh(run.plan, jobs, positions, ended)
    if not move.pays:
        return _Weighed(move=move)
    try:
        if not is_wanted():
            return None
        draft = run.drafted(choice.plan(move, jobs))
    except JaxloraError as error:
        return _Weighed(move=move, why_not=str(error))
    return _Weighed(move=move, draft=draft)


def _position(number: int, job: JobState, step: int, slot: int | None) -> JobPosition:
    return JobPosition(
        job=number,
        priority=job.settings.priority,
        slot=slot,
        step=step,
        num_steps=job.num_steps,
        batch_tokens=job.batch_tokens,
    )


def _describe(plan: RunPlan) -> str:
    """Names the replicas of a run, such that other ones have another name."""
    config = plan.config
    if config.replica_shapes:
        return f"{describe_list(config.replica_shapes)}, {config.remat}"
    return f"{config.mesh}, {config.limits.capacity}, {config.remat}"


def _named(names: Sequence[str]) -> str:
    text, more = ", ".join(names[:_MOST_NAMED]), len(names) - _MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text
