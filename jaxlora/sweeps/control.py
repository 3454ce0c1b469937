"""The trainer of a run, with the rules, the search and the report of its sweep."""

import dataclasses
from collections.abc import Sequence

from jaxlora.config import LoraJob, RunConfig
from jaxlora.errors import ConfigError
from jaxlora.hf.load import FrozenModel
from jaxlora.run.log import METRICS_FILE, read_events
from jaxlora.run.saved_run import SavedSweep
from jaxlora.sweeps.decisions import (
    Decisions,
    check_same_rungs,
    compared_steps,
    halving_of,
)
from jaxlora.sweeps.files import write_result
from jaxlora.sweeps.ranking import SweepReport, Trial
from jaxlora.sweeps.rules import Curve, Decided, Stop
from jaxlora.sweeps.suggesting import Suggestions
from jaxlora.train.control import Control
from jaxlora.train.job_state import JobState
from jaxlora.train.report.summary import RunResult
from jaxlora.train.trainer import RunTrainer


class SweepControl(Control[SweepReport]):
    """The rules of a run's sweep, with what they have seen and decided, and its search.

    Evaluations come in the order of the microbatches, and a decision is made once, at
    the evaluation that it follows from. So it does not depend on time, and a resumed
    run decides the same. Jobs without held-out samples do not take part.
    """

    def __init__(self, config: RunConfig):
        """Makes the object.

        Raises:
            ConfigError: Optuna is not installed, and the search needs it.
        """
        self._rules = () if config.sweep is None else config.sweep.early_exit
        self._metric = None if config.sweep is None else config.sweep.metric
        self._found = Decisions(self._rules, self._metric)
        self._suggestions = Suggestions(config)

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
            stops=dict(found.stops),
            halving=halving_of(self._rules),
        )

    def suggested(self) -> dict[str, dict[str, float]]:
        """Returns the place on each axis of the jobs that were suggested, by name."""
        return self._suggestions.saved()

    def restore(
        self, saved: SavedSweep | None, suggested: dict[str, dict[str, float]]
    ) -> None:
        """Takes over what was seen, decided and suggested.

        Raises:
            CheckpointError: Its rungs of halving are others than those of the run, or
                a place is not on the axes of the search.
        """
        self._found = found = Decisions(self._rules, self._metric)
        if saved is not None:
            check_same_rungs(self._rules, saved.halving, "the checkpoint")
            found.points = {name: list(one) for name, one in saved.points.items()}
            found.metrics = {name: list(one) for name, one in saved.metrics.items()}
            stops = {name: Stop(*stop) for name, stop in saved.stops.items()}
            found.repeat(Decided(cutoffs=tuple(saved.cutoffs), stops=stops))
        self._suggestions.restore(suggested)

    # ---- decisions -----------------------------------------------------------------

    def suggest(self, jobs: Sequence[JobState], num_slots: int) -> LoraJob | None:
        """Returns what the search suggests now; see `Control.suggest`."""
        return self._suggestions.next(
            [(job.settings, job.progress) for job in jobs], num_slots
        )

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""
        if job.prepared.eval_data is None:
            return False
        return job.progress.step in compared_steps(self._rules, job.num_steps)

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Decides after evaluations; see `Control.note`."""
        if not self._rules:
            return False
        self._found.note(map(point_of, evaluated), self._standings(jobs))
        return bool(evaluated)

    def review(self, jobs: Sequence[JobState]) -> None:
        """Decides about the rungs to which all jobs have come."""
        self._found.review(self._standings(jobs))

    def stop_of(self, job: JobState) -> tuple[str, str] | None:
        """Returns the rule by which a job ends, and the reason; None if it goes on."""
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

    def _standings(self, jobs: Sequence[JobState]) -> dict[str, Curve]:
        return {
            job.name: self._standing(job)
            for job in jobs
            if job.prepared.eval_data is not None
        }

    def _standing(self, job: JobState) -> Curve:
        progress, step = job.progress, job.progress.step
        if (origin := job.awaits) is not None:
            step = origin.step or 0  # no rung before it waits for the copy
        return Curve(
            num_steps=job.num_steps,
            step=step,
            is_over=progress.is_over,
            is_held=self.live.pause_reason(job.name) is not None,
            has_failed=progress.status == "failed",
        )

    def report(
        self,
        result: RunResult[SweepReport],
        jobs: Sequence[JobState],
        config: RunConfig,
    ) -> RunResult[SweepReport]:
        """Ranks the configurations, if there is a sweep; see `report_sweep`."""
        if config.sweep is None:
            return super().report(result, jobs, config)
        return report_sweep(result, config)


def point_of(job: JobState) -> tuple[str, int, float, float | None]:
    """Returns name, steps done, loss and metric of a job that was just evaluated."""
    progress = job.progress
    assert progress.last_eval is not None
    return job.name, progress.step, progress.last_eval, progress.last_metric


def report_sweep(
    result: RunResult[SweepReport], config: RunConfig
) -> RunResult[SweepReport]:
    """Ranks configurations; writes the report, and merges the best if asked to.

    Raises:
        JaxloraError: The log of the run is damaged, a file cannot be written, or the
            best configuration cannot be merged.
    """
    assert config.sweep is not None
    trials = list(map(Trial.of, result.jobs))
    events = read_events(result.output_dir / METRICS_FILE)
    report = SweepReport.of(config.sweep, trials, events, config.num_devices)
    result = dataclasses.replace(result, sweep=report)
    write_result(result, config)
    return result


class Trainer(RunTrainer[SweepReport]):
    """Trains the jobs of a run together, each exactly as if it were alone.

    If the run is a sweep, its rules decide which jobs end early, and which follow.

    Attributes:
        model: The frozen base.
        jobs: The jobs, in the order in which they were given.
        reader: Reads the data of jobs, with the tokenizer of the base.
        output_dir: Folder of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        model: FrozenModel | None = None,
        *,
        replan: bool = False,
    ):
        """Loads the base model and every job's data; trains nothing yet.

        The programs of the run are loaded or compiled meanwhile. They are kept in
        ~/.cache/jaxlora, unless JAX's settings of the compilation cache say otherwise.

        Args:
            config: The run.
            model: The base model, if it is loaded already.
            replan: If the run has begun, choose what is `auto` anew for the jobs that
                have not ended; otherwise, what was chosen when it began stays.

        Raises:
            JaxloraError: A setting, the model or a job's data cannot be used, a GPU is
                visible and JAX does not use it, or the sweep has several groups.
        """
        if config.sweep is not None and config.sweep.has_groups:
            raise ConfigError(
                f"sweep.groups is {config.sweep.groups_text}, and a Trainer trains one "
                "group. Call jaxlora.sweeps.engine.run.run_groups(config), or run "
                "jaxlora sweep."
            )
        super().__init__(config, model, SweepControl(config), replan=replan)
