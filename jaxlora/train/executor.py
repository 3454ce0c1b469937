"""Runs a window's microbatches, or an evaluation, on one device."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch, uncrowded
from jaxlora.models.decoder import DecoderSpec
from jaxlora.modules.cudnn_attention import crowd
from jaxlora.train.job_run import JobRun
from jaxlora.train.optimizer import Hyper, StepResult
from jaxlora.train.slots import SlotTable
from jaxlora.train.step import Base, CompiledSteps, JobLosses, SlotKeys, compiled
from scheduler import Limits, Microbatch, Schedule, greedy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimiser step of one job did.

    Attributes:
        loss: Mean over the global batch's target tokens, in nats, before the step.
        grad_norm: Norm of the adapter's gradient, before clipping.
        learning_rate: Rate of the step.
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
    """What a window came to.

    Attributes:
        num_microbatches: Microbatches that ran.
        num_tokens: Tokens in them, without padding.
        left_out: Samples of jobs that ended in the window before they had run, by job
            name.
    """

    num_microbatches: int
    num_tokens: int
    left_out: dict[str, int]


# What steps did, by job name; told once the device is busy with the next microbatch.
OnSteps = Callable[[dict[str, StepOutcome]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stepped:
    """Optimiser steps that the device has been given, not yet read.

    Attributes:
        batches: The jobs that step, and their global batches.
        losses: Of each microbatch of a job's batch, by slot.
        result: Of the step.
    """

    batches: dict[JobRun, JobBatch]
    losses: dict[int, list[jax.Array]]
    result: StepResult


class Executor:
    """Runs schedules on one device, which never waits for what the host does with them.

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
        """Runs a window, with each job's optimiser step as soon as its batch is whole.

        What a step did is read once the device has the next microbatch to work on, and
        before any further step: a job that ends there has taken no step since, and what
        that microbatch adds to its gradients goes with its slot.

        Args:
            runs: The jobs in it.
            schedule: Whole global batches, from each job's next one on.
            on_steps: Called for the steps that follow a microbatch, in order; must
                count them (`JobRun.note_step`) or take the job's slot away. What is
                left of a job without a slot does not run, the one microbatch that is
                with the device excepted.
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
        """Splits what holds more short samples than attention has room for."""
        if self._crowd is None:
            return list(microbatches)
        short, most = self._crowd.tokens, self._crowd.segments
        return [part for m in microbatches for part in uncrowded(m, short, most)]

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        jax.block_until_ready(self.table.state.pending.is_finite)

    def _accumulate(self, packed: PackedBatch, keys: SlotKeys | None) -> JobLosses:
        """Gives the device a microbatch."""
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
        """Gives the device the steps of the jobs whose batch is whole."""
        assert all(batch.step == run.progress.step for run, batch in whole.items())
        self.table.state, result = self._steps.step(
            self.table.state, self._hyper(list(whole))
        )
        mine = {run.slot: losses.pop(run.slot) for run in whole}
        # Meant, and nothing waits for it: no guard against transfers need object.
        with jax.transfer_guard_device_to_host("allow"):
            for array in jax.tree.leaves((mine, result)):
                array.copy_to_host_async()
        return _Stepped(batches=whole, losses=mine, result=result)

    def evaluate(self, runs: Sequence[JobRun]) -> dict[str, float]:
        """Mean loss over each job's held-out target tokens, in nats; by job name.

        Only reads the adapters: gradients of batches under way stay as they are.
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
        """A row a slot; NumPy's, which the call that takes them uploads fastest."""
        out = np.zeros(self._num_slots, dtype)
        for slot, value in values.items():
            out[slot] = value
        return out

    def _keys(self, seeds: Any, microbatch: Microbatch) -> SlotKeys | None:
        """By the steps that the samples feed: the host may not have counted so far."""
        if not self._use_dropout:
            return None
        steps = {s.job: s.batch for s in microbatch}
        return SlotKeys(seed=seeds, step=self._by_slot(steps, np.int32))

    def _hyper(self, stepping: Sequence[JobRun]) -> Hyper:
        """Rows of the slots that step now; the others' are not looked at."""

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
    """A window's microbatches on the device, the next one ahead of its turn."""

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
        """What a microbatch still holds: samples of jobs that have not ended."""
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
        """What is left of a microbatch, and its arrays; None when nothing is left.

        What was prepared is dropped if a job in it has ended since: it would leave
        gradients in the slot that the job has left.
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
        # Those who left leave their room empty: nobody else's rows move.
        whole = self._microbatches[number]
        return pack_microbatch(whole, batches, self._limits)

    def count_off(self, microbatch: Microbatch) -> dict[JobRun, JobBatch]:
        """The jobs whose batch is whole with this microbatch, and that batch.

        Jobs that have ended since it was taken are not among them.
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
    """What steps did, by job name; waits for the device to have done them."""
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
    """Loss of each slot over several microbatches, in float64."""
    return np.sum([np.asarray(loss, np.float64) for loss in losses], axis=0)
