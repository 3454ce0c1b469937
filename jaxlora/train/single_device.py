"""Trains on one device; the implementation of `Executor` without a pipeline."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizer import Hyper, StepResult
from jaxlora.adapters.slots import ParkedSlot, SlotTable
from jaxlora.data.pack import (
    JobBatch,
    PackedBatch,
    pack_microbatch,
    split_by_segment_limit,
)
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.length_classes import LengthClass, shortest_class
from jaxlora.modules.trained_tensors import rate_ratios
from jaxlora.scheduler import Limits, Microbatch, greedy
from jaxlora.train.executor import Outcomes, StepOutcome, Window
from jaxlora.train.feed import Feed
from jaxlora.train.job_run import JobRun
from jaxlora.train.step import CompiledSteps, compiled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _QueuedSteps:
    """Optimizer steps that are queued on the device and whose results are not yet read.

    Attributes:
        batches: The global batches, by slot.
        learning_rates: The learning rates, by slot.
        losses: By slot, the losses of each microbatch of the global batch.
        result: Result of the steps.
    """

    batches: dict[int, JobBatch]
    learning_rates: dict[int, float]
    losses: dict[int, list[jax.Array]]
    result: StepResult


class SingleDeviceExecutor:
    """Queues work on one device before it reads results, so the device never idles.

    See `Executor` for the contract. On one device, the results of steps are read as
    soon as the next microbatch is queued, and before any further step of any job.

    Attributes:
        table: The slots that are trained.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        base: Base,
        table: SlotTable,
        steps: CompiledSteps,
        limits: Limits,
    ):
        """Makes the executor; nothing is queued yet.

        Args:
            spec: The decoder.
            base: Weights of the frozen base.
            table: The slots to train.
            steps: Compiled functions of the decoder.
            limits: Limits of a microbatch.
        """
        assert spec.slots is not None
        self._num_slots = spec.slots.num_slots
        self._base, self._steps, self._limits = base, steps, limits
        options = spec.options
        uses_cudnn = options.attention == "cudnn"
        self._short: LengthClass | None = None
        if uses_cudnn:
            self._short = shortest_class(limits.capacity, *options.lengths)
        self._can_evaluate = False
        self._feed: Feed | None = None  # of the window that runs
        self.table = table

    # ---- slots ---------------------------------------------------------------------

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into an empty slot, with empty optimizer state."""
        self.table.load(slot, adapter)

    def park(self, slot: int) -> ParkedSlot:
        """Takes the whole state out of a slot, between two windows."""
        return self.table.park(slot)

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into an empty slot."""
        self.table.restore(slot, parked, like)

    def read(self, slot: int, like: Adapter) -> Adapter:
        """Returns the adapter in a slot, at the ranks of `like`."""
        return self.table.read(slot, like)

    def release(self, slot: int) -> int:
        """Empties a slot; returns how many samples of the window do not run.

        The device clears the slot after the microbatch that is queued, so the gradients
        that this microbatch adds are discarded too.
        """
        self.table.clear(slot)
        return 0 if self._feed is None else self._feed.release(slot)

    # ---- training ------------------------------------------------------------------

    def run(self, window: Window) -> Iterator[Outcomes]:
        """Runs a window, and yields the results of its optimizer steps."""
        microbatches = self._split(window.schedule.microbatches)
        feed = self._feed = Feed(window, microbatches, self._limits)
        seeds = {slot: run.job.seed for slot, run in window.runs.items()}
        seed_by_slot = self._by_slot(seeds, np.int32)
        losses: dict[int, list[jax.Array]] = defaultdict(list)
        queued: _QueuedSteps | None = None
        num_microbatches = num_tokens = 0
        for number in range(len(microbatches)):
            microbatch, packed = feed.take(number)
            if packed is None:
                continue
            out = self._accumulate(packed, self._keys(seed_by_slot, microbatch))
            for slot in {s.job for s in microbatch}:
                losses[slot].append(out.loss)
            num_microbatches += 1
            num_tokens += sum(s.num_tokens for s in microbatch)
            feed.prepare(number + 1)
            if queued is not None:
                yield _read(queued, num_microbatches, num_tokens)
                num_microbatches = num_tokens = 0
            complete = feed.complete(microbatch)
            queued = self._step(window, complete, losses) if complete else None
        if queued is not None or num_microbatches:
            yield _read(queued, num_microbatches, num_tokens)
        self._feed = None

    def _split(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Splits microbatches with more short samples than attention has room for."""
        if self._short is None:
            return list(microbatches)
        short, most = self._short.tokens, self._short.segments
        return [
            part
            for m in microbatches
            for part in split_by_segment_limit(m, short, most)
        ]

    def wait(self) -> None:
        """Waits until the device has finished all queued work."""
        jax.block_until_ready(self.table.state.pending.is_finite)

    def _accumulate(self, packed: PackedBatch, keys: SlotKeys) -> JobLosses:
        """Queues the forward and backward pass of a microbatch."""
        table = self.table
        state = table.state
        pending, out = self._steps.accumulate(
            self._base, state.params, state.pending, table.settings, packed, keys
        )
        table.state = dataclasses.replace(state, pending=pending)
        return out

    def _step(
        self,
        window: Window,
        complete: dict[int, JobBatch],
        losses: dict[int, list[jax.Array]],
    ) -> _QueuedSteps:
        """Queues the optimizer steps of the jobs whose global batch is complete."""
        hyper = self._hyper({s: (window.runs[s], b.step) for s, b in complete.items()})
        self.table.state, result = self._steps.step(self.table.state, hyper)
        members = {slot: losses.pop(slot) for slot in complete}
        # This transfer is intended and does not block, so the transfer guard is off.
        with jax.transfer_guard_device_to_host("allow"):
            for array in jax.tree.leaves((members, result)):
                array.copy_to_host_async()
        rates = {s: window.runs[s].learning_rate(b.step) for s, b in complete.items()}
        return _QueuedSteps(
            batches=complete, learning_rates=rates, losses=members, result=result
        )

    def evaluate(self, runs: Mapping[int, JobRun]) -> dict[int, float]:
        """Returns the mean loss over held-out target tokens, in nats, by slot."""
        batches = {slot: run.eval_batch(slot) for slot, run in runs.items()}
        samples = [s for batch in batches.values() for s in batch.to_schedule()]
        losses: list[JobLosses] = []
        packing = greedy.pack(samples, self._limits)
        for microbatch in self._split(packing.microbatches):
            packed = pack_microbatch(microbatch, batches, self._limits)
            args = self._base, self.table.state.params, self.table.settings, packed
            if not self._can_evaluate:
                compiled(self._steps.evaluate, "the evaluation", *args)
                self._can_evaluate = True
            losses.append(self._steps.evaluate(*args))
        host = jax.device_get(losses)
        total = _total([out.loss for out in host])
        is_finite = np.all([out.is_finite for out in host], axis=0)
        return {
            slot: float(total[slot]) / batch.num_target_tokens
            if is_finite[slot]
            else math.nan
            for slot, batch in batches.items()
        }

    def _by_slot(self, values: Mapping[int, float], dtype) -> Any:
        """Puts values into a NumPy array by slot; a jitted call uploads it fastest."""
        out = np.zeros(self._num_slots, dtype)
        for slot, value in values.items():
            out[slot] = value
        return out

    def _keys(self, seeds: Any, microbatch: Microbatch) -> SlotKeys:
        """Dropout keys, by the samples' steps, which the host may not have reached."""
        steps = {s.job: s.batch for s in microbatch}
        return SlotKeys(seed=seeds, step=self._by_slot(steps, np.int32))

    def _hyper(self, stepping: Mapping[int, tuple[JobRun, int]]) -> Hyper:
        """Settings of optimizer steps; rows of slots that do not step are not used.

        Args:
            stepping: The jobs that step, and the number of the step, by slot.
        """

        def row(value: Callable[[JobRun, int], float], dtype=np.float32) -> Any:
            return self._by_slot({s: value(*of) for s, of in stepping.items()}, dtype)

        return Hyper(
            steps_now=row(lambda run, step: True, np.bool_),
            count=row(lambda run, step: step, np.int32),
            learning_rate=row(lambda run, step: run.learning_rate(step)),
            rate_ratio=rate_ratios(lambda ratio: row(lambda run, step: ratio(run.job))),
            weight_decay=row(lambda run, step: run.job.weight_decay),
            b1=row(lambda run, step: run.job.adam_b1),
            b2=row(lambda run, step: run.job.adam_b2),
            eps=row(lambda run, step: run.job.adam_eps),
            max_norm=row(lambda run, step: run.job.max_grad_norm or np.inf),
        )


def _read(
    queued: _QueuedSteps | None, num_microbatches: int, num_tokens: int
) -> Outcomes:
    """Reads the results of steps, if any; waits for the device to finish them."""
    steps = {} if queued is None else _step_outcomes(queued)
    return Outcomes(
        steps=steps, num_microbatches=num_microbatches, num_tokens=num_tokens
    )


def _step_outcomes(queued: _QueuedSteps) -> dict[int, StepOutcome]:
    losses, result = jax.device_get((queued.losses, queued.result))
    return {
        slot: StepOutcome(
            loss=float(_total(losses[slot])[slot]),
            grad_norm=float(result.norm[slot]),
            learning_rate=queued.learning_rates[slot],
            num_tokens=batch.num_tokens,
            num_target_tokens=batch.num_target_tokens,
            is_finite=bool(result.is_finite[slot]),
        )
        for slot, batch in queued.batches.items()
    }


def _total(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Sums the losses of each slot over several microbatches in float64."""
    return np.sum([np.asarray(loss, np.float64) for loss in losses], axis=0)
