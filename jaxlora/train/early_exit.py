"""Decides which configurations of a sweep end early, and which wait for others."""

from collections.abc import Callable, Sequence

from jaxlora.config import RunConfig
from jaxlora.config.sweep_config import ExitRule, Metric
from jaxlora.run.saved_sweep import SavedSweep
from jaxlora.sweeps.rules import Curve, Stop, cut, is_late, judge, rungs
from jaxlora.train.job_state import JobState


class EarlyExit:
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
        halving = [rule for rule in self._rules if rule.type == "halving"]
        self._halving: ExitRule | None = halving[0] if halving else None
        self._metric = Metric() if config.sweep is None else config.sweep.metric
        self._is_held = is_held
        self._metrics: dict[str, list[tuple[int, float]]] = {}
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._cutoffs: list[float] = []
        self._stops: dict[str, Stop] = {}

    # ---- checkpoints ---------------------------------------------------------------

    def saved(self) -> SavedSweep | None:
        """Returns what was seen and decided; None without rules."""
        if not (self._rules or self._points):
            return None
        return SavedSweep(
            points={name: list(found) for name, found in self._points.items()},
            metrics={name: list(found) for name, found in self._metrics.items()},
            cutoffs=list(self._cutoffs),
            stops={n: (stop.rule, stop.reason) for n, stop in self._stops.items()},
        )

    def restore(self, saved: SavedSweep | None) -> None:
        """Takes over what was seen and decided; None: nothing."""
        self._points, self._cutoffs, self._stops, self._metrics = {}, [], {}, {}
        if saved is None:
            return
        self._points = {name: list(found) for name, found in saved.points.items()}
        self._metrics = {name: list(found) for name, found in saved.metrics.items()}
        self._cutoffs = list(saved.cutoffs)
        self._stops = {
            name: Stop(rule=rule, reason=reason)
            for name, (rule, reason) in saved.stops.items()
        }

    # ---- decisions -----------------------------------------------------------------

    def wants_eval(self, job: JobState) -> bool:
        """Whether a job is to be evaluated here because a rule compares it here."""
        if job.prepared.eval_data is None:
            return False
        return any(job.progress.step in self._places(r, job) for r in self._rules)

    def note(self, jobs: Sequence[JobState], evaluated: Sequence[JobState]) -> bool:
        """Decides after evaluations; returns whether anything may have been decided.

        Args:
            jobs: All jobs of the run.
            evaluated: Those that were evaluated just now, after the same microbatch.
        """
        if not self._rules:
            return False
        for job in evaluated:
            step, loss, metric = (
                job.progress.step,
                job.progress.last_eval,
                job.progress.last_metric,
            )
            assert loss is not None
            self._points.setdefault(job.name, []).append((step, loss))
            if metric is not None:
                self._metrics.setdefault(job.name, []).append((step, metric))
        curves = self._curves(jobs)
        for job in evaluated:
            stop = judge(job.name, curves, self._rules)
            if stop is None and self._halving is not None:
                stop = is_late(curves[job.name], self._halving, self._cutoffs)
            if stop is not None:
                self._stops[job.name] = stop
        self.review(jobs)
        return bool(evaluated)

    def review(self, jobs: Sequence[JobState]) -> None:
        """Decides about the rungs to which all jobs have come."""
        rule = self._halving
        while rule is not None and len(self._cutoffs) < len(rungs(rule, 1)):
            found = cut(self._curves(jobs), rule, len(self._cutoffs))
            if found is None:
                return
            self._cutoffs.append(found.cutoff)
            self._stops |= found.stops

    def stop_of(self, job: JobState) -> Stop | None:
        """Returns the decision that a job ends; None if it goes on."""
        return self._stops.get(job.name)

    def waiting_reason(self, job: JobState) -> str | None:
        """Returns why a job is to wait for others; None if it may go on."""
        rule, step = self._halving, job.progress.step
        if rule is None or job.name in self._stops or job.name not in self._points:
            return None
        if self._points[job.name][-1][0] != step:
            return None
        if step not in self._places(rule, job)[len(self._cutoffs) :]:
            return None
        return f"it waits at step {step} until all configurations have come as far"

    def _places(self, rule: ExitRule, job: JobState) -> list[int]:
        compares = rule.type in ("halving", "asha")
        return rungs(rule, job.num_steps) if compares else []

    def _curves(self, jobs: Sequence[JobState]) -> dict[str, Curve]:
        return {
            job.name: self._curve(job)
            for job in jobs
            if job.prepared.eval_data is not None
        }

    def _curve(self, job: JobState) -> Curve:
        progress, stop = job.progress, self._stops.get(job.name)
        origin, step = job.settings.clone_of, progress.step
        if job.awaits_parent and origin is not None:
            step = origin.step or 0  # no rung before it waits for the copy
        by_rule = None if stop is None else stop.rule
        points: Sequence[tuple[int, float]] = self._points.get(job.name, ())
        losses = None
        if not self._metric.is_loss:
            found = self._metrics.get(job.name, ())
            points, losses = [(s, self._metric.cost(v)) for s, v in found], points
        return Curve(
            num_steps=job.num_steps,
            step=step,
            points=points,
            losses=losses,
            metric=self._metric,
            is_over=progress.is_over or stop is not None,
            is_held=self._is_held(job.name),
            has_failed=progress.status == "failed" or by_rule not in (None, "halving"),
        )
