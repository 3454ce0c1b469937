"""Trains on the devices of a layout, from one device to a pipeline of FSDP groups."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.parked_slot import ParkedSlot, ReadSlot
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.data.pack import (
    JobBatch,
    PackedBatch,
    pack_tick,
    runs_reference,
    split_by_segment_limit,
)
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.modules.length_classes import shortest_class
from jaxlora.scheduler import Limits, Microbatch, Sample
from jaxlora.scheduler.algorithms import greedy
from jaxlora.scheduler.lanes import Lane, Tick, ticks_of
from jaxlora.sharding.global_arrays import everywhere, put
from jaxlora.train.execute.executor import Outcomes, TickSource, TickWork
from jaxlora.train.execute.feed import FedTick, Feed
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.replicas import FurtherReplicas, TickRows
from jaxlora.train.execute.staged_stream import Baselines, StagedStream, total_losses
from jaxlora.train.job_state import JobState


class StagedExecutor:
    """Queues work on the devices before it reads results, so they never idle.

    `Loop` decides which jobs train and when a job ends; an executor queues the work
    on its devices and yields what the optimizer steps did. All calls are made by one
    thread. All methods may be called between two calls of `run`, and while its iterator
    is suspended at an item.

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
        wait_for: Callable[[int], None] = lambda rows: None,
        bases: Sequence[Base] = (),
        lanes: Sequence[Lane] = (),
    ):
        """Makes the executor; nothing is queued yet.

        Args:
            layout: The stages.
            params: Weights of the frozen base.
            slots: The slots to train.
            limits: Limits of a microbatch.
            wait_for: Waits for the passes of microbatches of so many rows, which may
                be compiled beside training.
            bases: The frozen base on each of the further replicas; see
                `FurtherReplicas`.
            lanes: The lanes of further replicas.
        """
        spec = layout.stages[0].spec
        assert spec.slots is not None
        self._num_slots = spec.slots.num_slots
        self._optimizers = spec.slots.optimizers
        self._layout, self._limits = layout, limits
        self._objectives = spec.options.objectives
        self._bases = layout.bases(params)
        self._wait_for, self._options = wait_for, spec.options
        self._stream: StagedStream | None = None  # that runs
        self._baselines = Baselines(layout.stages[-1], self._queue_evaluation)
        self._further = FurtherReplicas(layout, bases, slots.tables[0], limits, lanes)
        self.slots = slots

    # ---- slots ---------------------------------------------------------------------

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into a free slot, with empty state of its optimizer.

        A slot is free if it has no job, and no tick in flight has rows of its last one;
        see `StreamPlan.is_free`.
        """
        self._check_free(slot)
        self.slots.load(slot, adapter, optimizer)
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
        is_leaving = self._stream is not None and self._stream.is_leaving(slot)
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
        if self._stream is not None:
            self._stream.release(slot)

    def snapshot(self) -> ReadSlot | None:
        """Copies the states of all slots to the host, each after its last step.

        Returns:
            The states; None if a pipeline has steps in flight. Then the item of a later
            step has them, as they are after exactly the steps that were reported with
            it and before, and no job may be put into a slot until then. If the run ends
            first, ask again.
        """
        if self._stream is None:
            return self.slots.snapshot()
        return self._stream.snapshot()

    def wait(self) -> None:
        """Waits until the devices have finished all queued work."""
        states = [table.state for table in self.slots.tables]
        jax.block_until_ready([state.pending.is_finite for state in states])
        self._further.wait()

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

        def lengths(group: Sample) -> Sequence[int]:
            return jobs[group.owner].prepared.lengths_in_group(group.batch, group.index)

        feed = Feed(
            source,
            jobs,
            split=lambda tick: self._split_tick(tick.tick, tick.rows, lengths),
            pack=self._pack,
        )
        self._stream = StagedStream(
            self._layout,
            self._bases,
            self.slots,
            jobs,
            feed,
            self._baselines,
            self._further,
        )
        yield from self._stream.outcomes()
        self._stream = None

    def _split_tick(
        self, tick: Tick, rows: int, lengths: Callable[[Sample], Sequence[int]]
    ) -> list[Tick]:
        """Splits a tick that has more short samples than attention has room for.

        Args:
            tick: The tick.
            rows: Rows of each of its microbatches.
            lengths: Tokens of the samples of a group.
        """
        if self._options.attention != "cudnn":
            return [tick]
        own = [shortest_class(rows, *self._options.lengths)] * self._layout.num_lanes
        classes = own + self._further.shortest_classes()
        parts = [
            split_by_segment_limit(microbatch, short.tokens, short.segments, lengths)
            for microbatch, short in zip(tick, classes, strict=False)
        ]
        # A lane without a further part waits; ticks of no-ops keep their place.
        return [
            tuple(p[i] if i < len(p) else () for p in parts)
            for i in range(max(map(len, parts)))
        ]

    def _pack(self, fed: FedTick, batches: Mapping[int, JobBatch]) -> TickRows:
        """Packs a tick, and starts the upload of its rows."""
        num_lanes = self._layout.num_lanes
        tick, further = fed.tick[:num_lanes], fed.tick[num_lanes:]
        num_tokens = sum(s.num_tokens for m in tick for s in m if s.owner in batches)
        rows, runs = None, False
        if num_tokens:
            limits = dataclasses.replace(self._limits, capacity=fed.of.rows)
            packed = pack_tick(tick, batches, limits, self._objectives)
            rows, runs = self._upload(packed), runs_reference(packed)
        return TickRows(
            stages=rows,
            runs_reference=runs,
            work=TickWork(
                num_microbatches=num_lanes,
                num_rows=num_lanes * fed.of.rows,
                num_tokens=num_tokens,
            ),
            further=self._further.pack(further, batches),
        )

    def _upload(self, packed: PackedBatch) -> list[PackedBatch]:
        """Starts the upload of a tick's rows to the devices of every stage.

        To one device, a program's call uploads arrays of the host by itself, in a tenth
        of the host's time that `device_put` takes. A stage calls one program with them.
        """
        self._wait_for(len(packed.token_ids) // self._layout.num_lanes)
        if self._layout.stages[0].placement.num_devices == 1:
            return [packed] * len(self._layout.stages)
        places = [stage.placement for stage in self._layout.stages]
        return [put(packed, p.sharding(p.rows)) for p in places]

    # ---- evaluation ----------------------------------------------------------------

    def evaluate(self, jobs: Mapping[int, JobState]) -> dict[int, dict[str, float]]:
        """Evaluates adapters on their held-out samples, without dropout.

        Adapters are only read, and pending gradients are kept.

        The progress of each job is that of the weights in its slot.

        Args:
            jobs: Jobs to evaluate, by slot. Their order determines the packing.

        Returns:
            By slot, the job's mean `loss`, for next-token jobs over the held-out target
            tokens in nats, NaN if a hidden state is not finite; the metrics of its
            objective, by name; and if there are several held-out data sets, `loss/NAME`
            of each.
        """
        batches = {slot: job.eval_batch(slot) for slot, job in jobs.items()}
        weights = [table.weights for table in self.slots.tables]
        recombined = {
            slot: batch
            for slot, job in jobs.items()
            if (batch := job.baseline_batch(slot)) is not None
        }
        baseline = self._baselines.add(self._baselines.none, recombined, weights)
        ranges = {slot: dict(job.eval_ranges) for slot, job in jobs.items()}
        queued, numbers = [], []
        for number, sets in enumerate(_rounds(batches, ranges)):
            for losses in self._queue_evaluation(batches, baseline, weights, sets):
                queued.append(losses)
                numbers.append(number)
        wanted = [({"loss": o.loss} | o.metrics, o.is_finite) for o in queued]
        host = jax.device_get(everywhere(wanted))
        flags = [is_finite.reshape(-1, self._num_slots) for _, is_finite in host]
        is_finite = np.concatenate(flags).all(axis=0)

        def mean(slot: int, name: str) -> float:
            total = total_losses([sums[name] for sums, _ in host])
            return float(total[slot]) / batches[slot].num_terms

        def mean_of_set(slot: int, number: int, groups: range) -> float:
            of_set = zip(host, numbers, strict=True)
            losses = [sums["loss"] for (sums, _), n in of_set if n == number]
            total = total_losses(losses)
            return float(total[slot]) / batches[slot].num_terms_of(groups)

        return {
            slot: {
                name: mean(slot, name) if is_finite[slot] else math.nan
                for name in ("loss", *batch.metric_names)
            }
            | {
                f"loss/{name}": mean_of_set(slot, number, groups)
                for number, (name, groups) in enumerate(ranges[slot].items())
            }
            for slot, batch in batches.items()
        }

    def log_likelihoods(
        self, slot: int, batch: JobBatch, adapter: Adapter | None
    ) -> np.ndarray:
        """Returns the log likelihood of the targets of each sample, without dropout.

        Args:
            slot: A free slot, which is free again afterwards.
            batch: The samples, for the slot.
            adapter: The adapter that is meant; None: the base without one.

        Returns:
            Sums over the targets of each sample, in nats, float64.
        """
        self._check_free(slot)
        assert not self.slots.has_job(slot), f"slot {slot} has a job"
        if adapter is None:
            return self._log_likelihoods(slot, batch)
        self.slots.load(slot, adapter, self._optimizers[0])
        found = self._log_likelihoods(slot, batch)
        self.slots.clear(slot)
        return found

    def _log_likelihoods(self, slot: int, batch: JobBatch) -> np.ndarray:
        """Returns those by the adapter in a slot, or by the base if it is empty."""
        batches, size = {slot: batch}, batch.objective.group_size
        out, queued = np.zeros(len(batch.samples)), []
        tables = self.slots.tables
        weights = [table.state.params for table in tables]
        settings = [table.settings for table in tables]
        for tick in self._evaluation_ticks(batches, _all_groups(batches)):
            packed = pack_tick(tick, batches, self._limits, self._objectives)
            args = self._upload(packed), self._baselines.none, weights
            nll = self._evaluate_with(settings, *args).nll
            queued.append((tick, packed.segment_ids, nll))
        found = jax.device_get(everywhere([nll for *_, nll in queued]))
        for (tick, segments, _), nll in zip(queued, found, strict=True):
            lanes = len(tick), -1
            rows = zip(segments.reshape(lanes), nll.reshape(lanes), strict=True)
            for microbatch, (segment, of_row) in zip(tick, rows, strict=True):
                is_row = segment >= 0
                numbers = [g.index * size + i for g in microbatch for i in range(size)]
                sums = np.bincount(
                    segment[is_row],
                    of_row[is_row].astype(np.float64),
                    minlength=len(numbers),
                )
                out[numbers] = -sums
        return out

    def _queue_evaluation(
        self,
        batches: Mapping[int, JobBatch],
        baseline: jax.Array | None,
        weights: Sequence[Tables],
        groups: Mapping[int, range] | None = None,
    ) -> Iterator[JobLosses]:
        """Queues the evaluation of groups of batches (None: all), tick by tick."""
        for tick in self._evaluation_ticks(batches, groups or _all_groups(batches)):
            packed = pack_tick(tick, batches, self._limits, self._objectives)
            yield self._evaluate(packed, baseline, weights)

    def _evaluation_ticks(
        self, batches: Mapping[int, JobBatch], groups: Mapping[int, range]
    ) -> Iterator[Tick]:
        """Yields ticks with some groups of samples of some batches, by slot."""

        def lengths(group: Sample) -> Sequence[int]:
            samples = batches[group.owner].group(group.index)
            return [len(sample.token_ids) for sample in samples]

        microbatches = self._side_by_side(batches, groups)
        for whole in ticks_of(microbatches, self._layout.num_lanes):
            yield from self._split_tick(whole, self._limits.capacity, lengths)

    def _side_by_side(
        self, batches: Mapping[int, JobBatch], groups: Mapping[int, range]
    ) -> list[Microbatch]:
        """Packs samples that may run in any order, on all devices at the same time."""
        samples = [
            s
            for slot in sorted(groups)
            for s in batches[slot].to_schedule()
            if s.index in groups[slot]
        ]
        packed = greedy.pack(samples, self._limits).microbatches if samples else ()
        return [*packed, *[()] * (-len(packed) % self._layout.num_lanes)]

    def _evaluate(
        self,
        packed: PackedBatch,
        baseline: jax.Array | None,
        weights: Sequence[Tables],
    ) -> JobLosses:
        """Queues an evaluation of a tick, after that of the reference if it runs.

        Args:
            packed: The tick.
            baseline: The baselines of the slots.
            weights: Weights of each stage.
        """
        uploaded, tables = self._upload(packed), self.slots.tables
        if runs_reference(packed):
            params, settings = zip(*(t.of_reference for t in tables), strict=True)
            found = self._evaluate_with(settings, uploaded, baseline, params)
            last = dataclasses.replace(uploaded[-1], reference_nll=found.nll)
            uploaded = [*uploaded[:-1], last]
        settings = [table.settings for table in tables]
        return self._evaluate_with(settings, uploaded, baseline, weights)

    def _evaluate_with(
        self,
        settings: Sequence[SlotSettings],
        uploaded: Sequence[PackedBatch],
        baseline: jax.Array | None,
        weights: Sequence[Tables],
    ) -> JobLosses:
        """Queues an evaluation with settings of the slots on each stage."""
        h: tuple[Any, ...] = ()  # what the stage before returned
        for number, stage in enumerate(self._layout.stages):
            placement = stage.placement
            args = self._bases[number], weights[number], settings[number]
            where = placement.sharding(placement.hidden)
            h = tuple(jax.device_put(x, where) for x in h)
            keys = SlotKeys(baseline=baseline if stage.spec.has_head else None)
            h = (stage.steps.evaluate(*args, uploaded[number], keys, *h),)
        return h[0]


def _all_groups(batches: Mapping[int, JobBatch]) -> dict[int, range]:
    """Returns all groups of samples of batches, by slot."""
    return {slot: range(batch.num_groups) for slot, batch in batches.items()}


def _rounds(
    batches: Mapping[int, JobBatch], ranges: Mapping[int, Mapping[str, range]]
) -> list[dict[int, range]]:
    """Returns the groups that are evaluated together, by slot: a data set of each job.

    Microbatches then hold samples of one data set of a job, so that their sums are
    those of the data set.
    """
    whole = _all_groups(batches)
    sets = {slot: [*ranges[slot].values()] or [whole[slot]] for slot in batches}
    return [
        {slot: groups[number] for slot, groups in sets.items() if number < len(groups)}
        for number in range(max(map(len, sets.values())))
    ]
