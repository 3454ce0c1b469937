"""An executor without a device, which reports steps as late as a pipeline may."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.data.pack import JobBatch
from jaxlora.plan.stream_plan import StreamPlan, StreamTick
from jaxlora.train.execute.executor import Executor, Outcomes, StepOutcome
from jaxlora.train.execute.feed import TickWork
from jaxlora.train.job_state import JobState


@dataclasses.dataclass
class LateExecutor(Executor):
    """Counts the steps of each slot, and checks how it is used.

    Attributes:
        in_flight: Microbatches that are queued after a step before it is reported.
        loss: Gives the loss of a job's step, counted from 1; NaN makes it not finite.
        eval_loss: Gives the evaluation loss of a job after a number of steps.
        steps: Steps taken by the adapter in each slot that is in use.
        queued: By slot, the samples of each job's name that ran.
    """

    in_flight: int
    loss: Callable[[str, int], float]
    eval_loss: Callable[[str, int], float]
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    ran: Counter = dataclasses.field(default_factory=Counter)

    def __post_init__(self):
        self._source: StreamPlan | None = None
        self._jobs: Mapping[int, JobState] = {}
        self._may_release: set[int] | None = None  # None: any, between two runs

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        assert slot not in self.steps
        self.steps[slot] = 0

    def copy(self, slot: int) -> ParkedSlot:
        if self._may_release is not None:
            assert slot in self._may_release, "its step may be in flight"
        return self.steps[slot]  # type: ignore[return-value]

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        assert slot not in self.steps
        self.steps[slot] = parked  # type: ignore[assignment]

    def run(
        self, source: StreamPlan, jobs: Mapping[int, JobState]
    ) -> Iterator[Outcomes]:
        assert set(jobs) == set(self.steps), "another set of jobs"
        self._source, self._jobs = source, jobs
        left: Counter[tuple[int, int]] = Counter()
        # Microbatches that are queued, and the steps that they complete.
        flying: deque[tuple[StreamTick, dict[int, int]]] = deque()
        prepared = source.take()
        while prepared is not None or flying:
            if prepared is not None:
                steps = self._queue(prepared, left)
                flying.append((prepared, steps))
                prepared = source.take()
            if len(flying) > self.in_flight or prepared is None:
                taken, steps = flying.popleft()
                yield self._report(taken, steps)
                prepared = source.take() if prepared is None else prepared
        self._source, self._may_release = None, None

    def _queue(
        self, taken: StreamTick, left: Counter[tuple[int, int]]
    ) -> dict[int, int]:
        """Runs a microbatch; returns the steps that it completes."""
        complete = {}
        for s in taken.samples:
            job = self._jobs[s.owner]
            self.ran[job.name] += 1
            left[s.owner, s.batch] += 1
            if left[s.owner, s.batch] == len(job.prepared.lengths(s.batch)):
                complete[s.owner] = s.batch
                del left[s.owner, s.batch]
        return complete

    def _report(self, taken: StreamTick, steps: dict[int, int]) -> Outcomes:
        outcomes = {}
        for slot, step in steps.items():
            if slot in taken.dropped:
                continue
            assert step == self.steps[slot]
            self.steps[slot] += 1
            loss = self.loss(self._jobs[slot].settings.name, step + 1)
            outcomes[slot] = StepOutcome(
                loss=loss,
                grad_norm=1.0,
                learning_rate=1e-3,
                num_tokens=8,
                num_target_tokens=8,
                is_finite=loss == loss,
            )
        self._may_release = set(outcomes)
        work = TickWork(num_microbatches=1, num_rows=16, num_tokens=8)
        return Outcomes(steps=outcomes, work={0: work})

    def release(self, slot: int) -> None:
        if self._may_release is not None:
            assert slot in self._may_release, "its step may be in flight"
        del self.steps[slot]

    def refer(self, slot: int, adapter: Adapter) -> None:
        raise AssertionError("no reference is an adapter")

    def snapshot(self) -> None:
        raise AssertionError("no checkpoint is due")

    def log_likelihoods(
        self, slot: int, batch: JobBatch, adapter: Adapter | None
    ) -> np.ndarray:
        return np.zeros(len(batch.samples))

    def evaluate(self, runs: Mapping[int, JobState]) -> dict[int, dict[str, float]]:
        return {
            slot: {"loss": self.eval_loss(run.name, self.steps[slot])}
            for slot, run in runs.items()
        }

    def wait(self) -> None:
        pass
