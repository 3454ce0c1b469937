"""Decides which configurations of a sweep end early, and which wait for others."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxlora.config import RunConfig
from jaxlora.run.saved_run import SavedSweep
from jaxlora.sweeps.decisions import (
    Decided,
    Decisions,
    Standing,
    check_same_rungs,
    compared_steps,
    halving_of,
)
from jaxlora.sweeps.rules import Stop
from jaxlora.train.job_state import JobState


@runtime_checkable
class SweepControl(Protocol):
    """Decides about the jobs of a run, and gives it further ones.

    The thread that trains calls all methods, between two microbatches.

    Attributes:
        version: Changes when jobs may start, end or have to wait for a new reason.
    """

    version: int

    def saved(self) -> SavedSweep | None:
        """Returns what a checkpoint keeps; None: nothing."""

    def restore(self, saved: SavedSweep | None) -> None:
        """Takes over what a checkpoint has kept."""

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Decides after evaluations; returns whether anything may have been decided.

        Args:
            jobs: All jobs of the run.
            evaluated: Those that were evaluated just now, after the same microbatch.
        """

    def review(self, jobs: Sequence[JobState]) -> None:
        """Looks for what is due before jobs end, pause and start."""

    def stop_of(self, job: JobState) -> Stop | None:
        """Returns the decision that a job ends; None if it goes on."""

    def waiting_reason(self, job: JobState) -> str | None:
        """Returns why a job is not to train now; None if it may."""

    def num_allowed(self, job: JobState) -> int:
        """Returns the number of optimizer steps after which a job may have to wait."""

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint is to be written where a round ends next."""

    def wait(self, is_asked_to_end: Callable[[], bool]) -> bool:
        """Waits while no job may train; returns whether the run is to look again.

        Args:
            is_asked_to_end: Whether a signal has asked for the run's end meanwhile.
        """


class EarlyExit(SweepControl):
    """The rules of a run's sweep, with what they have seen and decided.

    Evaluations come in the order of the microbatches, and a decision is made once, at
    the evaluation that it follows from. So it does not depend on time, and a resumed
    run decides the same. Jobs without held-out samples do not take part.
    """

    def __init__(self, config: RunConfig, is_held: Callable[[str], bool]):
        """Makes the object.

        Args:
            config: The run.
            is_held: Whether the user has asked for a job to pause, by name.
        """
        self._rules = () if config.sweep is None else config.sweep.early_exit
        self._metric = None if config.sweep is None else config.sweep.metric
        self._is_held = is_held
        self._found = Decisions(self._rules, self._metric)
        self.version = 0

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self) -> SavedSweep | None:
        """Returns what was seen and decided; None without rules."""
        found = self._found
        if not (self._rules or found.points):
            return None
        return SavedSweep(
            points={name: list(points) for name, points in found.points.items()},
            metrics={name: list(points) for name, points in found.metrics.items()},
            cutoffs=list(found.cutoffs),
            stops={n: (stop.rule, stop.reason) for n, stop in found.stops.items()},
            halving=halving_of(self._rules),
        )

    def restore(self, saved: SavedSweep | None) -> None:
        """Takes over what was seen and decided; None: nothing.

        Raises:
            CheckpointError: Its rungs of halving are others than those of the run.
        """
        self._found = Decisions(self._rules, self._metric)
        if saved is None:
            return
        check_same_rungs(self._rules, saved.halving, "the checkpoint")
        self._found.points = {n: list(points) for n, points in saved.points.items()}
        self._found.metrics = {n: list(found) for n, found in saved.metrics.items()}
        stops = {n: Stop(rule=r, reason=why) for n, (r, why) in saved.stops.items()}
        self._found.repeat(Decided(cutoffs=tuple(saved.cutoffs), stops=stops))

    # ---- decisions -----------------------------------------------------------------

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""
        if job.prepared.eval_data is None:
            return False
        return job.progress.step in compared_steps(self._rules, job.num_steps)

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Decides after evaluations; see `SweepControl.note`."""
        if not self._rules:
            return False
        points, metrics = [], {}
        for job in evaluated:
            progress = job.progress
            assert progress.last_eval is not None
            points.append((job.name, progress.step, progress.last_eval))
            if progress.last_metric is not None:
                metrics[job.name] = progress.last_metric
        self._found.note(points, self._standings(jobs), metrics)
        return bool(evaluated)

    def review(self, jobs: Sequence[JobState]) -> None:
        """Decides about the rungs to which all jobs have come."""
        self._found.review(self._standings(jobs))

    def stop_of(self, job: JobState) -> Stop | None:
        """Returns the decision that a job ends; None if it goes on."""
        return self._found.stops.get(job.name)

    def waiting_reason(self, job: JobState) -> str | None:
        """Returns why a job is to wait for others; None if it may go on."""
        step = job.progress.step
        if not self._found.waits(job.name, step, job.num_steps):
            return None
        return f"it waits at step {step} until all configurations have come as far"

    def num_allowed(self, job: JobState) -> int:
        """Returns the steps up to the next rung at which it is compared, or all."""
        if job.prepared.eval_data is None:
            return job.num_steps
        step, num_steps = job.progress.step, job.num_steps
        return self._found.num_allowed(job.name, step, num_steps)

    def wants_checkpoint(self) -> bool:
        """No checkpoint is needed besides those of the run's settings."""
        return False

    def wait(self, is_asked_to_end: Callable[[], bool]) -> bool:
        """Nothing comes from elsewhere, so the run may end."""
        return False

    def _standings(self, jobs: Sequence[JobState]) -> dict[str, Standing]:
        return {
            job.name: self._standing(job)
            for job in jobs
            if job.prepared.eval_data is not None
        }

    def _standing(self, job: JobState) -> Standing:
        progress, origin = job.progress, job.settings.clone_of
        step = progress.step
        if job.awaits_parent and origin is not None:
            step = origin.step or 0  # no rung before it waits for the copy
        return Standing(
            num_steps=job.num_steps,
            step=step,
            is_over=progress.is_over,
            is_held=self._is_held(job.name),
            has_failed=progress.status == "failed",
        )
