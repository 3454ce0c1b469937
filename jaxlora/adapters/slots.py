"""The slots: a fixed set of tables that jobs join and leave without recompiling."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizer import AdapterState
from jaxlora.adapters.optimizers.state import (
    Kind,
    Shape,
    States,
    Tables,
    own_shapes,
)
from jaxlora.adapters.optimizers.table import ADAMW, evaluates_other_weights
from jaxlora.adapters.parked_slot import (
    PARAMS,
    ParkedSlot,
    ReadSlot,
    adapter_from_rows,
)
from jaxlora.adapters.reference_table import ReferenceTable
from jaxlora.adapters.settings_table import SettingsTable
from jaxlora.adapters.slot_state import (
    divided_rows,
    padded_rows,
    read_slot_rows,
    zero_state,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.slot_settings import SlotSettings
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import Stack, to_paths
from jaxlora.modules.trained_tensors import unpadded
from jaxlora.sharding.global_arrays import everywhere, to_host

# The compiled `read_slot_rows`.
ReadRows = Callable[[Tables, np.int32], jax.Array]
# The compiled `write_slot`.
WriteSlot = Callable[..., AdapterState]
# Arrays of the host, by name of the stack or by path.
Rows = dict[str, np.ndarray]
# The compiled `evaluation_weights`.
EvaluationWeights = Callable[[Tables, States, np.ndarray], Tables]


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedAdapter:
    """An adapter as `SlotTable.load_padded` writes it.

    Attributes:
        adapter: The adapter, at its own ranks.
        shapes: Shapes of its tensors, by path.
        rows: Its tensors padded to the rank of the slots, by name of the stack.
    """

    adapter: Adapter
    shapes: Mapping[str, Shape]
    rows: Rows


class SlotTable:
    """The adapters on the device, by slot.

    Attributes:
        state: Adapters and optimizer state of all slots.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        write_slot: WriteSlot,
        placement: StageSharding = ONE_DEVICE,
        *,
        read_slot: ReadRows | None = None,
        empty: Callable[[], AdapterState] | None = None,
        evaluation_weights: EvaluationWeights | None = None,
        reference: ReferenceTable | None = None,
    ):
        """Makes empty slots.

        Args:
            spec: The decoder, or one stage of it.
            write_slot: The compiled function `write_slot` of the decoder.
            placement: Where the slots live.
            read_slot: The compiled `read_slot_rows`; None: it is compiled here.
            empty: Makes the state of empty slots; None: `zero_state` does.
            evaluation_weights: The compiled `evaluation_weights`; None: no optimizer
                of the run evaluates other weights than those in training.
            reference: The references of the slots; None: each is the base.
        """
        self._spec, self._write_slot = spec, write_slot
        self._evaluation_weights = evaluation_weights
        self._read_slot = read_slot or jax.jit(read_slot_rows)
        assert spec.slots is not None
        num_slots = spec.slots.num_slots
        if empty is None:
            shapes, optimizers = spec.adapter_shapes(), spec.slots.optimizers
            self.state = zero_state(shapes, num_slots, placement, optimizers)
        else:
            self.state = empty()
        # Shapes of the tables of each kind, which threads may look at.
        self._tables: dict[Kind, dict[str, jax.ShapeDtypeStruct]] = jax.tree.map(
            lambda table: jax.ShapeDtypeStruct(table.shape, table.dtype), self.kept
        )
        self._settings = SettingsTable(spec, placement)
        self._reference = reference
        # By slot: shapes of the tensors of each kind without their padding, by path,
        # and the name of the optimizer.
        self._shapes: dict[int, Mapping[Kind, Mapping[str, Shape]]] = {}
        self._optimizers: dict[int, str] = {}

    @property
    def settings(self) -> SlotSettings:
        """Scaling, dropout and rank of the slots in every adapted linear."""
        return self._settings.settings

    def settings_on_host(self) -> SlotSettings:
        """Returns a copy of the settings, as arrays of the host."""
        return self._settings.on_host()

    @property
    def of_reference(self) -> tuple[Tables, SlotSettings]:
        """Weights and settings with which a program gives the reference of each slot.

        That of a slot is the base, unless `refer` gave it an adapter.
        """
        if self._reference is not None:
            return self._reference.params, self._reference.settings
        return self.state.params, self._settings.of_base

    def refer(self, slot: int, adapter: Adapter) -> None:
        """Makes an adapter the reference of a slot, until the slot is cleared."""
        assert self._reference is not None, "the run has references that are adapters"
        self._reference.load(slot, adapter)

    @property
    def kept(self) -> dict[Kind, Any]:
        """The tables that outlast a global batch, in a fixed order."""
        states = sorted(self.state.optimizer_state.items())
        return {PARAMS: self.state.params, **dict(states)}

    @property
    def row_bytes(self) -> int:
        """Bytes of the weights of a slot."""
        return self._row_bytes(PARAMS)

    @property
    def copy_bytes(self) -> int:
        """Bytes that `begin_reading` queues for a slot at most."""
        assert self._spec.slots is not None
        if any(map(evaluates_other_weights, self._spec.slots.optimizers)):
            return sum(map(self._row_bytes, self._tables))
        return self.row_bytes

    def _row_bytes(self, kind: Kind) -> int:
        tables = self._tables[kind].values()
        return sum(t.size * t.dtype.itemsize // t.shape[0] for t in tables)

    @property
    def weights(self) -> Tables:
        """The weights as they are evaluated, which a step would invalidate."""
        if self._evaluation_weights is None:
            return self.state.params
        assert self._spec.slots is not None
        names = self._spec.slots.optimizers
        number = np.zeros(self._spec.slots.num_slots, np.int32)
        for slot, name in self._optimizers.items():
            number[slot] = names.index(name)
        return self._evaluation_weights(
            self.state.params, self.state.optimizer_state, number
        )

    def pad(self, adapter: Adapter) -> PaddedAdapter:
        """Pads an adapter to the rows of a slot; any thread may call this."""
        tensors = adapter.by_path()
        shapes = {path: array.shape for path, array in tensors.items()}
        return PaddedAdapter(adapter, shapes, self._padded(PARAMS, tensors))

    def flat(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns tensors that are like weights, by path, as `lift` does."""
        rows = self._padded(PARAMS, tensors)
        return np.concatenate([rows[name].ravel() for name in sorted(rows)])

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into a slot, with its optimizer's state at the start.

        Args:
            slot: An empty slot.
            adapter: The adapter.
            optimizer: Name of its optimizer, which is one of the run's.
        """
        self.load_padded(slot, self.pad(adapter), optimizer)

    def load_padded(self, slot: int, padded: PaddedAdapter, optimizer: str) -> None:
        """Does the same with an adapter that `pad` has returned."""
        self._write(slot, {PARAMS: padded.rows}, optimizer)
        self._activate(slot, padded.adapter, padded.shapes, optimizer)

    def restore(self, slot: int, parked: ParkedSlot, like: Adapter) -> None:
        """Puts a parked state into a slot, which need not be the one that it left.

        Args:
            slot: An empty slot.
            parked: The state.
            like: An adapter with the ranks, scalings and dropout of the parked one.

        Raises:
            ValueError: The state has other modules or ranks than `like`, or is of an
                optimizer that is none of the run's.
        """
        parked.check_like(like)
        kinds, kept = parked.by_kind(), self.kept
        if unknown := sorted(k for k in kinds.keys() - kept.keys() if kinds[k]):
            raise ValueError(f"the slots have no state {unknown[0]!r} of an optimizer.")
        written = tuple(kept) if len(kinds) > 1 else tuple(kinds)
        rows = {kind: self._padded(kind, kinds.get(kind, {})) for kind in written}
        self._write(slot, rows, parked.optimizer)
        shapes = {path: array.shape for path, array in parked.params.items()}
        self._activate(slot, like, shapes, parked.optimizer)

    def lift(self, slot: int) -> dict[Kind, jax.Array]:
        """Queues a copy of the rows of a slot by kind, flat and with their padding."""
        number = np.int32(slot)
        return {kind: self._read_slot(own, number) for kind, own in self.kept.items()}

    def adopt(self, slot: int, state: AdapterState, like: Adapter) -> None:
        """Takes a state in which a slot has the rows of an adapter.

        Args:
            slot: The slot.
            state: The state of all slots.
            like: The adapter as it was loaded, which AdamW trains.
        """
        self.state = state
        shapes = {path: array.shape for path, array in like.by_path().items()}
        self._activate(slot, like, shapes, ADAMW.name)

    def unpad(
        self, flat: Mapping[Kind, np.ndarray], like: Adapter
    ) -> dict[Kind, dict[str, np.ndarray]]:
        """Returns rows that `lift` has copied by kind and path, without padding.

        Args:
            flat: The rows; of other kinds, those that are like weights.
            like: The adapter as it was loaded.
        """
        shapes = {path: array.shape for path, array in like.by_path().items()}
        found = {}
        for kind, own in flat.items():
            found[kind] = _own(self._by_path(kind, own), shapes)
        return found

    def _activate(
        self, slot: int, adapter: Adapter, shapes: Mapping[str, Shape], optimizer: str
    ) -> None:
        """Sets a slot's scaling, dropout and optimizer; its weights stay."""
        self._shapes[slot] = {PARAMS: shapes, **own_shapes(optimizer, shapes)}
        self._optimizers[slot] = optimizer
        self._settings.set({slot: adapter})

    def has_job(self, slot: int) -> bool:
        """Whether a slot has an adapter in it."""
        return slot in self._shapes

    def forget(self, slot: int) -> None:
        """Empties a slot, whose rows stay until others are written."""
        self._shapes.pop(slot, None)
        self._optimizers.pop(slot, None)
        self._settings.set({slot: None})

    def clear(self, slot: int) -> None:
        """Empties a slot: weights, optimizer state and settings."""
        self._write(slot, {})
        self.forget(slot)
        if self._reference is not None:
            self._reference.clear(slot)

    def begin_reading(self, slot: int, like: Adapter) -> Callable[[], Adapter]:
        """Queues a copy of the adapter in a slot, as it is evaluated and exported.

        Args:
            slot: A slot, which may change once this has returned.
            like: Adapter whose modules and ranks are taken.

        Returns:
            A function that brings the copy to the host; any thread may call it.
        """
        if evaluates_other_weights(self._optimizers.get(slot, ADAMW.name)):
            copy = self.begin_copy(slot)
            return lambda: copy().adapter(like)
        rows = self._begin_rows(slot, (PARAMS,))
        return lambda: adapter_from_rows(rows()[PARAMS], like)

    def copy(self, slot: int) -> ParkedSlot:
        """Returns the state of a slot, between two global batches; the slot keeps it.

        Raises:
            ValueError: The slot is empty.
        """
        return self.begin_copy(slot)()

    def begin_copy(self, slot: int) -> Callable[[], ParkedSlot]:
        """Queues a copy of the state of a slot, which may change once this returns.

        Returns:
            A function that brings the copy to the host; any thread may call it.

        Raises:
            ValueError: The slot is empty.
        """
        if slot not in self._shapes:
            raise ValueError(f"slot {slot} is empty.")
        shapes, optimizer = self._shapes[slot], self._optimizers[slot]
        begun = self._begin_rows(slot, tuple(shapes))

        def copy() -> ParkedSlot:
            rows = begun()
            kinds = {kind: _own(rows[kind], shapes[kind]) for kind in shapes}
            return ParkedSlot.of(kinds, optimizer)

        return copy

    def snapshot(self) -> ReadSlot:
        """Copies all slots to the host, between two global batches; see `ReadSlot`.

        At the end of a run all are empty, and nothing is copied.
        """
        shapes, optimizers = dict(self._shapes), dict(self._optimizers)
        tables = to_host(self.kept) if shapes else {}

        def read(slot: int) -> ParkedSlot:
            if slot not in shapes:
                raise ValueError(f"slot {slot} is empty.")
            kinds = {}
            for kind, own in shapes[slot].items():
                rows = {n: np.asarray(table)[slot] for n, table in tables[kind].items()}
                kinds[kind] = _own(to_paths(self._stacks(rows), rows), own)
            return ParkedSlot.of(kinds, optimizers[slot])

        return read

    def _stacks(self, rows: Mapping[str, Any]) -> list[Stack]:
        """Returns the stacks that have tables of a kind."""
        return [stack for stack in self._spec.stacks if stack.name in rows]

    def _begin_rows(
        self, slot: int, kinds: Sequence[Kind]
    ) -> Callable[[], dict[Kind, Rows]]:
        """Queues a copy of the tensors of a slot.

        Returns:
            A function that returns them by kind and path, with their padding.
        """
        if not self._spec.stacks:
            return lambda: {kind: {} for kind in kinds}
        kept, number = self.kept, np.int32(slot)
        # One program reads all kinds of the same shapes and dtypes.
        queued = everywhere([self._read_slot(kept[kind], number) for kind in kinds])

        def rows() -> dict[Kind, Rows]:
            flat = zip(kinds, jax.device_get(queued), strict=True)
            return {kind: self._by_path(kind, one) for kind, one in flat}

        return rows

    def _by_path(self, kind: Kind, flat: np.ndarray) -> Rows:
        """Divides what `read_slot_rows` has joined; other kinds are like weights."""
        tables = self._tables.get(kind, self._tables[PARAMS])
        shapes = {name: table.shape[1:] for name, table in tables.items()}
        rows = divided_rows(flat, shapes)
        return to_paths(self._stacks(rows), rows)

    def _padded(self, kind: Kind, tensors: Mapping[str, np.ndarray]) -> Rows:
        """Returns the rows of a slot for tensors by path, and zeros for the others."""
        tables = self._tables[kind]
        return padded_rows(self._stacks(tables), tables, tensors)

    def _write(
        self, slot: int, rows: dict[Kind, Rows], optimizer: str | None = None
    ) -> None:
        """Writes the rows of some kinds, and zeros in the others.

        If weights alone are written, the state of the optimizer begins anew.

        Args:
            slot: The slot.
            rows: Rows of one of the sets of kinds in `row_shapes`, each of which has a
                program.
            optimizer: Name of the optimizer, if the slot gets a job.
        """
        args = self.state, np.int32(slot), rows
        if tuple(rows) == (PARAMS,):
            assert self._spec.slots is not None
            args = *args, np.int32(self._spec.slots.optimizers.index(optimizer))
        self.state = self._write_slot(*args)


def _own(
    padded: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Copies tensors without the padding of smaller ranks."""
    return {path: np.array(padded[path][unpadded(s)]) for path, s in shapes.items()}
