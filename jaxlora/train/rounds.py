"""A round: one optimiser step of every running job, or one evaluation of some."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.data.pack import JobBatch, pack_microbatch
from jaxlora.models.decoder import DecoderSpec
from jaxlora.train.job_run import JobRun
from jaxlora.train.optimizer import Hyper
from jaxlora.train.slots import SlotTable
from jaxlora.train.step import Base, CompiledSteps, JobLosses, SlotKeys
from scheduler import Limits, Microbatch, Sample, Schedule, violations

Packer = Callable[[Sequence[Sample], Limits], Schedule]


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


class Rounds:
    """Runs rounds on one device.

    Attributes:
        table: The slots that the rounds train.
        last_schedule: The schedule of the latest round.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        base: Base,
        table: SlotTable,
        steps: CompiledSteps,
        limits: Limits,
        packer: Packer,
        *,
        use_dropout: bool,
    ):
        assert spec.slots is not None
        self._num_slots = spec.slots.num_slots
        self._base, self._steps = base, steps
        self._limits, self._packer = limits, packer
        self._use_dropout = use_dropout
        self.table = table
        self.last_schedule: Schedule | None = None

    def train(self, runs: Sequence[JobRun]) -> dict[str, StepOutcome]:
        """One optimiser step of each job, from its next global batch; by job name."""
        batches = {run.slot: run.next_batch() for run in runs}
        schedule = self._schedule(batches)
        keys = self._keys(runs) if self._use_dropout else None
        left = {slot: len(batch.samples) for slot, batch in batches.items()}
        losses, norms = [], {}
        for microbatch in schedule.microbatches:
            packed = pack_microbatch(microbatch, batches, self._limits)
            self.table.state, out = self._steps.accumulate(
                self._base, self.table.state, self.table.settings, packed, keys
            )
            losses.append(out)
            complete = _complete(microbatch, left)
            if complete:
                hyper = self._hyper(runs, complete)
                self.table.state, norm = self._steps.step(self.table.state, hyper)
                norms.update(dict.fromkeys(complete, norm))
        return self._outcomes(runs, batches, losses, norms)

    def evaluate(self, runs: Sequence[JobRun]) -> dict[str, float]:
        """Mean loss over each job's held-out target tokens, in nats; by job name."""
        batches = {run.slot: run.eval_batch() for run in runs}
        losses: list[JobLosses] = []
        for microbatch in self._schedule(batches).microbatches:
            packed = pack_microbatch(microbatch, batches, self._limits)
            losses.append(
                self._steps.evaluate(
                    self._base, self.table.state.params, self.table.settings, packed
                )
            )
        total, is_finite = _totals(losses)
        return {
            run.job.name: float(total[run.slot]) / batches[run.slot].num_target_tokens
            if is_finite[run.slot]
            else math.nan
            for run in runs
        }

    def _schedule(self, batches: dict[int, JobBatch]) -> Schedule:
        samples = [s for batch in batches.values() for s in batch.to_schedule()]
        schedule = self._packer(samples, self._limits)
        broken = violations(schedule, samples)
        assert not broken, f"the packer broke the rules: {broken[:3]}"
        self.last_schedule = schedule
        return schedule

    def _by_slot(self, values: Mapping[int, float], dtype) -> jax.Array:
        out = np.zeros(self._num_slots, dtype)
        for slot, value in values.items():
            out[slot] = value
        return jnp.asarray(out)

    def _keys(self, runs: Sequence[JobRun]) -> SlotKeys:
        return SlotKeys(
            seed=self._by_slot({r.slot: r.job.seed for r in runs}, np.int32),
            step=self._by_slot({r.slot: r.progress.step for r in runs}, np.int32),
        )

    def _hyper(self, runs: Sequence[JobRun], complete: set[int]) -> Hyper:
        def row(value: Callable[[JobRun], float], dtype=np.float32) -> jax.Array:
            return self._by_slot({run.slot: value(run) for run in runs}, dtype)

        return Hyper(
            steps_now=row(lambda r: r.slot in complete, np.bool_),
            count=row(lambda r: r.progress.step, np.int32),
            learning_rate=row(JobRun.learning_rate),
            b_ratio=row(lambda r: r.job.lora_plus_ratio),
            weight_decay=row(lambda r: r.job.weight_decay),
            b1=row(lambda r: r.job.adam_b1),
            b2=row(lambda r: r.job.adam_b2),
            eps=row(lambda r: r.job.adam_eps),
            max_norm=row(lambda r: r.job.max_grad_norm or np.inf),
        )

    def _outcomes(self, runs, batches, losses, norms) -> dict[str, StepOutcome]:
        total, is_finite = _totals(losses)
        norms = {slot: float(norm[slot]) for slot, norm in norms.items()}
        return {
            run.job.name: StepOutcome(
                loss=float(total[run.slot]),
                grad_norm=norms[run.slot],
                learning_rate=run.learning_rate(),
                num_tokens=batches[run.slot].num_tokens,
                num_target_tokens=batches[run.slot].num_target_tokens,
                is_finite=bool(
                    is_finite[run.slot]
                    and np.isfinite(total[run.slot])
                    and np.isfinite(norms[run.slot])
                ),
            )
            for run in runs
        }


def _complete(microbatch: Microbatch, left: dict[int, int]) -> set[int]:
    """Counts off a microbatch's samples; the slots whose global batch is now whole."""
    for sample in microbatch:
        left[sample.job] -= 1
    return {sample.job for sample in microbatch if left[sample.job] == 0}


def _totals(losses: list[JobLosses]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and finiteness of each slot over all microbatches, in float64."""
    host = jax.device_get(losses)
    total = np.sum([np.asarray(out.loss, np.float64) for out in host], axis=0)
    return total, np.all([out.is_finite for out in host], axis=0)
