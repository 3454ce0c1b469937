"""A replica beside the first one, possibly with pipeline stages; see replicas.py.

Each stage runs the forward pass of a microbatch when it comes, and the backward pass of
one that came earlier, by as many microbatches as there are stages behind. What is left
of the microbatches of a global batch is run before its gradients are sent, so a replica
drains where batches end.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.settings_table import base_settings
from jaxlora.adapters.slots import SlotTable
from jaxlora.data.pack import PackedBatch
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.sharding.global_arrays import put
from jaxlora.sharding.pipeline import RUN_AHEAD, Pass
from jaxlora.train.execute.executor import TickWork
from jaxlora.train.execute.in_flight import InFlight
from jaxlora.train.execute.layout import ReplicaStages, Stage, one_copy

# A replica's part of the gradients of a slot, and whether they are finite.
Part = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ReplicaRows:
    """A microbatch of a further replica.

    Attributes:
        replica: Number of the replica; the first one is 0.
        rows: Its rows, on the host.
        slots: Slots of the samples that run.
        work: Its work.
        runs_reference: Whether the reference of some samples runs with it.
    """

    replica: int
    rows: PackedBatch
    runs_reference: bool
    slots: frozenset[int]
    work: TickWork


class _Slots:
    """The slots of a stage of a further replica; see `PassTable`.

    Attributes:
        state: Weights and pending gradients.
        settings: Settings of the slots.
    """

    settings: SlotSettings

    def __init__(self, stage: Stage, table: SlotTable):
        """Makes slots without weights.

        Args:
            stage: The stage.
            table: Slots of the first replica.
        """
        self._spec, self._placement = stage.spec, stage.placement
        self.state = stage.steps.make_empty()
        self._reference = stage.steps.make_references()
        self._take_settings(table)

    @property
    def of_reference(self) -> tuple[Any, SlotSettings]:
        """Weights and settings with which the slots give their references."""
        if self._reference is not None:
            return self._reference.params, self._reference.settings
        return self.state.params, self._of_base

    def empty(self, slot: int, table: SlotTable) -> None:
        """Takes the settings of all slots, and makes the base a slot's reference."""
        self._take_settings(table)
        if self._reference is not None:
            self._reference.clear(slot)

    def _take_settings(self, table: SlotTable) -> None:
        host, placement = table.settings_part(self._spec), self._placement
        where = placement.committed(placement.by_slot)
        self.settings = put(host, where)
        if self._reference is None:  # with these settings, the slots give the base
            base = put(base_settings(host), where)
            self._of_base = dataclasses.replace(base, vera=self.settings.vera)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot."""
        assert self._reference is not None, "references may be adapters"
        self._reference.load(slot, adapter.limited_to(self._spec.trained_modules))


class Replica:
    """One of the further replicas.

    Attributes:
        new: By slot, weights on each stage that no microbatch has needed yet.
    """

    def __init__(
        self,
        number: int,
        one: ReplicaStages,
        bases: Sequence[Base],
        first: Stage,
        table: SlotTable,
    ):
        """Makes a replica that has no weights of jobs.

        Args:
            number: Its number; the first replica is 0.
            one: Its stages.
            bases: Weights of the frozen base on each stage.
            first: The first replica.
            table: Its slots.
        """
        self._number, self._stages = number, one.stages
        self._home, self._rows = first.placement, None
        self._last = len(one.stages) - 1
        if self._last:
            self._rows = first.steps.rows_of(one.specs)
        self._slots = [_Slots(stage, table) for stage in one.stages]
        self._in_flight = InFlight(one.stages, bases, self._slots)
        self.new: dict[int, Sequence[jax.Array]] = {}
        self._has_part: set[int] = set()
        self._num_microbatches = 0
        # By stage but the last, the microbatches whose backward pass is not queued.
        self._ahead: list[deque[int]] = [deque() for _ in range(self._last)]
        self._unfinished: deque[jax.Array] = deque()  # losses of the last ones

    @property
    def options(self) -> DecoderOptions:
        """Options of its decoder."""
        return self._stages[0].spec.options

    def _sent(self, x: jax.Array, stage: int) -> jax.Array:
        """Sends an array of the first replica to all devices of a stage."""
        placement = self._stages[stage].placement
        return jax.device_put(one_copy(x), placement.committed(placement.by_slot))

    def received(self, baseline: jax.Array | None) -> jax.Array | None:
        """Sends the baselines of the slots to the stage that has the losses."""
        return None if baseline is None else self._sent(baseline, self._last)

    # ---- slots ---------------------------------------------------------------------

    def empty(self, slot: int, table: SlotTable) -> None:
        """Takes the settings of the first replica; a slot's reference is the base.

        Args:
            slot: A slot into which or from which a job has gone.
            table: Slots of the first replica.
        """
        self._drain(slot)
        for slots in self._slots:
            slots.empty(slot, table)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot."""
        for slots in self._slots:
            slots.refer(slot, adapter)

    def take(self, slot: int, row: jax.Array) -> None:
        """Sends a slot's weights, which replace those here when they are needed."""
        rows = [row] if self._rows is None else self._rows.cut(row)
        self.new[slot] = [self._sent(x, stage) for stage, x in enumerate(rows)]

    def _replace(self, slot: int) -> None:
        """Replaces the weights of a slot, and discards its gradients."""
        new = self.new.pop(slot)
        for stage, slots, flat in zip(self._stages, self._slots, new, strict=True):
            state = slots.state
            args = state.params, state.pending, np.int32(slot), flat
            params, pending = stage.steps.write_weights(*args)
            slots.state = dataclasses.replace(state, params=params, pending=pending)
        self._has_part.discard(slot)

    def part(self, slot: int) -> Part | None:
        """Sends the gradients of a slot; None if no sample of its batch ran here."""
        if slot not in self._has_part or slot in self.new:
            return None
        self._drain(slot)
        where, parts = self._home.committed(self._home.by_slot), []
        for stage, slots in zip(self._stages, self._slots, strict=True):
            part = stage.steps.read_part(slots.state.pending, np.int32(slot))
            parts.append(jax.device_put(jax.tree.map(one_copy, part), where))
        return parts[0] if self._rows is None else self._rows.join(tuple(parts))

    # ---- microbatches --------------------------------------------------------------

    def run(
        self, one: ReplicaRows, keys: SlotKeys, baseline: jax.Array | None
    ) -> JobLosses:
        """Queues a microbatch, whose gradients are added to those before.

        Args:
            one: The microbatch.
            keys: Keys of the dropout masks.
            baseline: Baselines of the slots, on the last stage.
        """
        try:
            return self._run(one, keys, baseline)
        except jax.errors.JaxRuntimeError as error:
            names = ", ".join(sorted(map(str, self._devices())))
            error.add_note(f"replica {self._number + 1}, on {names}")
            raise

    def _devices(self) -> Iterator[jax.Device]:
        for stage in self._stages:
            where = stage.placement.committed(stage.placement.by_slot)
            yield from where.device_set

    def _run(
        self, one: ReplicaRows, keys: SlotKeys, baseline: jax.Array | None
    ) -> JobLosses:
        for slot in sorted(one.slots & self.new.keys()):
            self._replace(slot)
        number, last = self._num_microbatches, self._last
        self._num_microbatches += 1
        self._in_flight.enter(
            number,
            [self._placed(one.rows, stage) for stage in self._stages],
            keys,
            one.slots,
            runs_reference=one.runs_reference,
        )
        for stage in range(last):
            self._in_flight.run(Pass(kind="forward", stage=stage, tick=number), None)
            self._ahead[stage].append(number)
        both = Pass(kind="forward_backward", stage=last, tick=number)
        losses = self._in_flight.run(both, baseline)
        assert losses is not None
        for stage in reversed(range(last)):
            self._run_backward(stage, number - (last - stage))
        self._has_part |= one.slots
        self._wait_for_earlier(losses.loss)
        return losses

    def _placed(self, rows: PackedBatch, stage: Stage) -> PackedBatch:
        placement = stage.placement
        if placement.mesh is None and not self._last:
            return rows  # one device's program uploads them faster
        return put(rows, placement.sharding(placement.rows))

    def _run_backward(self, stage: int, until: int) -> None:
        """Queues the backward passes of a stage up to that of a microbatch."""
        ahead = self._ahead[stage]
        while ahead and ahead[0] <= until:
            one = Pass(kind="backward", stage=stage, tick=ahead.popleft())
            self._in_flight.run(one, None)

    def _drain(self, slot: int) -> None:
        """Queues what is left of the microbatches with rows of a slot."""
        until = max(self._in_flight.ticks_of(slot), default=-1)
        for stage in reversed(range(self._last)):
            self._run_backward(stage, until)

    def _wait_for_earlier(self, loss: jax.Array) -> None:
        """Waits if the last stage has too many unfinished microbatches."""
        if self._last:
            self._unfinished.append(loss)
            if len(self._unfinished) > RUN_AHEAD:
                self._unfinished.popleft().block_until_ready()

    def wait(self) -> None:
        """Waits until all queued microbatches have run."""
        for slots in self._slots:
            jax.block_until_ready(slots.state.pending.is_finite)
