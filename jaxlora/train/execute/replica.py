"""A replica beside the first one; see replicas.py."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.settings_table import base_settings
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.data.pack import PackedBatch
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.sharding.global_arrays import put
from jaxlora.sharding.pipeline import Pass
from jaxlora.train.execute.executor import TickWork
from jaxlora.train.execute.in_flight import InFlight
from jaxlora.train.execute.layout import Stage, one_copy

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
    """The slots of a further replica; see `PassTable`.

    Attributes:
        state: Weights and pending gradients.
        settings: Settings of the slots.
    """

    settings: SlotSettings

    def __init__(self, stage: Stage, table: SlotTable):
        """Makes slots without weights.

        Args:
            stage: The replica.
            table: Slots of the first replica.
        """
        self._placement = stage.placement
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
        host, placement = table.settings_on_host(), self._placement
        where = placement.committed(REPLICATED)
        self.settings = put(host, where)
        if self._reference is None:  # with these settings, the slots give the base
            base = put(base_settings(host), where)
            self._of_base = dataclasses.replace(base, vera=self.settings.vera)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot."""
        assert self._reference is not None, "references may be adapters"
        self._reference.load(slot, adapter)


class Replica:
    """One of the further replicas.

    Attributes:
        new: By slot, weights that no microbatch has needed yet.
    """

    def __init__(
        self,
        number: int,
        stage: Stage,
        base: Base,
        home: StageSharding,
        table: SlotTable,
    ):
        """Makes a replica that has no weights of jobs.

        Args:
            number: Its number; the first replica is 0.
            stage: The decoder on its devices.
            base: Weights of the frozen base there.
            home: Devices of the first replica.
            table: Slots of the first replica.
        """
        self._number, self._stage, self._home = number, stage, home
        self._slots = _Slots(stage, table)
        self._in_flight = InFlight([stage], [base], [self._slots])
        self.new: dict[int, jax.Array] = {}
        self._has_part: set[int] = set()
        self._num_microbatches = 0

    @property
    def options(self) -> DecoderOptions:
        """Options of its decoder."""
        return self._stage.spec.options

    @property
    def _whole(self) -> Sharding:
        placement = self._stage.placement
        return placement.committed(REPLICATED)

    def received(self, baseline: jax.Array | None) -> jax.Array | None:
        """Sends the baselines of the slots from the first replica to the devices."""
        if baseline is None:
            return None
        return jax.device_put(one_copy(baseline), self._whole)

    # ---- slots ---------------------------------------------------------------------

    def empty(self, slot: int, table: SlotTable) -> None:
        """Takes the settings of the first replica; a slot's reference is the base.

        Args:
            slot: A slot into which or from which a job has gone.
            table: Slots of the first replica.
        """
        self._slots.empty(slot, table)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot."""
        self._slots.refer(slot, adapter)

    def take(self, slot: int, row: jax.Array) -> None:
        """Sends a slot's weights, which replace those here when they are needed."""
        self.new[slot] = jax.device_put(one_copy(row), self._whole)

    def _replace(self, slot: int) -> None:
        """Replaces the weights of a slot, and discards its gradients."""
        state = self._slots.state
        params, pending = self._stage.steps.write_weights(
            state.params, state.pending, np.int32(slot), self.new.pop(slot)
        )
        self._slots.state = dataclasses.replace(state, params=params, pending=pending)
        self._has_part.discard(slot)

    def part(self, slot: int) -> Part | None:
        """Sends the gradients of a slot; None if no sample of its batch ran here."""
        if slot not in self._has_part or slot in self.new:
            return None
        pending = self._slots.state.pending
        part = self._stage.steps.read_part(pending, np.int32(slot))
        where = self._home.committed(REPLICATED)
        return jax.device_put(jax.tree.map(one_copy, part), where)

    # ---- microbatches --------------------------------------------------------------

    def run(
        self, one: ReplicaRows, keys: SlotKeys, baseline: jax.Array | None
    ) -> JobLosses:
        """Queues a microbatch, whose gradients are added to those before.

        Args:
            one: The microbatch.
            keys: Keys of the dropout masks.
            baseline: Baselines of the slots, on the devices.
        """
        try:
            return self._run(one, keys, baseline)
        except jax.errors.JaxRuntimeError as error:
            names = ", ".join(sorted(map(str, self._whole.device_set)))
            error.add_note(f"replica {self._number + 1}, on {names}")
            raise

    def _run(
        self, one: ReplicaRows, keys: SlotKeys, baseline: jax.Array | None
    ) -> JobLosses:
        for slot in sorted(one.slots & self.new.keys()):
            self._replace(slot)
        number = self._num_microbatches
        self._num_microbatches += 1
        self._in_flight.enter(
            number,
            [self._placed(one.rows)],
            keys,
            one.slots,
            runs_reference=one.runs_reference,
        )
        both = Pass(kind="forward_backward", stage=0, tick=number)
        losses = self._in_flight.run(both, baseline)
        assert losses is not None
        self._has_part |= one.slots
        return losses

    def _placed(self, rows: PackedBatch) -> PackedBatch:
        placement = self._stage.placement
        if placement.mesh is None:
            return rows  # one device's program uploads them faster
        return put(rows, placement.sharding(placement.rows))

    def wait(self) -> None:
        """Waits until all queued microbatches have run."""
        jax.block_until_ready(self._slots.state.pending.is_finite)
