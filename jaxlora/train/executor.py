"""Runs a window's microbatches, or an evaluation, on one device."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.optimizer import Hyper, StepResult
from jaxlora.adapters.slots import SlotTable
from jaxlora.data.pack import (
    JobBatch,
    PackedBatch,
    pack_microbatch,
    split_by_segment_limit,
)
from jaxlora.models.decoder import DecoderSpec
from jaxlora.modules.cudnn_attention import crowd
from jaxlora.scheduler import Limits, Microbatch, Schedule, greedy
from jaxlora.train.job_run import JobRun
from jaxlora.train.step import Base, CompiledSteps, JobLosses, SlotKeys, compiled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of one optimiser step of one job.

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
class WindowTally:
    """Totals of a window.

    Attributes:
        num_microbatches: Microbatches that ran.
        num_tokens: Tokens in them, without padding.
        left_out: By job name, the number of samples that did not run because their job
            ended in the window.
    """

    num_microbatches: int
    num_tokens: int
    left_out: dict[str, int]


# Receives results of steps by job name, once the device has the next microbatch.
OnSteps = Callable[[dict[str, StepOutcome]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stepped:
    """Optimiser steps that are queued on the device and whose results are not yet read.

    Attributes:
        batches: The jobs that step, and their global batches.
        losses: Losses by slot, of each microbatch of a job's batch.
        result: Result of the step.
    """

    batches: dict[JobRun, JobBatch]
    losses: dict[int, list[jax.Array]]
    result: StepResult


class Executor:
    """Runs schedules on one device, and queues work so that the device never idles.

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
        *,
        use_dropout: bool,
    ):
        assert spec.slots is not None
        self._num_slots = spec.slots.num_slots
        self._base, self._steps, self._limits = base, steps, limits
        self._use_dropout = use_dropout
        options = spec.options
        uses_cudnn = options.attention == "cudnn"
        self._crowd = crowd(limits.capacity, *options.lengths) if uses_cudnn else None
        self._can_evaluate = False
        self.table = table

    def train(
        self, runs: Sequence[JobRun], schedule: Schedule, on_steps: OnSteps
    ) -> WindowTally:
        """Runs a window; each job steps as soon as its global batch is complete.

        The result of a step is read after the next microbatch is queued and before any
        further step. So a job that ends has taken no further step. The gradients that
        this microbatch adds for the job are discarded with its slot.

        Args:
            runs: The jobs in the window.
            schedule: Complete global batches, starting with each job's next one.
            on_steps: Called for the steps after each microbatch, in order. It must
                count them (`JobRun.note_step`) or release the job's slot. The remaining
                samples of a job without a slot are skipped, except in the microbatch
                that is already queued.
        """
        microbatches = self._uncrowded(schedule.microbatches)
        feed = _Feed(runs, microbatches, self._limits)
        losses: dict[int, list[jax.Array]] = defaultdict(list)
        seeds = self._by_slot({run.slot: run.job.seed for run in runs}, np.int32)
        stepped: _Stepped | None = None
        for number in range(len(microbatches)):
            microbatch, packed = feed.take(number)
            if packed is None:
                continue
            out = self._accumulate(packed, self._keys(seeds, microbatch))
            for slot in {s.job for s in microbatch}:
                losses[slot].append(out.loss)
            feed.prepare(number + 1)
            if stepped is not None:
                on_steps(_read(stepped))
            whole = feed.count_off(microbatch)
            stepped = self._step(whole, losses) if whole else None
        if stepped is not None:
            on_steps(_read(stepped))
        return feed.tally()

    def _uncrowded(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Splits microbatches with more short samples than attention has room for."""
        if self._crowd is None:
            return list(microbatches)
        short, most = self._crowd.tokens, self._crowd.segments
        return [
            part
            for m in microbatches
            for part in split_by_segment_limit(m, short, most)
        ]

    def wait(self) -> None:
        """Waits until the device has finished all queued work."""
        jax.block_until_ready(self.table.state.pending.is_finite)

    def _accumulate(self, packed: PackedBatch, keys: SlotKeys | None) -> JobLosses:
        """Queues the forward and backward pass of a microbatch."""
        table = self.table
        state = table.state
        pending, out = self._steps.accumulate(
            self._base, state.params, state.pending, table.settings, packed, keys
        )
        table.state = dataclasses.replace(state, pending=pending)
        return out

    def _step(
        self, whole: dict[JobRun, JobBatch], losses: dict[int, list[jax.Array]]
    ) -> _Stepped:
        """Queues the optimiser steps of the jobs whose global batch is complete."""
        assert all(batch.step == run.progress.step for run, batch in whole.items())
        self.table.state, result = self._steps.step(
            self.table.state, self._hyper(list(whole))
        )
        mine = {run.slot: losses.pop(run.slot) for run in whole}
        # This transfer is intended and does not block, so the transfer guard is off.
        with jax.transfer_guard_device_to_host("allow"):
            for array in jax.tree.leaves((mine, result)):
                array.copy_to_host_async()
        return _Stepped(batches=whole, losses=mine, result=result)

    def evaluate(self, runs: Sequence[JobRun]) -> dict[str, float]:
        """Mean loss over each job's held-out target tokens, in nats; by job name.

        The adapters are only read, and pending gradients are kept.
        """
        batches = {run.slot: run.eval_batch() for run in runs}
        samples = [s for batch in batches.values() for s in batch.to_schedule()]
        losses: list[JobLosses] = []
        packing = greedy.pack(samples, self._limits)
        for microbatch in self._uncrowded(packing.microbatches):
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
            run.job.name: float(total[run.slot]) / batches[run.slot].num_target_tokens
            if is_finite[run.slot]
            else math.nan
            for run in runs
        }

    def _by_slot(self, values: Mapping[int, float], dtype) -> Any:
        """Puts values into a NumPy array by slot; a jitted call uploads it fastest."""
        out = np.zeros(self._num_slots, dtype)
        for slot, value in values.items():
            out[slot] = value
        return out

    def _keys(self, seeds: Any, microbatch: Microbatch) -> SlotKeys | None:
        """Dropout keys, by the samples' steps, which the host may not have reached."""
        if not self._use_dropout:
            return None
        steps = {s.job: s.batch for s in microbatch}
        return SlotKeys(seed=seeds, step=self._by_slot(steps, np.int32))

    def _hyper(self, stepping: Sequence[JobRun]) -> Hyper:
        """Settings of the step; only the rows of slots that step now are used."""

        def row(value: Callable[[JobRun], float], dtype=np.float32) -> Any:
            return self._by_slot({run.slot: value(run) for run in stepping}, dtype)

        return Hyper(
            steps_now=row(lambda r: True, np.bool_),
            count=row(lambda r: r.progress.step, np.int32),
            learning_rate=row(JobRun.learning_rate),
            b_ratio=row(lambda r: r.job.lora_plus_ratio),
            weight_decay=row(lambda r: r.job.weight_decay),
            b1=row(lambda r: r.job.adam_b1),
            b2=row(lambda r: r.job.adam_b2),
            eps=row(lambda r: r.job.adam_eps),
            max_norm=row(lambda r: r.job.max_grad_norm or np.inf),
        )


class _Feed:
    """Packs and uploads a window's microbatches, each one ahead of its turn."""

    def __init__(
        self,
        runs: Sequence[JobRun],
        microbatches: Sequence[Microbatch],
        limits: Limits,
    ):
        self._runs = {run.slot: run for run in runs}
        self._microbatches, self._limits = microbatches, limits
        self._left = Counter((s.job, s.batch) for m in microbatches for s in m)
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._ready: tuple[int, Microbatch, PackedBatch | None] | None = None
        self._num_microbatches = self._num_tokens = 0
        self._left_out: Counter[str] = Counter()

    def _kept(self, number: int) -> Microbatch:
        """Returns a microbatch without the samples of jobs that have ended."""
        return tuple(
            s
            for s in self._microbatches[number]
            if self._runs[s.job].progress.slot is not None
        )

    def prepare(self, number: int) -> None:
        """Packs and uploads a microbatch before its turn; none after the last."""
        if number < len(self._microbatches):
            kept = self._kept(number)
            self._ready = number, kept, self._pack(number, kept)

    def take(self, number: int) -> tuple[Microbatch, PackedBatch | None]:
        """Returns the rest of a microbatch and its arrays; None if nothing is left.

        If a job in it has ended since `prepare`, the arrays are packed again, because
        they would leave gradients in the slot that the job has released.
        """
        kept, ready = self._kept(number), self._ready
        if ready is not None and ready[:2] == (number, kept):
            packed = ready[2]
        else:
            packed = self._pack(number, kept)
        for sample in self._microbatches[number]:
            run = self._runs[sample.job]
            if run.progress.slot is None:
                self._left_out[run.job.name] += 1
        self._num_microbatches += bool(kept)
        self._num_tokens += sum(s.num_tokens for s in kept)
        return kept, packed

    def _pack(self, number: int, kept: Microbatch) -> PackedBatch | None:
        if not kept:
            return None
        batches = {}
        mine = {(s.job, s.batch) for s in kept}
        assert len(mine) == len({s.job for s in kept}), "two batches of a job"
        for slot, step in mine:
            if (slot, step) not in self._batches:
                self._batches[slot, step] = self._runs[slot].batch(step)
            batches[slot] = self._batches[slot, step]
        # Rows of jobs that have ended become padding, so no other rows move.
        whole = self._microbatches[number]
        return pack_microbatch(whole, batches, self._limits)

    def count_off(self, microbatch: Microbatch) -> dict[JobRun, JobBatch]:
        """Returns the jobs whose global batch this microbatch completes, and the batch.

        Jobs that have ended since the microbatch was taken are left out.
        """
        out = {}
        for s in microbatch:
            self._left[s.job, s.batch] -= 1
            run = self._runs[s.job]
            if not self._left[s.job, s.batch] and run.progress.slot is not None:
                out[run] = self._batches.pop((s.job, s.batch))
        return out

    def tally(self) -> WindowTally:
        return WindowTally(
            num_microbatches=self._num_microbatches,
            num_tokens=self._num_tokens,
            left_out=dict(self._left_out),
        )


def _read(stepped: _Stepped) -> dict[str, StepOutcome]:
    """Reads the results of steps, by job name; waits for the device to finish them."""
    losses, result = jax.device_get((stepped.losses, stepped.result))
    return {
        run.job.name: StepOutcome(
            loss=float(_total(losses[run.slot])[run.slot]),
            grad_norm=float(result.norm[run.slot]),
            learning_rate=run.learning_rate(),
            num_tokens=batch.num_tokens,
            num_target_tokens=batch.num_target_tokens,
            is_finite=bool(result.is_finite[run.slot]),
        )
        for run, batch in stepped.batches.items()
    }


def _total(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Sums the losses of each slot over several microbatches in float64."""
    return np.sum([np.asarray(loss, np.float64) for loss in losses], axis=0)
