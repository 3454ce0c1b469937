"""The stream of a run, from its first forward pass to its last optimizer step."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.optimizer import GradientNorms, OptimizerInputs, StepResult
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.adapters.stage_sharding import REPLICATED
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.data.pack import JobBatch
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.plan.memory.inputs import baseline_shape
from jaxlora.sharding.global_arrays import everywhere, put
from jaxlora.sharding.pipeline import RUN_AHEAD, Pass, one_f_one_b
from jaxlora.train.execute.executor import Outcomes, StepOutcome, TickWork
from jaxlora.train.execute.feed import FedTick, Feed
from jaxlora.train.execute.in_flight import InFlight
from jaxlora.train.execute.layout import Layout, Stage
from jaxlora.train.execute.optimizer_inputs import by_slot, optimizer_inputs
from jaxlora.train.execute.replicas import FurtherReplicas, ReplicaRows
from jaxlora.train.job_state import JobState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """Optimizer steps of the slots whose global batch a tick has completed.

    Attributes:
        batches: The global batches, by slot.
        learning_rates: The learning rates, by slot.
        losses: By slot, the losses and metrics of each tick of the global batch.
        inputs: Settings of the steps.
        measured: For each stage, the measures of all stages, on its devices; empty if
            there is one stage only.
        results: Results of the steps, of each stage that has queued them.
    """

    batches: dict[int, JobBatch]
    learning_rates: dict[int, float]
    losses: dict[int, list[dict[str, jax.Array]]]
    inputs: OptimizerInputs
    measured: list[tuple[GradientNorms, ...]]
    results: list[StepResult] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Copies of the slots of each stage, after its steps that follow a tick."""

    tick: int
    reads: dict[int, ReadSlot] = dataclasses.field(default_factory=dict)


