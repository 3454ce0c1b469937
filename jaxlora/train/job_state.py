"""The state of a job in a run: its progress, its slot, and what is due."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.common.counted import counted
from jaxlora.config import LoraJob
from jaxlora.config.clone import CloneOf
from jaxlora.config.schedules import learning_rate
from jaxlora.data.pack import JobBatch
from jaxlora.objectives.base import Objective, reference_of
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.run.events import JobInfo
from jaxlora.run.job_progress import JobProgress


class JobState:
    """A job of a run.

    Attributes:
        prepared: Its settings, modules and samples.
        like: An adapter with the modules, ranks and shapes of the job's; its values
            may be zeros.
        progress: Progress of the job.
        parked: State of the slot that the job left, while it is paused.
        references: Log-probabilities of its samples by the reference that are computed
            once, if its objective needs them: of `train`, unless the reference runs in
            each step, and of `eval` if there are any; of `train_recombined` and
            `eval_recombined`, if it has baselines. None: they have not been computed.
        runs_reference: Whether the reference runs in each step; see `PreparedJob`.
        is_drawn_alone: Whether `start` runs no program on the devices, so that any
            thread may take it.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        like: Adapter,
        draw: Callable[[], Adapter] | None = None,
        *,
        is_drawn_alone: bool = True,
    ):
        """Makes the state of a job that has done nothing.

        Args:
            prepared: The job.
            like: The adapter that it starts from, or one of the same shapes.
            draw: Makes the adapter that it starts from; None: this is `like`.
            is_drawn_alone: Whether `draw` runs no program on the devices.
        """
        self.prepared, self.like, self._draw = prepared, like, draw
        self.is_drawn_alone = is_drawn_alone
        self.progress = JobProgress()
        self.parked: ParkedSlot | None = None
        self.references: Mapping[str, np.ndarray] | None = None
        self.runs_reference = prepared.runs_reference

    @property
    def start(self) -> Adapter:
        """The adapter that the job starts from.

        Fresh weights are drawn each time, always with the same bits: a job needs them
        once, and one that continues from a checkpoint never.
        """
        return self.like if self._draw is None else self._draw()

    @property
    def settings(self) -> LoraJob:
        """Settings of the job."""
        return self.prepared.settings

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.settings.name

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.prepared.num_steps

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens of a global batch."""
        return self.prepared.batch_tokens

    @property
    def slot(self) -> int:
        """The job's slot; it must be running."""
        assert self.progress.slot is not None, f"{self.name} has no slot"
        return self.progress.slot

    @property
    def has_slot(self) -> bool:
        """Whether the job's weights are in a slot."""
        return self.progress.slot is not None

    @property
    def largest_rank(self) -> int:
        """Largest rank of the job's modules in its slot."""
        return max(weights.rank for weights in self.like.modules.values())

    @property
    def trained_rank(self) -> int:
        """Largest rank of the job's modules that is trained, as the run file has it."""
        return max(map(self.like.trained_rank, self.like.modules.values()))

    @property
    def has_begun(self) -> bool:
        """Whether the job has a state, and has not ended."""
        return self.has_slot or self.parked is not None

    @property
    def lacks_references(self) -> bool:
        """Whether log-probabilities of the reference have to be computed and kept."""
        prepared = self.prepared
        is_kept = not self.runs_reference or prepared.eval_data is not None
        return prepared.objective.needs_reference and is_kept and not self.references

    @property
    def awaits(self) -> CloneOf | None:
        """The job and step whose state this one waits for; None: it is no such copy."""
        is_new = self.progress.status == "waiting" and self.parked is None
        return self.settings.clone_of if is_new else None

    def start_as_copy(self, parent: "JobState", state: ParkedSlot) -> None:
        """Takes over the whole state of another job; what is best counts anew.

        Args:
            parent: The other job, between two of its global batches.
            state: Its state.
        """
        self.parked, self.references = state, parent.references
        self.progress = progress_of_copy(parent.name, parent.progress)

    @property
    def next_border(self) -> int:
        """Optimizer steps done when the job's state can next be copied."""
        return self.progress.step + (self.parked is None)

    def update(self, **changes) -> None:
        """Changes some fields of `progress`."""
        self.progress = dataclasses.replace(self.progress, **changes)

    def batch(self, slot: int, step: int) -> JobBatch:
        """Returns the global batch of an optimizer step, for the job in a slot."""
        objective = self.prepared.objective
        samples: Sequence[TokenizedSample] = self.prepared.take_samples(step)
        if objective.needs_reference and not self.runs_reference:
            numbers = self.prepared.sample_numbers(step)
            samples = self._referred(samples, "train", numbers)
        return self._batch(
            slot,
            samples,
            step=step,
            weight=1.0 / objective.num_terms(samples),
            is_reference=self._is_reference(step, dropout=self.settings.dropout),
        )

    def _batch(
        self, slot: int, samples: Sequence[TokenizedSample], **others: Any
    ) -> JobBatch:
        """Returns samples as a batch of the job's objective, unless `others` say so."""
        fields: dict[str, Any] = {
            "step": 0,
            "weight": 1.0,
            "objective": self.prepared.objective,
            "settings": self.prepared.objective_settings,
        }
        return JobBatch(slot=slot, samples=samples, **(fields | others))

    def eval_batch(self, slot: int) -> JobBatch:
        """Returns all held-out samples, for the job in a slot."""
        held_out = self.prepared.eval_data
        assert held_out is not None, f"{self.name} has no held-out samples"
        return self._batch(
            slot,
            self._referred(held_out.samples, "eval", slice(None)),
            is_reference=self._is_reference(self.progress.step, dropout=0.0),
        )

    def _is_reference(self, step: int, *, dropout: float) -> bool:
        """Whether the adapter after so many steps is still the reference.

        A warm-up may begin with a rate of 0, so that the first step changes nothing.
        The rates of steps that another job or run has done are not known.

        Args:
            step: Optimizer steps done.
            dropout: Probability of dropping a feature, which changes what an adapter
                computes unless it is fresh.
        """
        prepared, job = self.prepared, self.settings
        if not prepared.starts_as_reference or (prepared.start and dropout):
            return False
        is_own = job.clone_of is None and job.continue_from is None
        is_still = step == 1 and is_own and self.learning_rate(0) == 0
        return step == 0 or is_still

    def baseline_batch(
        self, slot: int, batch: JobBatch | None = None
    ) -> JobBatch | None:
        """Returns the recombined samples of a global batch, for the job in a slot.

        Args:
            slot: The slot.
            batch: The global batch; None: all held-out samples.

        Returns:
            The samples; None if the job has no baselines.
        """
        objective = self.prepared.baseline
        if objective is None:
            return None
        which = "eval" if batch is None else "train"
        if batch is None:
            numbers = np.arange(len(self.prepared.neighbors["eval"]))
        else:
            numbers = self.prepared.sample_numbers(batch.step)
        samples = [self.prepared.recombined(which, i) for i in numbers.tolist()]
        if batch is None or not self.runs_reference:
            samples = self._referred(samples, f"{which}_recombined", numbers)
        step = 0 if batch is None else batch.step
        weight = 1.0 / len(samples)
        return self._batch(slot, samples, step=step, weight=weight, objective=objective)

    @property
    def eval_ranges(self) -> Mapping[str, range]:
        """The groups of each held-out data set by name, if there are several."""
        held_out = self.prepared.eval_data
        return {} if held_out is None else held_out.ranges

    def _referred(
        self, samples: Sequence[TokenizedSample], which: str, numbers: Any
    ) -> Sequence[TokenizedSample]:
        """Returns samples with the log-probabilities by the reference, if it is used.

        Args:
            samples: The samples.
            which: Their key in `references`.
            numbers: Their numbers.
        """
        if not self.prepared.objective.needs_reference:
            return samples
        assert self.references is not None, f"{self.name} has no references"
        values = self.references[which][numbers]
        return tuple(
            dataclasses.replace(sample, reference_logp=float(value))
            for sample, value in zip(samples, values, strict=True)
        )

    def reference_source(self) -> dict[str, str]:
        """Returns what `references` are computed from, besides the base."""
        names = ["data_fingerprint", "eval_data_fingerprint"]
        match reference_of(self.prepared.objective_settings):
            case "start":
                names.append("init_from_fingerprint")
            case str(folder) if folder != "base":
                names.append("reference_fingerprint")
        source = {name: self.prepared.fingerprints[name] or "" for name in names}
        if self.prepared.baseline is not None:
            # Which samples are recombined follows from the order of the job's batches.
            neighbors = self.prepared.neighbors["train"].astype(np.int64)
            source["neighbors"] = hashlib.sha256(neighbors.tobytes()).hexdigest()
        return source

    def plain_batches(self, slot: int) -> dict[str, JobBatch]:
        """Returns the samples whose references are kept, by their key there."""
        prepared = self.prepared
        found = {"train": prepared.train_data, "eval": prepared.eval_data}
        if self.runs_reference:
            del found["train"]
        batches: dict[str, tuple[Iterable[TokenizedSample], Objective]] = {}
        for which, data in found.items():
            if data is None:
                continue
            batches[which] = data.samples, prepared.objective
            if (baseline := prepared.baseline) is not None:
                numbers = range(len(data.samples))
                recombined = [prepared.recombined(which, i) for i in numbers]
                batches[f"{which}_recombined"] = recombined, baseline
        return {
            which: self._batch(
                slot,
                tuple(dataclasses.replace(s, reference_logp=0.0) for s in samples),
                objective=objective,
            )
            for which, (samples, objective) in batches.items()
        }

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of an optimizer step, counted from 0."""
        return learning_rate(self.settings, step, self.num_steps)

    def wants_eval(self, step: int | None = None) -> bool:
        """Whether an evaluation is due after some steps; None: those done so far."""
        if self.prepared.eval_data is None:
            return False
        step, every = (
            self.progress.step if step is None else step,
            self.settings.eval_every,
        )
        return step in (0, self.num_steps) or bool(every and step % every == 0)

    def lacks_eval(self) -> bool:
        """Whether the current weights in the slot have not been evaluated."""
        can_evaluate = self.has_slot and self.prepared.eval_data is not None
        return can_evaluate and self.progress.last_eval_step != self.progress.step

    def note_step(self, loss: float, num_tokens: int, num_target_tokens: int) -> None:
        """Counts one optimizer step."""
        first = self.progress.first_loss
        self.update(
            step=self.progress.step + 1,
            num_tokens=self.progress.num_tokens + num_tokens,
            num_target_tokens=self.progress.num_target_tokens + num_target_tokens,
            first_loss=loss if first is None else first,
            last_loss=loss,
        )

    def note_eval(
        self,
        loss: float,
        metric: float | None,
        *,
        is_maximized: bool,
        by_set: Mapping[str, float],
    ) -> bool:
        """Records an evaluation; returns whether it is the best so far.

        Of equal metrics, that with the lower loss is better, and of equal losses the
        later one, so that a metric that never changes does not keep the first weights.

        Args:
            loss: Mean loss over the held-out target tokens, in nats.
            metric: The value by which evaluations are compared; None: the loss.
            is_maximized: Whether a higher metric is better.
            by_set: Mean loss over each held-out data set, if there are several.
        """
        before = self.progress
        gain = _gain(before, loss, metric, is_maximized=is_maximized)
        is_best, gained = gain >= 0, gain > self.settings.early_stopping_delta
        self.update(
            first_eval=loss if before.first_eval is None else before.first_eval,
            last_eval=loss,
            last_eval_sets=by_set,
            last_eval_step=before.step,
            best_eval=loss if is_best else before.best_eval,
            best_step=before.step if is_best else before.best_step,
            last_metric=metric,
            best_metric=metric if is_best else before.best_metric,
            evals_without_gain=0 if gained else before.evals_without_gain + 1,
        )
        return is_best

    def has_stalled(self) -> bool:
        """Whether early stopping ends the job."""
        patience = self.settings.early_stopping
        return bool(patience and self.progress.evals_without_gain >= patience)

    def fail_of_step(self, loss: float, grad_norm: float) -> None:
        """Ends the job, as a step with this loss and gradient was not finite."""
        self.update(
            status="failed",
            reason=f"loss {loss:g} with gradient norm {grad_norm:g} in step "
            f"{self.progress.step + 1} is not finite; lower learning_rate or set "
            "max_grad_norm",
        )

    def end_if_due(self) -> None:
        """Ends the job, between two batches, if its own settings say so."""
        if (step := self.progress.step) > (wanted := self.num_steps):
            reason = f"{counted(step, 'step')} done, and the number wanted is {wanted}"
            self.update(status="finished", reason=reason)
        elif step == wanted:
            self.update(status="finished", reason="all steps are done")
        elif self.has_stalled():
            patience = self.settings.early_stopping
            reason = f"no better evaluation for {patience} evaluations"
            self.update(status="stopped early", reason=reason)

    def info(self) -> JobInfo:
        """Describes the job as it enters a run."""
        return JobInfo(
            name=self.name,
            settings=self.settings,
            rank=self.trained_rank,
            num_modules=len(self.like.modules),
            num_steps=self.num_steps,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )


def progress_of_copy(name: str, progress: JobProgress) -> JobProgress:
    """Returns the progress of a job that starts as a copy of another one.

    Args:
        name: The other job.
        progress: Its progress.
    """
    return dataclasses.replace(
        progress,
        status="paused",
        reason=f"it starts as a copy of {name}",
        slot=None,
        stopped_by=None,
        best_eval=None,
        best_step=None,
        best_metric=None,
        evals_without_gain=0,
    )


def _gain(
    before: JobProgress, loss: float, metric: float | None, *, is_maximized: bool
) -> float:
    """Returns by how much an evaluation is better than the best one before.

    It is the difference of the metrics, or of the losses if the metrics are equal;
    infinite if there is none before, and NaN if a value is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(metric or 0.0)):
        return math.nan
    found, best = [loss], [before.best_eval]
    if metric is not None:
        sign, known = -1 if is_maximized else 1, before.best_metric
        found.insert(0, sign * metric)
        best.insert(0, None if known is None else sign * known)
    for value, other in zip(found, best, strict=True):
        if other is None:
            return math.inf
        if value != other:
            return other - value
    return 0.0
