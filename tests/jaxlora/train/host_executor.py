"""An executor without a device: its weights are in NumPy, and a step hashes samples.

The life of jobs (when they start, pause, end, are evaluated, saved and exported) does
not depend on numbers. Runs of this executor compile nothing, so its tests are cheap.
Weights are those of exactly the samples and steps that they were trained with, so equal
bits say what they say on a device.
"""

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import own_shapes
from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.slots import PaddedAdapter
from jaxlora.adapters.staged_slots import Padded, StagedSlots
from jaxlora.data.pack import JobBatch
from jaxlora.plan.stream_plan import StreamTick, TickSource
from jaxlora.train.execute.executor import Executor, Outcomes, StepOutcome
from jaxlora.train.execute.feed import TickWork
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.run_programs import RunPrograms
from jaxlora.train.job_state import JobState


class HostSlots(StagedSlots):
    """The slots on the host, with the methods that a run calls."""

    def __init__(self):
        self.tables = ()
        self.states: dict[int, ParkedSlot] = {}  # values that never change

    @property
    def row_bytes(self) -> int:
        return 1

    def pad(self, adapter: Adapter) -> Padded:
        return (PaddedAdapter(adapter, {}, {}),)

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        params = {path: np.array(x) for path, x in adapter.by_path().items()}
        shapes = {path: x.shape for path, x in params.items()}
        state = {
            kind: {path: np.zeros(shape, np.float32) for path, shape in own.items()}
            for kind, own in own_shapes(optimizer, shapes).items()
        }
        self._put(
            slot,
            ParkedSlot(params=params, optimizer_state=state, optimizer=optimizer),
        )

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        parked.check_like(like)
        self._put(slot, parked)

    def _put(self, slot: int, state: ParkedSlot) -> None:
        assert slot not in self.states, "the slot has a job"
        self.states[slot] = state

    def clear(self, slot: int) -> None:
        del self.states[slot]

    def copy(self, slot: int) -> ParkedSlot:
        return self.states[slot]

    def begin_reading(self, slot: int, like: Adapter) -> Future[Adapter]:
        found: Future[Adapter] = Future()
        found.set_result(self.states[slot].adapter(like))
        return found

    def snapshot(self) -> ReadSlot:
        return dict(self.states).__getitem__

    def reserve_snapshot(self) -> Callable[[], None]:
        return lambda: None