class Baselines:
    """Computes the baselines of `jaxlora.data.objective.Objective`.

    Baselines are never read by the host, which goes on queueing work.

    Attributes:
        none: Baselines of slots without any; None: no objective of the run has one.
    """

    def __init__(
        self,
        last: Stage,
        evaluate: Callable[
            [Mapping[int, JobBatch], jax.Array | None, Sequence[Tables]],
            Iterator[JobLosses],
        ],
    ):
        """Queues nothing.

        Args:
            last: The last stage.
            evaluate: Queues the evaluation of batches, given baselines and the weights
                of each stage; yields the losses of each tick.
        """
        self._add, self._evaluate = last.steps.add_baseline, evaluate
        self.none: jax.Array | None = None
        shape = baseline_shape(last.spec, last.placement)
        if shape is not None:
            self.none = put(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def add(
        self,
        baseline: jax.Array | None,
        batches: Mapping[int, JobBatch],
        weights: Sequence[Tables],
    ) -> jax.Array | None:
        """Queues the computation of new baselines of some slots.

        Args:
            baseline: The baselines of all slots before.
            batches: The samples of each new baseline, by slot.
            weights: Weights of each stage.

        Returns:
            The baselines of all slots.
        """
        if not batches:
            return baseline
        assert baseline is not None, "an objective of the run has baselines"
        is_new = np.isin(np.arange(len(baseline)), list(batches))
        for losses in self._evaluate(batches, baseline, weights):
            baseline = self._add(baseline, losses.loss, is_new)
            is_new = np.zeros_like(is_new)
        return baseline


class StagedStream:
    """Queues the work of a stream; see `jaxlora.sharding.pipeline` for its order."""

    def __init__(
        self,
        layout: Layout,
        bases: Sequence[Base],
        slots: StagedSlots,
        jobs: Mapping[int, JobState],
        feed: Feed,
        baselines: Baselines,
        further: FurtherReplicas,
    ):
        """Queues nothing yet.

        Args:
            layout: The stages.
            bases: Frozen weights of each stage.
            slots: The slots to train.
            jobs: The job in each slot, at any time.
            feed: The ticks.
            baselines: Computes the baselines of global batches.
            further: Replicas beside the stages.
        """
        assert layout.stages[0].spec.slots is not None
        self._shape = layout.stages[0].spec.slots
        self._layout, self._slots, self._tables = layout, slots, slots.tables
        self._jobs, self._feed = jobs, feed
        self._in_flight = InFlight(layout.stages, bases, slots.tables)
        self._baselines, self._baseline = baselines, baselines.none
        self._further = further
        self._further_rows: dict[int, tuple[SlotKeys, Sequence[ReplicaRows]]] = {}
        # By tick, the samples of the baselines of global batches that begin in it.
        self._beginning: dict[int, dict[int, JobBatch]] = {}
        self._fed: dict[int, FedTick] = {}  # whose steps are not queued yet
        # By tick, the global batches that it completes, by slot.
        self._completed: dict[int, dict[int, JobBatch]] = {}
        # By slot.
        self._losses: dict[int, list[dict[str, jax.Array]]] = defaultdict(list)
        self._unfinished: deque[jax.Array] = deque()  # losses of the last ticks
        self._steps: dict[int, _Steps] = {}  # by the tick that they follow
        # Slots that were left, and the last tick in flight that adds gradients to them.
        self._leaving: dict[int, int] = {}
        self._num_rounds = 0
        self._cut: _Cut | None = None
        self._work: dict[int, dict[int, TickWork]] = {}  # by tick and replica

    def outcomes(self) -> Iterator[Outcomes]:
        """Runs the ticks, and yields the results of their optimizer steps."""
        stages, in_flight = self._layout.stages, self._layout.in_flight
        for one in one_f_one_b(self._feed.has_tick, len(stages), in_flight):
            for each in one.passes:
                self._queue(each)
            self._clear_left(self._num_rounds)
            if one.finished is not None:
                yield self._report(one.finished)
            for stage, tick in one.stepping:
                if stage == 0:
                    self._complete(tick)
                if tick in self._steps:
                    self._step(stage, self._steps[tick])
                if self._cut is not None and self._cut.tick == tick:
                    self._cut.reads[stage] = self._tables[stage].snapshot()
            self._num_rounds += 1

    def _queue(self, one: Pass) -> None:
        """Queues a pass of a tick, and packs the next one if the tick enters."""
        enters = one.stage == 0 and one.kind != "backward"
        if enters:
            self._enter(one.tick)
        if one.kind == "forward_backward":
            self._begin(one.tick)
        if one.tick in self._in_flight:  # some of its samples run on the stages
            self._run(one)
        if enters:
            self._run_further(one.tick)
            self._feed.prepare(one.tick + 1)

    def _begin(self, tick: int) -> None:
        """Computes the baselines of the batches that begin in a tick.

        All stages still have the weights before the step of such a batch: the step
        follows this tick.
        """
        if new := self._beginning.pop(tick, None):
            weights = [table.state.params for table in self._tables]
            self._baseline = self._baselines.add(self._baseline, new, weights)

    def _run(self, one: Pass) -> None:
        losses = self._in_flight.run(one, self._baseline)
        if losses is not None:
            self._wait_for_earlier(losses.loss)
            self._note_losses({s.owner for s in self._fed[one.tick].samples}, losses)

    def _run_further(self, tick: int) -> None:
        """Queues the microbatches of further replicas.

        They send their gradients of the batches that the tick completes, some of which
        are of earlier ticks.
        """
        if tick in self._further_rows:
            keys, rows = self._further_rows.pop(tick)
            for slots, losses in self._further.run(rows, keys, self._baseline):
                self._note_losses(slots, losses)
        self._further.send(self._completed.get(tick, ()))

    def _note_losses(self, slots: Collection[int], losses: JobLosses) -> None:
        sums = everywhere({"loss": losses.loss} | losses.metrics)
        for slot in slots:
            self._losses[slot].append(sums)

    def _wait_for_earlier(self, loss: jax.Array) -> None:
        """Waits if the last stage of a pipeline has too many unfinished ticks."""
        if len(self._layout.stages) == 1:
            return
        self._unfinished.append(loss)
        if len(self._unfinished) > RUN_AHEAD:
            self._unfinished.popleft().block_until_ready()

    def _enter(self, tick: int) -> None:
        fed, rows = self._feed.take()
        self._fed[tick] = fed
        if rows is None:
            return
        # The host may not have reached these steps yet: they are the samples'.
        steps = {s.owner: s.batch for s in fed.samples}
        seeds = {slot: self._jobs[slot].settings.seed for slot in steps}
        keys = SlotKeys(
            seed=by_slot(seeds, self._shape.num_slots, np.int32),
            step=by_slot(steps, self._shape.num_slots, np.int32),
        )
        self._work[tick] = {0: rows.work} if rows.stages is not None else {}
        if rows.stages is not None:
            runs = rows.runs_reference
            self._in_flight.enter(tick, rows.stages, keys, steps, runs_reference=runs)
        if rows.further:
            self._further_rows[tick] = keys, rows.further
        self._beginning[tick] = self._feed.begin(fed)
        self._completed[tick] = self._feed.complete(fed)
        work = self._work[tick]
        for one in rows.further:
            work[one.replica] = work.get(one.replica, TickWork()) + one.work

    # ---- jobs that leave -----------------------------------------------------------

    def release(self, slot: int) -> None:
        """Forgets a job that has left its slot; its samples are dropped already."""
        self._feed.forget(slot)
        self._losses.pop(slot, None)
        for completed in self._completed.values():
            completed.pop(slot, None)
        last = max(self._in_flight.ticks_of(slot), default=None)
        if last is not None:
            self._leaving[slot] = last

    def is_leaving(self, slot: int) -> bool:
        """Whether passes in flight still add gradients to a slot that was left."""
        return slot in self._leaving

    def _clear_left(self, finished: int) -> None:
        """Discards the gradients of passes that were in flight when a job left."""
        for slot in [s for s, last in self._leaving.items() if last <= finished]:
            del self._leaving[slot]
            self._slots.clear(slot)

    # ---- optimizer steps -----------------------------------------------------------

    def _complete(self, tick: int) -> None:
        """Prepares the steps that follow a tick whose backward passes are queued."""
        self._fed.pop(tick)
        batches = self._completed.pop(tick, {})
        if not batches:
            return
        step = {slot: batch.step for slot, batch in batches.items()}
        rates = {s: self._jobs[s].learning_rate(number) for s, number in step.items()}
        self._further.add(batches)
        self._exchange(batches)
        self._steps[tick] = _Steps(
            batches=batches,
            learning_rates=rates,
            losses={slot: self._losses.pop(slot) for slot in batches},
            inputs=optimizer_inputs(self._jobs, step, self._shape),
            measured=self._measure(),
        )

    def _exchange(self, slots: Collection[int]) -> None:
        """Queues the sums of the slots' gradients over the devices of every stage."""
        for stage, table in zip(self._layout.stages, self._tables, strict=True):
            for slot in exchanged_slots(slots, stage.placement):
                pending = stage.steps.exchange(table.state.pending, slot)
                table.state = dataclasses.replace(table.state, pending=pending)

    def _measure(self) -> list[tuple[GradientNorms, ...]]:
        """Measures the pending gradients on every stage, and sends that to all stages.

        A norm is over all stages, while each stage steps its own part of the adapter.
        """
        stages = self._layout.stages
        if len(stages) == 1:
            return [()]
        measured = [
            stage.steps.measure(table.state.pending)
            for stage, table in zip(stages, self._tables, strict=True)
        ]
        places = [s.placement.sharding(REPLICATED) for s in stages]
        return [jax.device_put(tuple(measured), place) for place in places]

    def _step(self, stage: int, steps: _Steps) -> None:
        """Queues optimizer steps on one stage."""
        table, run = self._tables[stage], self._layout.stages[stage].steps.step
        measured = steps.measured[stage]
        args = table.state, steps.inputs, measured, table.settings.rank
        table.state, result = run(*args)
        steps.results.append(everywhere(result))
        if stage:
            return
        self._further.copy_weights(steps.batches)
        # This transfer is intended and does not block, so the transfer guard is off.
        with jax.transfer_guard_device_to_host("allow"):
            for array in jax.tree.leaves((steps.losses, steps.results)):
                array.copy_to_host_async()

    # ---- results -------------------------------------------------------------------

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots to the host; see `StagedExecutor.snapshot`."""
        if self._cut is None and not self._steps:
            return self._slots.snapshot()
        if self._cut is None:
            # Each stage is copied after its own steps of the next tick.
            self._cut = _Cut(tick=self._num_rounds)
        return None

    def _report(self, tick: int) -> Outcomes:
        """Reports a tick, and the steps that followed it."""
        steps, snapshot = self._steps.pop(tick, None), None
        if self._cut is not None and self._cut.tick == tick:
            snapshot = self._slots.joined(self._cut.reads)
            self._cut = None
        return Outcomes(
            steps={} if steps is None else _step_outcomes(steps),
            work=self._work.pop(tick, {}),
            snapshot=snapshot,
        )


def _step_outcomes(steps: _Steps) -> dict[int, StepOutcome]:
    """Reads the results of steps; waits for the devices to finish them."""
    # All stages have the same result, and the first one has it first.
    losses, result = jax.device_get((steps.losses, steps.results[0]))

    def total(slot: int, name: str) -> float:
        return float(total_losses([tick[name] for tick in losses[slot]])[slot])

    return {
        slot: StepOutcome(
            loss=total(slot, "loss"),
            metrics={name: total(slot, name) for name in batch.metric_names},
            grad_norm=float(result.norm[slot]),
            learning_rate=steps.learning_rates[slot],
            num_tokens=batch.num_tokens,
            num_target_tokens=batch.num_target_tokens,
            is_finite=bool(result.is_finite[slot]),
        )
        for slot, batch in steps.batches.items()
    }


def total_losses(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Sums the losses of each slot over ticks and devices in float64.

    Args:
        losses: For each tick, G, or F G with a first axis of devices.
    """
    parts = [np.atleast_2d(np.asarray(loss, np.float64)).sum(axis=0) for loss in losses]
    return np.sum(parts, axis=0)
