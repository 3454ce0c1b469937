"""The interface between the windows of a run and the devices that train them.

Control flows downward. `Windows` decides which jobs train and when a job ends; an
executor queues the work on its devices and yields what the optimizer steps did.
`staged_executor.py` does this for one device and for any mesh.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.slots import ParkedSlot
from jaxlora.scheduler import Schedule
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
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    is_finite: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """Work done in a window since the previous item of `Executor.run`.

    Attributes:
        steps: Results of optimizer steps, by slot; at most one per slot. Only the last
            item of a window may be empty.
        num_microbatches: Microbatches queued.
        num_tokens: Tokens in them, without padding.
    """

    steps: Mapping[int, StepOutcome]
    num_microbatches: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The next optimizer steps of every running job, packed together.

    Attributes:
        jobs: The running jobs, by slot. An executor reads their settings and data, and
            never their progress, which changes while the window runs.
        schedule: Complete global batches of each job, starting with its next one.
            Samples name their job by its slot.
    """

    jobs: Mapping[int, JobState]
    schedule: Schedule

    def __post_init__(self):
        jobs = {s.owner for m in self.schedule.microbatches for s in m}
        assert jobs == set(self.jobs), f"samples of slots {jobs}, jobs in {self.jobs}"


@runtime_checkable
class Executor(Protocol):
    """Trains the adapters in the slots of one base model.

    All calls are made by one thread. Every method may be called between two windows.
    While the iterator of `run` is suspended at an item, `evaluate`, `read`, `wait` and
    `release` may be called too.
    """

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into an empty slot, with empty state of its optimizer."""
        ...

    def park(self, slot: int) -> ParkedSlot:
        """Takes the whole state out of a slot, which is empty then.

        This is possible only between windows, when no gradient is pending.
        """
        ...

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into an empty slot, which may be another one than before.

        Args:
            slot: The slot.
            parked: State that `park` returned, possibly in another process.
            like: Adapter that the job started from, which gives scaling and dropout.
        """
        ...

    def read(self, slot: int, like: Adapter) -> Adapter:
        """Returns the adapter in a slot.

        Args:
            slot: The slot.
            like: Adapter that the slot was loaded with, which gives modules and ranks.
        """
        ...

    def run(self, window: Window) -> Iterator[Outcomes]:
        """Runs a window, and yields the results of its optimizer steps.

        A job takes an optimizer step as soon as its global batch is complete, and no
        sooner. Steps that the same microbatch completes are taken in one call and
        reported in one item. At each item:

        - At least one microbatch after the step is already queued, if the window has
          one. So the devices have work while the caller handles the item. A pipeline
          has several in flight.
        - No further step of the jobs in the item is queued. Their slots hold exactly
          the weights after the reported step, and keep them until the iterator
          continues. So a job that is released here has taken no further step.
        - Which steps are in which item, and in which order, follows from the window and
          from the slots released so far. It never depends on timing.

        Each step of each job is reported exactly once, in the order of the job's steps,
        unless the job is released. When the iterator ends, every global batch of the
        remaining jobs is complete and no gradient is pending. If the iterator is
        abandoned before its end, no further window may be run.
        """
        ...

    def release(self, slot: int) -> int:
        """Empties a slot: weights, optimizer state and pending gradients.

        While a window runs, only slots of the item yielded last may be released. The
        slot takes no further step in the window. Its samples in microbatches that are
        already queued run, and their gradients are discarded. Its remaining samples do
        not run; their rows become padding, so no other job's rows move. The slot stays
        empty until the window ends.

        Returns:
            The number of samples of the window that do not run; 0 between windows.
        """
        ...

    def evaluate(self, jobs: Mapping[int, JobState]) -> dict[int, float]:
        """Evaluates adapters on their held-out samples, without dropout.

        Adapters are only read, and pending gradients are kept.

        Args:
            jobs: Jobs to evaluate, by slot. Their order determines the packing.

        Returns:
            By slot, the mean loss over the job's held-out target tokens, in nats; NaN
            if a hidden state is not finite.
        """
        ...

    def wait(self) -> None:
        """Waits until the devices have finished all queued work."""
        ...
