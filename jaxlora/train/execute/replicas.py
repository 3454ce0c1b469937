"""Replicas beside the first one, on other devices or with other microbatches.

The first replica has the slots with their optimizers, takes every step, evaluates and
is saved. The others have a base and a copy of all weights, run microbatches, and add up
the gradients of their own. When a replica has run all its samples of a global batch,
its part of the gradients is sent to the first replica, which adds the parts in the
order of the replicas before the step. The new weights come back, and each replica takes
those of a slot just before it runs samples of it. So a replica waits for the jobs whose
samples it runs next, and for no other.

One thread queues everything, in an order that the ticks determine. No program runs on
two replicas. Each divides its tables among its own devices, so gradients and weights
are whole when they are sent, from device to device without the host.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.settings_table import base_settings
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.stage_sharding import REPLICATED, StageSharding
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.sharding.global_arrays import put
from jaxlora.train.execute.feed import ReplicaRows
from jaxlora.train.execute.layout import Layout, Stage, one_copy

# A replica's part of the gradients of a slot, and whether they are finite.
Part = tuple[jax.Array, jax.Array]


class FurtherReplicas:
    """The replicas beside the first one; none if replicas are alike or there is one."""

    def __init__(self, layout: Layout, bases: Sequence[Base], table: SlotTable):
        """Copies all slots to the replicas.

        Args:
            layout: The first replica, and the others.
            bases: Weights of the frozen base on each of the others.
            table: Slots of the first replica.
        """
        self._home, self._table = layout.stages[0], table
        self._replicas = {
            number: Replica(number, stage, base, self._home.placement, table)
            for number, (stage, base) in enumerate(
                zip(layout.further, bases, strict=True), start=1
            )
        }
        # By slot, what the first replica is to add, in the order of the replicas.
        self._parts: dict[int, list[Part]] = defaultdict(list)
        assert self._home.spec.slots is not None
        for slot in range(self._home.spec.slots.num_slots):
            if table.has_job(slot):
                self.copy(slot)

    # ---- slots ---------------------------------------------------------------------

    def copy(self, slot: int) -> None:
        """Gives the replicas what is in a slot now: a job's weights, or none.

        Gradients of the slot that they have are discarded.
        """
        self._parts.pop(slot, None)
        for replica in self._replicas.values():
            replica.empty(slot, self._table)
        self.copy_weights([slot])

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot, until `copy` of the slot."""
        for replica in self._replicas.values():
            replica.refer(slot, adapter)

    def copy_weights(self, slots: Collection[int]) -> None:
        """Sends the weights of slots to the replicas, which take them when needed."""
        if not self._replicas:
            return
        for slot in sorted(slots):
            params = self._table.state.params
            row = self._home.steps.read_slot(params, np.int32(slot))
            for replica in self._replicas.values():
                replica.take(slot, row)

    def wait(self) -> None:
        """Waits until the replicas have finished all queued work."""
        for replica in self._replicas.values():
            replica.wait()

    # ---- microbatches --------------------------------------------------------------

    def run(
        self, tick: Sequence[ReplicaRows], keys: SlotKeys, baseline: jax.Array | None
    ) -> Iterator[tuple[frozenset[int], JobLosses]]:
        """Queues the microbatches of a tick; yields their slots and losses.

        Args:
            tick: The microbatches.
            keys: Keys of the dropout masks.
            baseline: The baselines of the slots' global batches, on the first replica.
        """
        placed: dict[int, jax.Array | None] = {}
        for one in tick:
            replica = self._replicas[one.replica]
            if one.replica not in placed:
                placed[one.replica] = replica.received(baseline)
            yield one.slots, replica.run(one, keys, placed[one.replica])

    # ---- gradients -----------------------------------------------------------------

    def send(self, slots: Collection[int]) -> None:
        """Sends the gradients of slots, all of whose samples are queued.

        They leave a replica before it runs its next microbatch.
        """
        for slot in sorted(slots):
            for number in sorted(self._replicas):
                part = self._replicas[number].part(slot)
                if part is not None:
                    self._parts[slot].append(part)

    def add(self, slots: Collection[int]) -> None:
        """Adds the gradients of slots to those of the first replica, in order."""
        for slot in sorted(slots):
            for part in self._parts.pop(slot, ()):
                state = self._table.state
                pending = self._home.steps.add_part(
                    state.pending, np.int32(slot), *part
                )
                self._table.state = dataclasses.replace(state, pending=pending)


class Replica:
    """One of the further replicas.

    Attributes:
        state: Weights and pending gradients.
        settings: Settings of the slots.
        new: By slot, weights that no microbatch has needed yet.
    """

    settings: SlotSettings

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
        self._base, self._placement = base, stage.placement
        self.state = stage.steps.make_empty()
        self._reference = stage.steps.make_references()
        self._take_settings(table)
        self.new: dict[int, jax.Array] = {}
        self._has_part: set[int] = set()

    @property
    def _whole(self) -> Sharding:
        return self._placement.committed(REPLICATED)

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
        self._take_settings(table)
        if self._reference is not None:
            self._reference.clear(slot)

    def _take_settings(self, table: SlotTable) -> None:
        host = table.settings_on_host()
        self.settings = put(host, self._whole)
        if self._reference is None:  # with these settings, the slots give the base
            base = put(base_settings(host), self._whole)
            self._of_base = dataclasses.replace(base, vera=self.settings.vera)

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot."""
        assert self._reference is not None, "references may be adapters"
        self._reference.load(slot, adapter)

    def take(self, slot: int, row: jax.Array) -> None:
        """Sends a slot's weights, which replace those here when they are needed."""
        self.new[slot] = jax.device_put(one_copy(row), self._whole)

    def _replace(self, slot: int) -> None:
        """Replaces the weights of a slot, and discards its gradients."""
        state = self.state
        params, pending = self._stage.steps.write_weights(
            state.params, state.pending, np.int32(slot), self.new.pop(slot)
        )
        self.state = dataclasses.replace(state, params=params, pending=pending)
        self._has_part.discard(slot)

    def part(self, slot: int) -> Part | None:
        """Sends the gradients of a slot; None if no sample of its batch ran here."""
        if slot not in self._has_part or slot in self.new:
            return None
        part = self._stage.steps.read_part(self.state.pending, np.int32(slot))
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
        steps, state = self._stage.steps, self.state
        (rows,) = one.rows
        if self._placement.mesh is not None:  # else the program uploads them faster
            rows = put(rows, self._placement.sharding(self._placement.rows))
        if one.runs_reference:
            params, settings = state.params, self._of_base
            if self._reference is not None:
                params, settings = self._reference.params, self._reference.settings
            own = SlotKeys(baseline=baseline)
            found = steps.evaluate(self._base, params, settings, rows, own)
            rows = dataclasses.replace(rows, reference_nll=found.nll)
        keys = dataclasses.replace(keys, baseline=baseline)
        args = state.params, state.pending, self.settings, rows, keys
        pending, losses, _ = steps.accumulate(self._base, *args)
        self.state = dataclasses.replace(state, pending=pending)
        self._has_part |= one.slots
        return losses

    def wait(self) -> None:
        """Waits until all queued microbatches have run."""
        jax.block_until_ready(self.state.pending.is_finite)
