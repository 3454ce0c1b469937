"""Runs a window's microbatches, or an evaluation, on one device."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.models.decoder import DecoderSpec
from jaxlora.train.job_run import JobRun
from jaxlora.train.optimizer import Hyper
from jaxlora.train.slots import SlotTable
from jaxlora.train.step import Base, CompiledSteps, JobLosses, SlotKeys, announced
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


# What a step did, by job name; told before the next microbatch starts.
OnSteps = Callable[[dict[str, StepOutcome]], None]


class Executor:
    """Runs schedules on one device.

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
        self.table = table

    def train(
        self, runs: Sequence[JobRun], schedule: Schedule, on_steps: OnSteps
    ) -> WindowTally:
        """Runs a window, with each job's optimiser step as soon as its batch is whole.

        Args:
            runs: The jobs in it.
            schedule: Whole global batches, from each job's next one on.
            on_steps: Called after the steps that follow a microbatch; must count them
                (`JobRun.note_step`) or take the job's slot away. What is left of a job
                without a slot does not run.
        """
        feed = _Feed(runs, schedule, self._limits)
        losses: dict[int, list[JobLosses]] = defaultdict(list)
        keys = self._keys(runs)
        for number in range(len(schedule.microbatches)):
            microbatch, packed = feed.take(number)
            if packed is None:
                continue
            with announced(self._steps.accumulate, "the training step"):
                self.table.state, out = self._steps.accumulate(
                    self._base, self.table.state, self.table.settings, packed, keys
                )
            for slot in {s.job for s in microbatch}:
                losses[slot].append(out)
            feed.prepare(number + 1)  # the device is busy
            whole = feed.count_off(microbatch)
            if whole:
                outcomes = self._step(whole, losses)
                on_steps(outcomes)
                keys = self._keys(runs)
        return feed.tally()

    def _step(
        self, whole: Mapping[JobRun, JobBatch], losses: dict[int, list[JobLosses]]
    ) -> dict[str, StepOutcome]:
        """Steps the jobs whose batch is whole; what came of it, by job name."""
        rates = {run.job.name: run.learning_rate() for run in whole}
        self.table.state, norms = self._steps.step(
            self.table.state, self._hyper(list(whole))
        )
        host, norms = jax.device_get(
            ({run.slot: losses.pop(run.slot) for run in whole}, norms)
        )
        out = {}
        for run, batch in whole.items():
            total, is_finite = _totals(host[run.slot])
            loss, norm = float(total[run.slot]), float(norms[run.slot])
            finite = is_finite[run.slot] and np.isfinite(loss) and np.isfinite(norm)
            out[run.job.name] = StepOutcome(
                loss=loss,
                grad_norm=norm,
                learning_rate=rates[run.job.name],
                num_tokens=batch.num_tokens,
                num_target_tokens=batch.num_target_tokens,
                is_finite=bool(finite),
            )
        return out

    def evaluate(self, runs: Sequence[JobRun]) -> dict[str, float]:
        """Mean loss over each job's held-out target tokens, in nats; by job name.

        Only reads the adapters: gradients of batches under way stay as they are.
        """
        batches = {run.slot: run.eval_batch() for run in runs}
        samples = [s for batch in batches.values() for s in batch.to_schedule()]
        losses: list[JobLosses] = []
        for microbatch in greedy.pack(samples, self._limits).microbatches:
            packed = pack_microbatch(microbatch, batches, self._limits)
            with announced(self._steps.evaluate, "the evaluation"):
                out = self._steps.evaluate(
                    self._base, self.table.state.params, self.table.settings, packed
                )
            losses.append(out)
        total, is_finite = _totals(jax.device_get(losses))
        return {
            run.job.name: float(total[run.slot]) / batches[run.slot].num_target_tokens
            if is_finite[run.slot]
            else math.nan
            for run in runs
        }

    def _by_slot(self, values: Mapping[int, float], dtype) -> jax.Array:
        out = np.zeros(self._num_slots, dtype)
        for slot, value in values.items():
            out[slot] = value
        return jnp.asarray(out)

    def _keys(self, runs: Sequence[JobRun]) -> SlotKeys | None:
        if not self._use_dropout:
            return None
        runs = [run for run in runs if run.progress.slot is not None]
        return SlotKeys(
            seed=self._by_slot({r.slot: r.job.seed for r in runs}, np.int32),
            step=self._by_slot({r.slot: r.progress.step for r in runs}, np.int32),
        )

    def _hyper(self, stepping: Sequence[JobRun]) -> Hyper:
        """Rows of the slots that step now; the others' are not looked at."""

        def row(value: Callable[[JobRun], float], dtype=np.float32) -> jax.Array:
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
    """A window's microbatches as arrays, the next one packed ahead."""

    def __init__(self, runs: Sequence[JobRun], schedule: Schedule, limits: Limits):
        self._runs = {run.slot: run for run in runs}
        self._schedule, self._limits = schedule, limits
        self._left = Counter((s.job, s.batch) for m in schedule.microbatches for s in m)
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._ready: tuple[int, Microbatch, PackedBatch | None] | None = None
        self._num_microbatches = self._num_tokens = 0
        self._left_out: Counter[str] = Counter()

    def _kept(self, number: int) -> Microbatch:
        """What a microbatch still holds: samples of jobs that have not ended."""
        return tuple(
            s
            for s in self._schedule.microbatches[number]
            if self._runs[s.job].progress.slot is not None
        )

    def prepare(self, number: int) -> None:
        """Packs a microbatch before it is needed; none after the last."""
        if number < len(self._schedule.microbatches):
            kept = self._kept(number)
            self._ready = number, kept, self._pack(number, kept)

    def take(self, number: int) -> tuple[Microbatch, PackedBatch | None]:
        """What is left of a microbatch, and its arrays; None when nothing is left."""
        kept, ready = self._kept(number), self._ready
        if ready is not None and ready[:2] == (number, kept):
            packed = ready[2]
        else:
            packed = self._pack(number, kept)
        for sample in self._schedule.microbatches[number]:
            run = self._runs[sample.job]
            if run.progress.slot is None:
                self._left_out[run.job.name] += 1
        self._num_microbatches += bool(kept)
        self._num_tokens += sum(s.num_tokens for s in kept)
        assert all(s.batch == self._runs[s.job].progress.step for s in kept)
        return kept, packed

    def _pack(self, number: int, kept: Microbatch) -> PackedBatch | None:
        if not kept:
            return None
        batches = {}
        for slot, step in {(s.job, s.batch) for s in kept}:
            if (slot, step) not in self._batches:
                self._batches[slot, step] = self._runs[slot].batch(step)
            batches[slot] = self._batches[slot, step]
        # Those who left leave their room empty: nobody else's rows move.
        whole = self._schedule.microbatches[number]
        return pack_microbatch(whole, batches, self._limits)

    def count_off(self, microbatch: Microbatch) -> dict[JobRun, JobBatch]:
        """The jobs whose batch is whole with this microbatch, and that batch."""
        out = {}
        for s in microbatch:
            self._left[s.job, s.batch] -= 1
            if not self._left[s.job, s.batch]:
                out[self._runs[s.job]] = self._batches.pop((s.job, s.batch))
        return out

    def tally(self) -> WindowTally:
        return WindowTally(
            num_microbatches=self._num_microbatches,
            num_tokens=self._num_tokens,
            left_out=dict(self._left_out),
        )


def _totals(losses: Sequence[JobLosses]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and finiteness of each slot over several microbatches, in float64."""
    total = np.sum([np.asarray(out.loss, np.float64) for out in losses], axis=0)
    return total, np.all([out.is_finite for out in losses], axis=0)
