"""Work for jobs beside their steps: evaluations, texts, references and exports."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from jaxlora.common.counted import counted
from jaxlora.run.events import EvalEvent, SampleEvent, losses_by_set
from jaxlora.train.execute.executor import Executor
from jaxlora.train.job_state import JobState
from jaxlora.train.live_run import LiveRun

logger = logging.getLogger(__name__)


class SideWork:
    """Does what a job needs besides steps, and measures the time that it takes.

    Attributes:
        seconds: Time that was not spent on training, in all.
    """

    def __init__(self, run: LiveRun, executor: Executor, send: Callable[..., None]):
        """Makes the object.

        Args:
            run: The run; its files get adapters and references.
            executor: Evaluates jobs.
            send: Sends an event of a job, given the job, the class of the event and its
                further values.
        """
        self.seconds = 0.0
        self._run, self._executor, self._send = run, executor, send
        self._references: dict[Hashable, dict[str, np.ndarray]] = {}
        sweep = run.plan.config.sweep
        self._is_maximized = sweep is not None and sweep.metric.is_maximized

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the time of the block, which is then no time of training."""
        self._executor.wait()  # the pending microbatch counts as training
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def wants_eval(self, job: JobState) -> bool:
        """Whether an evaluation is due after the steps that a job has done."""
        return job.wants_eval() or self._run.control.wants_eval(job)

    def evaluate(self, jobs: Sequence[JobState], everyone: Sequence[JobState]) -> bool:
        """Evaluates running jobs, and generates texts with their adapters.

        Args:
            jobs: The jobs to evaluate.
            everyone: All jobs of the run.

        Returns:
            Whether jobs may have to wait or to end, as a sweep compares them.
        """
        if not jobs:
            return False
        with self._timed():
            values = self._executor.evaluate({job.slot: job for job in jobs})
        sound = [job for job in jobs if math.isfinite(values[job.slot]["loss"])]
        metrics = self._measure_answers(sound)
        for job in jobs:
            if job not in sound:
                job.update(status="failed", reason="the evaluation loss is not finite")
                continue
            of_objective, metric = values[job.slot], metrics.get(job.name)
            loss = of_objective.pop("loss")
            is_best = job.note_eval(
                loss,
                metric,
                is_maximized=self._is_maximized,
                by_set=losses_by_set(of_objective),
            )
            if is_best and job.settings.keep_best:
                self.export(job)
            self._send(
                job,
                EvalEvent,
                eval_loss=loss,
                is_best=is_best,
                metric=metric,
                metrics=of_objective,
            )
        has_decided = self._run.control.note(everyone, sound)
        self._send_samples(sound)
        return has_decided

    def _measure_answers(self, jobs: Sequence[JobState]) -> dict[str, float]:
        """Returns the sweep's metric of the answers of each job, if it has one."""
        meter, slots = self._run.opened.meter, self._run.opened.slots
        if meter is None or not jobs:
            return {}
        with self._timed():
            return meter.measure(jobs, slots.tables)

    def _send_samples(self, jobs: Sequence[JobState]) -> None:
        """Generates texts with the adapters of jobs that were evaluated."""
        sampler, slots = self._run.opened.sampler, self._run.opened.slots
        if sampler is None or not jobs:
            return
        with self._timed():
            named = {job.name: job.slot for job in jobs}
            samples = sampler.generate(named, slots.tables)
        for job in jobs:
            for values in samples[job.name]:
                self._send(job, SampleEvent, **values)

    def export(self, job: JobState) -> None:
        """Exports the adapter of a job."""
        with self._timed():
            self._run.export(job)

    def refer(self, job: JobState, slot: int) -> None:
        """Computes and keeps the log-probabilities of a job's samples by the reference.

        Jobs of the same objective, data and reference, as of a sweep, have the same
        ones.

        Args:
            job: The job.
            slot: A free slot.
        """
        reference = job.prepared.reference
        source = job.settings.objective, *sorted(job.reference_source().items())
        with self._timed():
            if source not in self._references:
                self._references[source] = {
                    which: self._executor.log_likelihoods(slot, batch, reference)
                    for which, batch in job.plain_batches(slot).items()
                }
            job.references = self._references[source]
            self._run.keep_references(job)
        count = counted(sum(map(len, job.references.values())), "sample")
        logger.info(
            "%s: the log-probabilities of %s by %s were computed once, and are kept",
            job.name,
            count,
            job.prepared.describe_reference(),
        )

    def refer_in_step(self, job: JobState, slot: int) -> None:
        """Makes an adapter the reference of a job's steps, if it compares with one.

        Args:
            job: The job.
            slot: Its slot.
        """
        reference = job.prepared.reference
        if job.runs_reference and reference is not None:
            self._executor.refer(slot, reference)