class HostExecutor(Executor):
    """Trains on the host, reports as late as a pipeline may, and checks how it is used.

    Attributes:
        steps: Steps taken by the adapter in each slot that is in use, as far as known:
            not those of a restored one before its next step.
        ran: By job, the samples that ran.
    """

    def __init__(
        self,
        slots: HostSlots,
        in_flight: int = 1,
        loss: Callable[[str, int], float] | None = None,
        eval_loss: Callable[[str, int], float] | None = None,
    ):
        """Makes the executor.

        Args:
            slots: The slots.
            in_flight: Microbatches that are queued after a step before it is reported.
            loss: Gives the loss of a job's step, counted from 1; NaN makes it not
                finite. None: it follows from the samples and the weights.
            eval_loss: Gives the evaluation loss of a job after a number of steps. None:
                it follows from the weights, and falls.
        """
        self.host, self.in_flight = slots, in_flight
        self.loss, self.eval_loss = loss, eval_loss
        self.steps: dict[int, int] = {}
        self.ran: Counter[str] = Counter()
        self._jobs: Mapping[int, JobState] = {}
        self._may_leave: set[int] | None = None  # None: any slot, between two runs

    # ---- slots ---------------------------------------------------------------------

    def load(self, slot: int, padded: Padded, optimizer: str) -> None:
        self.host.load(slot, padded[0].adapter, optimizer)
        self.steps[slot] = 0

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        self.host.restore(slot, parked, like)

    def refer(self, slot: int, adapter: Adapter) -> None:
        raise AssertionError("no reference is an adapter")

    def copy(self, slot: int) -> ParkedSlot:
        self._check_may_leave(slot)
        return self.host.copy(slot)

    def release(self, slot: int) -> None:
        self._check_may_leave(slot)
        self.host.clear(slot)
        self.steps.pop(slot, None)

    def _check_may_leave(self, slot: int) -> None:
        may_leave = self._may_leave is None or slot in self._may_leave
        assert may_leave, "its step may be in flight"

    def snapshot(self) -> ReadSlot:
        return self.host.snapshot()

    def wait(self) -> None:
        pass

    # ---- training ------------------------------------------------------------------

    def run(
        self, source: TickSource, jobs: Mapping[int, JobState]
    ) -> Iterator[Outcomes]:
        assert set(jobs) == set(self.host.states), "another set of jobs"
        self._jobs = jobs
        left: Counter[tuple[int, int]] = Counter()
        # Microbatches that are queued, and the steps that they complete.
        flying: deque[tuple[StreamTick, dict[int, int]]] = deque()
        prepared = source.take()
        while prepared is not None or flying:
            if prepared is not None:
                flying.append((prepared, self._queue(prepared, left)))
                prepared = source.take()
            if len(flying) > self.in_flight or prepared is None:
                yield self._report(*flying.popleft())
                prepared = source.take() if prepared is None else prepared
        self._may_leave = None

    def _queue(
        self, taken: StreamTick, left: Counter[tuple[int, int]]
    ) -> dict[int, int]:
        """Runs a microbatch; returns the steps that it completes."""
        complete = {}
        for s in () if taken.is_held else taken.samples:
            job = self._jobs[s.owner]
            self.ran[job.name] += 1
            left[s.owner, s.batch] += 1
            if left[s.owner, s.batch] == len(job.prepared.lengths(s.batch)):
                complete[s.owner] = s.batch
                del left[s.owner, s.batch]
        return complete

    def _report(self, taken: StreamTick, steps: dict[int, int]) -> Outcomes:
        outcomes = {
            slot: self._step(slot, step)
            for slot, step in steps.items()
            if slot not in taken.dropped
        }
        self._may_leave = set(outcomes)
        num_tokens = sum(s.num_tokens for s in taken.samples)
        work = TickWork(num_microbatches=1, num_rows=taken.rows, num_tokens=num_tokens)
        return Outcomes(steps=outcomes, work={0: work})

    def _step(self, slot: int, step: int) -> StepOutcome:
        job, state = self._jobs[slot], self.host.states[slot]
        assert step == self.steps.setdefault(slot, step), "a step is missing"
        self.steps[slot] += 1
        batch, rate = job.batch(slot, step), job.learning_rate(step)
        hashed = hashlib.blake2b(repr((job.settings.seed, step, rate)).encode())
        for sample in batch.samples:
            hashed.update(sample.token_ids.tobytes() + sample.is_target.tobytes())
        rng = np.random.default_rng(list(hashed.digest()))

        def moved(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {
                path: (0.9 * x + 1e-4 * rng.random(x.shape)).astype(np.float32)
                for path, x in tensors.items()
            }

        kinds = {kind: moved(tensors) for kind, tensors in state.by_kind().items()}
        self.host.states[slot] = ParkedSlot.of(kinds, state.optimizer)
        loss = self._loss_of(state) + rng.random()
        if self.loss is not None:
            loss = self.loss(job.name, step + 1)
        return StepOutcome(
            loss=loss,
            grad_norm=1.0,
            learning_rate=rate,
            num_tokens=batch.num_tokens,
            num_target_tokens=batch.num_target_tokens,
            is_finite=loss == loss,
        )

    def _loss_of(self, state: ParkedSlot) -> float:
        return 1.0 + sum(float(np.abs(x).mean()) for x in state.params.values())

    # ---- evaluation ----------------------------------------------------------------

    def begin_evaluation(
        self, jobs: Mapping[int, JobState]
    ) -> Callable[[], dict[int, dict[str, float]]]:
        if (eval_loss := self.eval_loss) is not None:
            found = {
                slot: {"loss": eval_loss(job.name, self.steps[slot])}
                for slot, job in jobs.items()
            }
        else:
            found = {
                slot: {"loss": self._loss_of(self.host.states[slot])} for slot in jobs
            }
        return lambda: found

    def log_likelihoods(
        self, slot: int, batch: JobBatch, adapter: Adapter | None
    ) -> np.ndarray:
        return np.zeros(len(batch.samples))


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """Trainers of the block train on the host, and compile nothing."""

    def make(layout: Any, params: Any, slots: Any, *_: Any) -> HostExecutor:
        return HostExecutor(slots)

    empty = RunPrograms(passes=(), others=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "empty_slots", lambda self: HostSlots())
        patch.setattr(Layout, "num_compilations", lambda self: 0)
        patch.setattr(RunPrograms, "start", lambda *_, **__: empty)
        patch.setattr("jaxlora.plan.stages.measured_footprint", lambda *_: None)
        patch.setattr("jaxlora.train.loop.Executor", make)
        yield
