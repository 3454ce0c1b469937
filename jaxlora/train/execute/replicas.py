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

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.stage_sharding import REPLICATED
from jaxlora.models.forward import Base, JobLosses, SlotKeys
from jaxlora.models.slot_settings import settings_of_base
from jaxlora.sharding.global_arrays import put
from jaxlora.train.execute.feed import ReplicaRows
from jaxlora.train.execute.layout import Layout, Stage, one_copy


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
            number: Replica(number, stage, base, table)
            for number, (stage, base) in enumerate(
                zip(layout.further, bases, strict=True), start=1
            )
        }
        # By slot, gradients that the first replica is to add, in the order of the
        # replicas, and whether they are finite.
        self._parts: dict[int, list[tuple[jax.Array, jax.Array]]] = defaultdict(list)
        assert self._home.spec.slots is not None
        for slot in range(self._home.spec.slots.num_slots):
            if table.has_job(slot):
                self.copy(slot)

    # ---- slots ---------------------------------------------------------------------

    def copy(self, slot: int) -> None:
        """Gives the replicas what is in a slot now: a job's weights, or none.

        Gradients of the slot that they have are discarded, and its reference is the
        base.
        """
        self._parts.pop(slot, None)
        for replica in self._replicas.values():
            replica.take_settings(self._table)
            if replica.reference is not None:
                replica.reference.clear(slot)
        self.copy_weights([slot])

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot, until `copy` of the slot."""
        for replica in self._replicas.values():
            assert replica.reference is not None, "references may be adapters"
            replica.reference.load(slot, adapter)

    def copy_weights(self, slots: Collection[int]) -> None:
        """Sends the weights of slots to the replicas, which take them when needed."""
        for slot in sorted(slots) if self._replicas else ():
            params = self._table.state.params
            row = self._home.steps.read_slot(params, np.int32(slot))
            for replica in self._replicas.values():
                replica.new[slot] = jax.device_put(one_copy(row), replica.whole)

    def wait(self) -> None:
        """Waits until the replicas have finished all queued work."""
        states = [replica.state for replica in self._replicas.values()]
        jax.block_until_ready([state.pending.is_finite for state in states])

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
                whole = None if baseline is None else one_copy(baseline)
                placed[one.replica] = jax.device_put(whole, replica.whole)
            yield one.slots, replica.run(one, keys, placed[one.replica])

    # ---- gradients -----------------------------------------------------------------

    def send(self, slots: Collection[int]) -> None:
        """Sends the gradients of slots, all of whose samples are queued.

        They leave a replica before it runs its next microbatch. A replica on which no
        sample of a batch ran has none.
        """
        where = self._home.placement.committed(REPLICATED)
        for slot in sorted(slots):
            for replica in self._replicas.values():
                if slot in replica.has_part and slot not in replica.new:
                    read = replica.stage.steps.read_part
                    part = read(replica.state.pending, np.int32(slot))
                    sent = jax.device_put(jax.tree.map(one_copy, part), where)
                    self._parts[slot].append(sent)

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
        stage: The decoder on its devices.
        whole: Placement of an array that is whole on each of them.
        state: Weights and pending gradients.
        reference: Weights and settings of references; None: all are the base.
        new: By slot, weights that no microbatch has needed yet.
        has_part: Slots with gradients of the weights before those.
    """

    def __init__(self, number: int, stage: Stage, base: Base, table: SlotTable):
        """Makes a replica that has no weights of jobs.

        Args:
            number: Its number; the first replica is 0.
            stage: The decoder on its devices.
            base: Weights of the frozen base there.
            table: Slots of the first replica.
        """
        self._number, self.stage, self._base = number, stage, base
        self.whole = stage.placement.committed(REPLICATED)
        self.state = stage.steps.make_empty()
        self.reference = stage.steps.make_references()
        self.take_settings(table)
        self.new: dict[int, jax.Array] = {}
        self.has_part: set[int] = set()

    def take_settings(self, table: SlotTable) -> None:
        """Takes the settings of the slots from the first replica."""
        host = table.settings_on_host()
        self._settings = put(host, self.whole)
        if self.reference is None:  # with these settings, the slots give the base
            base = settings_of_base(host, self._settings)
            self._of_base = put(base, self.whole)

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
            for slot in sorted(one.slots & self.new.keys()):
                self._replace(slot)
            return self._run(one, dataclasses.replace(keys, baseline=baseline))
        except jax.errors.JaxRuntimeError as error:
            names = ", ".join(sorted(map(str, self.whole.device_set)))
            error.add_note(f"replica {self._number + 1}, on {names}")
            raise

    def _replace(self, slot: int) -> None:
        """Replaces the weights of a slot, and discards its gradients."""
        state = self.state
        params, pending = self.stage.steps.write_weights(
            state.params, state.pending, np.int32(slot), self.new.pop(slot)
        )
        self.state = dataclasses.replace(state, params=params, pending=pending)
        self.has_part.discard(slot)

    def _run(self, one: ReplicaRows, keys: SlotKeys) -> JobLosses:
        steps, state, placement = self.stage.steps, self.state, self.stage.placement
        (rows,) = one.rows
        if placement.mesh is not None:  # else the program uploads them faster
            rows = put(rows, placement.sharding(placement.rows))
        if one.runs_reference:
            if self.reference is None:
                params, settings = state.params, self._of_base
            else:
                params, settings = self.reference.params, self.reference.settings
            own = SlotKeys(baseline=keys.baseline)
            found = steps.evaluate(self._base, params, settings, rows, own)
            rows = dataclasses.replace(rows, reference_nll=found.nll)
        args = state.params, state.pending, self._settings, rows, keys
        pending, losses, _ = steps.accumulate(self._base, *args)
        self.state = dataclasses.replace(state, pending=pending)
        self.has_part |= one.slots
        return losses
