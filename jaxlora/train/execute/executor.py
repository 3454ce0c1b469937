"""The interface between the stream of a run and the devices that train it.

Control flows downward. `Stream` decides which jobs train and when a job ends; an
executor queues the work on its devices and yields what the optimizer steps did.
`staged_executor.py` does this for one device and for any mesh.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.data.pack import JobBatch
from jaxlora.plan.stream_plan import StreamTick
from jaxlora.train.job_state import JobState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of one optimizer step of one job.

    Attributes:
        loss: Mean over the global batch's target tokens, in nats, before the step.
        grad_norm: Norm of the adapter's gradient, before clipping.
        learning_rate: Learning rate of the step.
        num_tokens: Tokens of the global batch, prompts included.
        num_target_tokens: Tokens whose loss counts.
        is_finite: Whether loss, hidden states and gradient are all finite; if not, the
            adapter was left as it was.
        metrics: Metrics of the job's objective, by name: means over the global batch.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    is_finite: bool
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TickWork:
    """The work of a tick, or of a replica in a tick.

    Attributes:
        num_microbatches: Microbatches that ran.
        num_rows: Rows of them, padding included.
        num_tokens: Tokens in them, without padding.
    """

    num_microbatches: int = 0
    num_rows: int = 0
    num_tokens: int = 0

    def __add__(self, other: "TickWork") -> "TickWork":
        return TickWork(
            num_microbatches=self.num_microbatches + other.num_microbatches,
            num_rows=self.num_rows + other.num_rows,
            num_tokens=self.num_tokens + other.num_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """A tick that `Executor.run` has run.

    Attributes:
        steps: Results of the optimizer steps that followed it, by slot.
        work: Its work, by the number of the replica; empty if none of its samples had
            to run. Without `RunConfig.replicas`, all of it is that of number 0.
        snapshot: The states that `Executor.snapshot` has promised; None: not in this
            item.
    """

    steps: Mapping[int, StepOutcome]
    work: Mapping[int, TickWork] = dataclasses.field(default_factory=dict)
    snapshot: ReadSlot | None = None


@runtime_checkable
class TickSource(Protocol):
    """Gives the ticks of a stream, one after the other."""

    def take(self) -> StreamTick | None:
        """Returns the next tick; None if there is none, after which it is not asked."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Trains the adapters in the slots of one base model.

    All calls are made by one thread. All methods may be called between two calls of
    `run`, and while its iterator is suspended at an item.
    """

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into a free slot, with empty state of its optimizer.

        A slot is free if it has no job, and no tick in flight has rows of its last one;
        see `StreamPlan.is_free`.
        """
        ...

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into a free slot, which may be another one than before.

        Args:
            slot: The slot.
            parked: State that `copy` returned, possibly in another process.
            like: Adapter that the job started from, which gives scaling and dropout.
        """
        ...

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot's job, for passes in the step.

        It stays so until the slot is released. Without this, the base is the reference.
        The slots have `SlotShape.has_references`.
        """
        ...

    def copy(self, slot: int) -> ParkedSlot:
        """Returns the whole state of a slot, without gradients that are pending.

        While the iterator of `run` is suspended, the slot is one of the item's.
        """
        ...

    def run(
        self, source: TickSource, jobs: Mapping[int, JobState]
    ) -> Iterator[Outcomes]:
        """Runs ticks until there is none, and yields an item for each.

        A job takes an optimizer step as soon as its global batch is complete, and no
        sooner. Steps that the same microbatch completes are taken in one call and
        reported in one item. At each item:

        - At least one microbatch after the step is already queued, if there is one. So
          the devices have work while the caller handles the item. A pipeline has
          several in flight.
        - No further step of the jobs in the item is queued. Their slots hold exactly
          the weights after the reported step, and keep them until the iterator
          continues. So a job that is released here has taken no further step.
        - Which steps are in which item, and in which order, follows from the ticks and
          from the slots released so far. It never depends on timing.

        Each step of each job is reported exactly once, in the order of the job's steps,
        unless the job is released. If the source was stopped within global batches,
        their gradients are still pending when the iterator ends.

        Args:
            source: The ticks, which begin each job with its next global batch. Samples
                name their job by its slot. A job that leaves is dropped from its ticks
                first, and then released here.
            jobs: The running jobs, by slot, which may change at each item. An executor
                reads their settings and data, and never their progress.
        """
        ...

    def release(self, slot: int) -> None:
        """Empties a slot: weights, optimizer state and pending gradients.

        While `run` is suspended, only slots of its last item may be released. The slot
        takes no further step. What is queued of its samples runs, and their gradients
        are discarded.
        """
        ...

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots to the host, each after its last step.

        Returns:
            The states; None if a pipeline has steps in flight. Then the item of a later
            step has them, as they are after exactly the steps that were reported with
            it and before, and no job may be put into a slot until then. If the run ends
            first, ask again.
        """
        ...

    def evaluate(self, jobs: Mapping[int, JobState]) -> dict[int, dict[str, float]]:
        """Evaluates adapters on their held-out samples, without dropout.

        Adapters are only read, and pending gradients are kept.

        The progress of each job is that of the weights in its slot.

        Args:
            jobs: Jobs to evaluate, by slot. Their order determines the packing.

        Returns:
            By slot, the job's mean `loss`, for next-token jobs over the held-out target
            tokens in nats, NaN if a hidden state is not finite; the metrics of its
            objective, by name; and if there are several held-out data sets, `loss/NAME`
            of each.
        """
        ...

    def log_likelihoods(
        self, slot: int, batch: JobBatch, adapter: Adapter | None
    ) -> np.ndarray:
        """Returns the log likelihood of the targets of each sample, without dropout.

        Args:
            slot: A free slot, which is free again afterwards.
            batch: The samples, for the slot.
            adapter: The adapter that is meant; None: the base without one.

        Returns:
            Sums over the targets of each sample, in nats, float64.
        """
        ...

    def wait(self) -> None:
        """Waits until the devices have finished all queued work."""
        ...
