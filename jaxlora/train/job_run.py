"""A job of a run: its data, its position in them, and its progress."""

import dataclasses
import functools
import hashlib
import math

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.learning_rate import learning_rate
from jaxlora.adapters.slots import ParkedSlot
from jaxlora.config import LoraJob
from jaxlora.data.order import JobOrder
from jaxlora.data.pack import JobBatch
from jaxlora.data.tokenize import TokenizedData
from jaxlora.modules.trained_tensors import tensors_with
from jaxlora.run.events import JobInfo
from jaxlora.run.job_progress import JobProgress


def job_order(job: LoraJob, data: TokenizedData) -> JobOrder:
    """Returns the order of a job's samples, which defines its global batches."""
    return JobOrder(
        num_samples=len(data.samples),
        batch_size=job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        epochs=job.epochs,
        steps=job.steps,
    )


def batch_lengths(data: TokenizedData, order: JobOrder, step: int) -> list[int]:
    """Returns the tokens of each sample of an optimizer step's global batch."""
    return [len(data.samples[i].token_ids) for i in order.batch(step)]


def fingerprints(
    train: TokenizedData, held_out: TokenizedData | None, start: Adapter | None
) -> dict[str, str | None]:
    """Hashes the inputs that a job's settings only name.

    Args:
        train: Training samples.
        held_out: Held-out samples, if any.
        start: Adapter of `init_from`, if any.
    """
    return {
        "data_fingerprint": train.fingerprint,
        "eval_data_fingerprint": None if held_out is None else held_out.fingerprint,
        "init_from_fingerprint": None if start is None else _hash_adapter(start),
    }


class JobRun:
    """One job of a run.

    Attributes:
        job: Settings of the job.
        start: Adapter that the job starts from.
        train_data: Training samples.
        eval_data: Held-out samples, if any.
        order: Order of the samples, which defines the global batches.
        progress: Progress of the job.
        parked: State of the slot that the job left, while it is paused.
    """

    def __init__(
        self,
        job: LoraJob,
        start: Adapter,
        train_data: TokenizedData,
        eval_data: TokenizedData | None,
    ):
        self.job, self.start = job, start
        self.train_data, self.eval_data = train_data, eval_data
        self.order = job_order(job, train_data)
        self.progress = JobProgress()
        self.parked: ParkedSlot | None = None

    @functools.cached_property
    def fingerprints(self) -> dict[str, str | None]:
        """Hashes of the inputs that the settings only name: data and first adapter."""
        start = None if self.job.init_from is None else self.start
        return fingerprints(self.train_data, self.eval_data, start)

    @property
    def slot(self) -> int:
        """The job's slot; it must be running."""
        assert self.progress.slot is not None, f"{self.job.name} has no slot"
        return self.progress.slot

    @property
    def has_slot(self) -> bool:
        """Whether the job's weights are in a slot."""
        return self.progress.slot is not None

    @property
    def largest_rank(self) -> int:
        """Largest rank of the job's modules."""
        return max(weights.rank for weights in self.start.modules.values())

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.order.num_steps

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens of a global batch."""
        return self.train_data.mean_batch_tokens(self.job.batch_size)

    def update(self, **changes) -> None:
        """Changes some fields of `progress`."""
        self.progress = dataclasses.replace(self.progress, **changes)

    def lengths(self, step: int) -> list[int]:
        """Returns the tokens of each sample of an optimizer step's global batch."""
        return batch_lengths(self.train_data, self.order, step)

    def batch(self, slot: int, step: int) -> JobBatch:
        """Returns the global batch of an optimizer step, for the job in a slot."""
        samples = tuple(self.train_data.samples[i] for i in self.order.batch(step))
        num_targets = sum(int(s.is_target.sum()) for s in samples)
        return JobBatch(slot=slot, step=step, samples=samples, weight=1.0 / num_targets)

    def eval_batch(self, slot: int) -> JobBatch:
        """Returns all held-out samples, for the job in a slot."""
        assert self.eval_data is not None, f"{self.job.name} has no eval data"
        return JobBatch(slot=slot, step=0, samples=self.eval_data.samples, weight=1.0)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of an optimizer step, counted from 0."""
        return learning_rate(self.job, step, self.num_steps)

    def wants_eval(self) -> bool:
        """Whether an evaluation is due after the steps done so far."""
        if self.eval_data is None:
            return False
        step, every = self.progress.step, self.job.eval_every
        return step in (0, self.num_steps) or bool(every and step % every == 0)

    def lacks_eval(self) -> bool:
        """Whether the current weights in the slot have not been evaluated."""
        can_evaluate = self.has_slot and self.eval_data is not None
        return can_evaluate and self.progress.last_eval_step != self.progress.step

    def note_step(self, loss: float, num_tokens: int) -> None:
        """Counts one optimizer step."""
        first = self.progress.first_loss
        self.update(
            step=self.progress.step + 1,
            num_tokens=self.progress.num_tokens + num_tokens,
            first_loss=loss if first is None else first,
            last_loss=loss,
        )

    def note_eval(self, loss: float) -> bool:
        """Records an evaluation; returns whether it is the best so far."""
        before = self.progress
        best = math.inf if before.best_eval is None else before.best_eval
        is_best = loss < best
        gained = loss < best - self.job.early_stopping_delta or best == math.inf
        self.update(
            first_eval=loss if before.first_eval is None else before.first_eval,
            last_eval=loss,
            last_eval_step=before.step,
            best_eval=min(best, loss),
            best_step=before.step if is_best else before.best_step,
            evals_without_gain=0 if gained else before.evals_without_gain + 1,
        )
        return is_best

    def has_stalled(self) -> bool:
        """Whether early stopping ends the job."""
        patience = self.job.early_stopping
        return bool(patience and self.progress.evals_without_gain >= patience)

    def info(self) -> JobInfo:
        """Describes the job as it enters a run."""
        return JobInfo(
            settings=self.job,
            rank=self.largest_rank,
            num_modules=len(self.start.modules),
            num_steps=self.num_steps,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )


def _hash_adapter(adapter: Adapter) -> str:
    digest = hashlib.sha256()
    for name, weights in sorted(adapter.modules.items()):
        digest.update(name.encode())
        for tensor in tensors_with(adapter.is_set):
            digest.update(np.asarray(weights.tensors[tensor.name]).tobytes())
    return digest.hexdigest()
