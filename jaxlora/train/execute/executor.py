"""Trains on the devices of a layout, from one device to a pipeline of FSDP groups."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.exchange import exchanged_slots
from jaxlora.adapters.optimizer import GradientNorms, OptimizerInputs, StepResult
from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.stage_sharding import REPLICATED
from jaxlora.adapters.staged_slots import Padded, StagedSlots
from jaxlora.data.pack import JobBatch
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.plan.stream_plan import StreamTick, TickSource
from jaxlora.scheduler import Limits
from jaxlora.scheduler.lanes import Lane
from jaxlora.sharding.global_arrays import everywhere
from jaxlora.sharding.pipeline import Pass, one_f_one_b
from jaxlora.train.execute.evaluation import Evaluator
from jaxlora.train.execute.feed import Feed, ReplicaRows, TickPacker, TickWork
from jaxlora.train.execute.in_flight import InFlight
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.replicas import FurtherReplicas
from jaxlora.train.execute.step import by_slot, optimizer_inputs, total_losses
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Steps:
    """Optimizer steps of the slots whose global batch a tick has completed.

    Attributes:
        losses: By slot, the losses and metrics of each tick of the global batch.
        inputs: Settings of the steps.
        measured: For each stage, the measures of all stages, on its devices; empty if
            there is one stage only.
        results: Results of the steps, of each stage that has queued them.
    """

    losses: dict[int, list[dict[str, jax.Array]]]
    inputs: OptimizerInputs
    measured: list[tuple[GradientNorms, ...]]
    results: list[StepResult] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class _Tick:
    """A tick on the devices, from its first pass until its steps are reported.

    Attributes:
        slots: Slots of its samples, without those that were left since.
        further: What replicas beside the stages run of it.
        keys: Keys of its dropout masks.
        beginning: By slot, the samples of the baseline of a global batch that begins.
        completed: By slot, the global batches that it completes.
        work: Its work, by replica.
        steps: The optimizer steps that follow it, if any; None: not queued yet.
    """

    slots: set[int]
    further: Sequence[ReplicaRows]
    keys: SlotKeys
    beginning: Mapping[int, JobBatch]
    completed: dict[int, JobBatch]
    work: Mapping[int, TickWork]
    steps: _Steps | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Copies of the slots of each stage, after its steps that follow a tick."""

    tick: int
    reads: dict[int, ReadSlot] = dataclasses.field(default_factory=dict)


