"""Evaluates adapters in their slots: losses, baselines and log likelihoods."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.data.pack import JobBatch, runs_reference
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.plan.memory.inputs import baseline_shape
from jaxlora.scheduler import Limits, Sample
from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.papers import greedy
from jaxlora.sharding.global_arrays import everywhere, put
from jaxlora.train.execute.feed import TickPacker
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.step import total_losses
from jaxlora.train.job_state import JobState


class Evaluator:
    """Runs samples forward, tick by tick, with the adapters in the slots.

    Adapters are only read, and pending gradients are kept.

    Attributes:
        no_baseline: Baselines of slots without any; None: no objective of the run has
            one. See `jaxlora.objectives.base.Objective`.
    """

    def __init__(
        self,
        layout: Layout,
        bases: Sequence[Base],
        slots: StagedSlots,
        packer: TickPacker,
        limits: Limits,
    ):
        """Queues nothing.

        Args:
            layout: The stages.
            bases: Frozen weights of each stage.
            slots: The slots.
            packer: Packs ticks.
            limits: Limits of a microbatch.
        """
        self._layout, self._bases, self._slots = layout, bases, slots
        last = layout.stages[-1]
        most = last.spec.options.most_adapters
        self._packer = packer
        self._limits = dataclasses.replace(limits, max_jobs=most)
        assert last.spec.slots is not None
        self._shape = last.spec.slots
        self._add_baseline = last.steps.add_baseline
        self.no_baseline: jax.Array | None = None
        shape = baseline_shape(last.spec, last.placement)
        if shape is not None:
            self.no_baseline = put(np.zeros(shape.shape, shape.dtype), shape.sharding)

    # ---- results -------------------------------------------------------------------

    def begin(
        self, jobs: Mapping[int, JobState]
    ) -> Callable[[], dict[int, dict[str, float]]]:
        """Queues the evaluation of adapters on their held-out samples, without dropout.

        The progress of each job is that of the weights in its slot.

        Args:
            jobs: Jobs to evaluate, by slot. Their order determines the packing.

        Returns:
            A function that waits for the results: by slot, the job's mean `loss`, for
            next-token jobs over the held-out target tokens in nats, NaN if a hidden
            state is not finite; the metrics of its objective, by name; and if there are
            several held-out data sets, `loss/NAME` of each.
        """
        batches = {slot: job.eval_batch(slot) for slot, job in jobs.items()}
        weights = [table.weights for table in self._slots.tables]
        recombined = {
            slot: batch
            for slot, job in jobs.items()
            if (batch := job.baseline_batch(slot)) is not None
        }
        baseline = self.add_baselines(self.no_baseline, recombined, weights)
        ranges = {slot: dict(job.eval_ranges) for slot, job in jobs.items()}
        queued = [
            [
                ({"loss": losses.loss} | losses.metrics, losses.is_finite)
                for losses in self._queue(batches, sets, baseline, weights)
            ]
            for sets in _rounds(batches, ranges)
        ]
        sums = everywhere(queued)
        return lambda: self._results(jax.device_get(sums), batches, ranges)

    def _results(
        self,
        host: Sequence[Sequence[Any]],
        batches: Mapping[int, JobBatch],
        ranges: Mapping[int, Mapping[str, range]],
    ) -> dict[int, dict[str, float]]:
        """Returns the results of `begin` from the sums of each round."""
        every = [one for of_round in host for one in of_round]
        flags = [flag.reshape(-1, self._shape.num_slots) for _, flag in every]
        is_finite = np.concatenate(flags).all(axis=0)

        def total(some: Sequence[Any], slot: int, name: str) -> float:
            return float(total_losses([sums[name] for sums, _ in some])[slot])

        return {
            slot: {
                name: total(every, slot, name) / batch.num_terms
                if is_finite[slot]
                else math.nan
                for name in ("loss", *batch.metric_names)
            }
            | {
                f"loss/{name}": total(host[number], slot, "loss")
                / batch.num_terms_of(groups)
                for number, (name, groups) in enumerate(ranges[slot].items())
            }
            for slot, batch in batches.items()
        }

    def add_baselines(
        self,
        baseline: jax.Array | None,
        batches: Mapping[int, JobBatch],
        weights: Sequence[Tables],
    ) -> jax.Array | None:
        """Queues the computation of new baselines of some slots.

        Baselines are never read by the host, which goes on queueing work.

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
        for losses in self._queue(batches, _all_groups(batches), baseline, weights):
            baseline = self._add_baseline(baseline, losses.loss, is_new)
            is_new = np.zeros_like(is_new)
        return baseline

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
        assert not self._slots.has_job(slot), f"slot {slot} has a job"
        if adapter is not None:  # an empty slot gives the base
            self._slots.load(slot, adapter, self._shape.optimizers[0])
        batches, size = {slot: batch}, batch.objective.group_size
        tables, queued = self._slots.tables, []
        weights = [table.state.params for table in tables]
        settings = [table.settings for table in tables]
        for tick in self._ticks(batches, _all_groups(batches)):
            packed = self._packer.pack(tick, batches)
            rows = self._packer.upload(packed)
            losses = self._run(settings, rows, self.no_baseline, weights)
            queued.append((tick, packed.segment_ids, losses.nll))
        found = jax.device_get(everywhere([nll for *_, nll in queued]))
        if adapter is not None:
            self._slots.clear(slot)
        out = np.zeros(len(batch.samples))
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

    # ---- work on the devices -------------------------------------------------------

    def _queue(
        self,
        batches: Mapping[int, JobBatch],
        groups: Mapping[int, range],
        baseline: jax.Array | None,
        weights: Sequence[Tables],
    ) -> Iterator[JobLosses]:
        """Queues the evaluation of groups of batches, tick by tick.

        That of a tick's references comes just before, if they run with it.
        """
        tables = self._slots.tables
        for tick in self._ticks(batches, groups):
            packed = self._packer.pack(tick, batches)
            rows = self._packer.upload(packed)
            if runs_reference(packed):
                params, settings = zip(*(t.of_reference for t in tables), strict=True)
                found = self._run(settings, rows, baseline, params)
                last = dataclasses.replace(rows[-1], reference_nll=found.nll)
                rows = [*rows[:-1], last]
            settings = [table.settings for table in tables]
            yield self._run(settings, rows, baseline, weights)

    def _ticks(
        self, batches: Mapping[int, JobBatch], groups: Mapping[int, range]
    ) -> Iterator[Tick]:
        """Yields ticks with some groups of samples of some batches, by slot.

        The samples may run in any order, on all devices at the same time.
        """

        def lengths(group: Sample) -> Sequence[int]:
            samples = batches[group.owner].group(group.index)
            return [len(sample.token_ids) for sample in samples]

        samples = [
            s
            for slot in sorted(groups)
            for s in batches[slot].to_schedule()
            if s.index in groups[slot]
        ]
        packed = greedy.pack(samples, self._limits).microbatches if samples else ()
        num_lanes = self._layout.num_lanes
        padded = [*packed, *[()] * (-len(packed) % num_lanes)]
        for whole in ticks_of(padded, num_lanes):
            yield from self._packer.split(whole, lengths)

    def _run(
        self,
        settings: Sequence[SlotSettings],
        rows: Sequence[PackedBatch],
        baseline: jax.Array | None,
        weights: Sequence[Tables],
    ) -> JobLosses:
        """Queues a forward pass of a tick through all stages.

        Args:
            settings: Settings of the slots on each stage.
            rows: The tick on each stage.
            baseline: The baselines of the slots.
            weights: Weights of each stage.
        """
        h: tuple[Any, ...] = ()  # what the stage before returned
        for number, stage in enumerate(self._layout.stages):
            where = stage.placement.sharding(stage.placement.hidden)
            h = tuple(jax.device_put(x, where) for x in h)
            keys = SlotKeys(baseline=baseline if stage.spec.has_head else None)
            args = self._bases[number], weights[number], settings[number]
            h = (stage.steps.evaluate(*args, rows[number], keys, *h),)
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