class Executor:
    """Queues work on the devices before it reads results, so they never idle.

    The trainer decides which jobs train and when a job ends; an executor queues the
    work on its devices and yields what the optimizer steps did. All calls are made by
    one thread. All methods may be called between two calls of `run`, and while its
    iterator is suspended at an item. They are all that a run calls, so one that has
    them trains in its place; the tests have one without a device.

    See `jaxlora.sharding.pipeline` for the order of work. The results of a tick's steps
    are read when the last stage has queued them and the passes of one more round are
    queued. On one device this is when the next microbatch is queued, and before any
    further step.

    Attributes:
        slots: The slots that are trained.
    """

    def __init__(
        self,
        layout: Layout,
        params: Base,
        slots: StagedSlots,
        limits: Limits,
        wait_for: Callable[[int], None] | None = None,
        bases: Sequence[Base] = (),
        lanes: Sequence[Lane] = (),
    ):
        """Makes the executor; nothing is queued yet.

        Args:
            layout: The stages.
            params: Weights of the frozen base.
            slots: The slots to train.
            limits: Limits of a microbatch.
            wait_for: See `TickPacker`.
            bases: The frozen base on each of the further replicas; see
                `FurtherReplicas`.
            lanes: The lanes of further replicas.
        """
        assert layout.stages[0].spec.slots is not None
        self._shape = layout.stages[0].spec.slots
        self._layout, self.slots, self._tables = layout, slots, slots.tables
        self._bases = layout.bases(params)
        self._packer = TickPacker(layout, limits, lanes, wait_for)
        self._evaluator = Evaluator(layout, self._bases, slots, self._packer, limits)
        self._further = FurtherReplicas(layout, bases, slots.tables[0])
        self._begin(lambda: None, {})

    def _begin(
        self, next_tick: Callable[[], StreamTick | None], jobs: Mapping[int, JobState]
    ) -> None:
        """Starts with nothing in flight; see `Feed` for the arguments."""
        self._jobs, self._feed = jobs, Feed(next_tick, jobs, self._packer)
        self._in_flight = InFlight(self._layout.stages, self._bases, self._tables)
        self._baseline = self._evaluator.no_baseline
        self._ticks: dict[int, _Tick] = {}
        self._losses: dict[int, list[dict[str, jax.Array]]] = defaultdict(list)
        # Slots that were left, and the last tick in flight that adds gradients to them.
        self._leaving: dict[int, int] = {}
        self._num_rounds = 0
        self._cut: _Cut | None = None

    # ---- slots ---------------------------------------------------------------------

    def load(self, slot: int, padded: Padded, optimizer: str) -> None:
        """Puts an adapter into a free slot, with empty state of its optimizer.

        A slot is free if it has no job, and no tick in flight has rows of its last one;
        see `StreamPlan.is_free`.
        """
        self._check_free(slot)
        self.slots.load_padded(slot, padded, optimizer)
        self._further.copy(slot)

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into a free slot, which may be another one than before.

        Args:
            slot: The slot.
            parked: State that `copy` returned, possibly in another process.
            like: Adapter that the job started from, which gives scaling and dropout.
        """
        self._check_free(slot)
        self.slots.restore(slot, parked, like)
        self._further.copy(slot)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot's job, for passes in the step.

        It stays so until the slot is released. Without this, the base is the reference.
        The slots have `SlotShape.has_references`.
        """
        self.slots.refer(slot, adapter)
        self._further.refer(slot, adapter)

    def _check_free(self, slot: int) -> None:
        is_leaving = slot in self._leaving
        assert not is_leaving, f"passes in flight would add gradients to slot {slot}"

    def copy(self, slot: int) -> ParkedSlot:
        """Returns the whole state of a slot, without gradients that are pending.

        While the iterator of `run` is suspended, the slot is one of the item's.
        """
        return self.slots.copy(slot)

    def release(self, slot: int) -> None:
        """Empties a slot: weights, optimizer state and pending gradients.

        While `run` is suspended, only slots of its last item may be released. The slot
        takes no further step. What is queued of its samples runs, and their gradients
        are discarded.
        """
        self.slots.clear(slot)
        self._further.copy(slot)
        self._feed.forget(slot)
        self._losses.pop(slot, None)
        for tick in self._ticks.values():
            tick.completed.pop(slot, None)
            tick.slots.discard(slot)
        last = max(self._in_flight.ticks_of(slot), default=None)
        if last is not None:
            self._leaving[slot] = last

    def _clear_left(self) -> None:
        """Discards the gradients of passes that were in flight when a job left."""
        for slot in [
            s for s, last in self._leaving.items() if last <= self._num_rounds
        ]:
            del self._leaving[slot]
            self.slots.clear(slot)

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots to the host, each after its last step.

        Returns:
            The states; None if a pipeline has steps in flight. Then the item of a later
            step has them, as they are after exactly the steps that were reported with
            it and before, and no job may be put into a slot until then. If the run ends
            first, ask again.
        """
        if self._cut is None:
            if all(tick.steps is None for tick in self._ticks.values()):
                return self.slots.snapshot()
            # Each stage is copied after its own steps of the next tick.
            self._cut = _Cut(tick=self._num_rounds)
        return None

    def wait(self) -> None:
        """Waits until the devices have finished all queued microbatches."""
        jax.block_until_ready([table.state.pending.is_finite for table in self._tables])
        self._further.wait()

    # ---- evaluation, which reads slots only ----------------------------------------

    def begin_evaluation(
        self, jobs: Mapping[int, JobState]
    ) -> Callable[[], dict[int, dict[str, float]]]:
        """Queues the evaluation of the jobs in some slots; see `Evaluator.begin`."""
        return self._evaluator.begin(jobs)

    def log_likelihoods(
        self, slot: int, batch: JobBatch, adapter: Adapter | None
    ) -> np.ndarray:
        """Returns log likelihoods by way of a free slot; see the evaluator's method."""
        self._check_free(slot)
        return self._evaluator.log_likelihoods(slot, batch, adapter)

    # ---- training ------------------------------------------------------------------

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
        self._begin(source.take, jobs)
        stages, in_flight = self._layout.stages, self._layout.planned.in_flight
        for one in one_f_one_b(self._feed.has_tick, len(stages), in_flight):
            for each in one.passes:
                self._queue(each)
            self._clear_left()
            if one.finished is not None:
                yield self._report(one.finished)
            for stage, number in one.stepping:
                tick = self._ticks[number]
                if stage == 0 and tick.completed:
                    tick.steps = self._complete(tick.completed)
                if tick.steps is not None:
                    self._step(stage, tick.steps, tick.completed)
                if self._cut is not None and self._cut.tick == number:
                    self._cut.reads[stage] = self._tables[stage].snapshot()
            self._num_rounds += 1
        self._cut = None

    def _queue(self, one: Pass) -> None:
        """Queues a pass of a tick, and packs the next one if the tick enters."""
        enters = one.stage == 0 and one.kind != "backward"
        if enters:
            self._enter(one.tick)
        tick = self._ticks[one.tick]
        if one.kind == "forward_backward" and tick.beginning:
            # All stages still have the weights before the step of such a batch: the
            # step follows this tick.
            weights = [table.state.params for table in self._tables]
            self._baseline = self._evaluator.add_baselines(
                self._baseline, tick.beginning, weights
            )
        if one.tick in self._in_flight:  # some of its samples run on the stages
            losses = self._in_flight.run(one, self._baseline)
            if losses is not None:
                self._note_losses(tick.slots, losses)
        if enters:
            if self._layout.further:
                self._run_further(tick)
            self._feed.prepare(one.tick + 1)

    def _enter(self, number: int) -> None:
        """Takes the next tick from the feed."""
        fed = self._feed.take()
        # The host may not have reached these steps yet: they are the samples'.
        steps = {s.owner: s.batch for s in fed.samples}
        seeds = {slot: self._jobs[slot].settings.seed for slot in steps}
        keys = SlotKeys(
            seed=by_slot(seeds, self._shape.num_slots, np.int32),
            step=by_slot(steps, self._shape.num_slots, np.int32),
        )
        work: dict[int, TickWork] = {}
        for one in fed.rows:
            work[one.replica] = work.get(one.replica, TickWork()) + one.work
            if one.replica == 0:
                self._in_flight.enter(number, one, keys)
        self._ticks[number] = _Tick(
            slots=set(steps),
            further=[one for one in fed.rows if one.replica],
            keys=keys,
            beginning=self._feed.begin(fed),
            completed=self._feed.complete(fed),
            work=work,
        )

    def _run_further(self, tick: _Tick) -> None:
        """Queues the microbatches of further replicas.

        They send their gradients of the batches that the tick completes, some of which
        are of earlier ticks.
        """
        for slots, losses in self._further.run(tick.further, tick.keys, self._baseline):
            self._note_losses(slots, losses)
        self._further.send(tick.completed)

    def _note_losses(self, slots: Collection[int], losses: JobLosses) -> None:
        sums = everywhere({"loss": losses.loss} | losses.metrics)
        for slot in slots:
            self._losses[slot].append(sums)

    # ---- optimizer steps -----------------------------------------------------------

    def _complete(self, batches: Mapping[int, JobBatch]) -> _Steps:
        """Prepares the steps of global batches whose backward passes are queued."""
        if self._layout.further:
            self._further.add(batches)
        for stage, table in zip(self._layout.stages, self._tables, strict=True):
            # Their gradients are summed over the devices of every stage.
            for slot in exchanged_slots(batches, stage.placement):
                pending = stage.steps.exchange(table.state.pending, slot)
                table.state = dataclasses.replace(table.state, pending=pending)
        steps = {slot: batch.step for slot, batch in batches.items()}
        return _Steps(
            losses={slot: self._losses.pop(slot) for slot in batches},
            inputs=optimizer_inputs(self._jobs, steps, self._shape),
            measured=self._measure(),
        )

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

    def _step(self, stage: int, steps: _Steps, slots: Collection[int]) -> None:
        """Queues optimizer steps of slots on one stage."""
        table, run = self._tables[stage], self._layout.stages[stage].steps.step
        measured = steps.measured[stage]
        args = table.state, steps.inputs, measured, table.settings["rank"]
        table.state, result = run(*args)
        steps.results.append(everywhere(result))
        if stage:
            return
        if self._layout.further:
            self._further.copy_weights(slots)
        # This transfer is intended and does not block, so the transfer guard is off.
        with jax.transfer_guard_device_to_host("allow"):
            for array in jax.tree.leaves((steps.losses, steps.results)):
                array.copy_to_host_async()

    def _report(self, number: int) -> Outcomes:
        """Reports a tick, and the steps that followed it."""
        tick, snapshot = self._ticks.pop(number), None
        if self._cut is not None and self._cut.tick == number:
            snapshot = self.slots.joined(self._cut.reads)
            self._cut = None
        return Outcomes(steps=self._outcomes(tick), work=tick.work, snapshot=snapshot)

    def _outcomes(self, tick: _Tick) -> dict[int, StepOutcome]:
        """Reads the results of steps; waits for the devices to finish them."""
        if tick.steps is None:
            return {}
        # All stages have the same result, and the first one has it first.
        losses, result = jax.device_get((tick.steps.losses, tick.steps.results[0]))

        def total(slot: int, name: str) -> float:
            return float(total_losses([each[name] for each in losses[slot]])[slot])

        return {
            slot: StepOutcome(
                loss=total(slot, "loss"),
                metrics={name: total(slot, name) for name in batch.metric_names},
                grad_norm=float(result.norm[slot]),
                learning_rate=self._jobs[slot].learning_rate(batch.step),
                num_tokens=batch.num_tokens,
                num_target_tokens=batch.num_target_tokens,
                is_finite=bool(result.is_finite[slot]),
            )
            for slot, batch in tick.completed.items()
        }
