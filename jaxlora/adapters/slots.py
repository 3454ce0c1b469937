"""The slots: a fixed set of tables that jobs join and leave without recompiling."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizer import AdapterState, Pending, Tables, zero_state
from jaxlora.adapters.optimizers import OPTIMIZERS, state_names
from jaxlora.adapters.parked_slot import (
    PARAMS,
    Kind,
    ParkedSlot,
    ReadSlot,
    adapter_from_rows,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.hf.names import linear_path
from jaxlora.models.spec import DecoderSpec, SlotSettings
from jaxlora.models.stacks import to_paths
from jaxlora.modules.trained_tensors import unpadded
from jaxlora.sharding.global_arrays import everywhere, put, to_host

Rows = dict[str, Float[Array, "L ..."]]  # of one slot, by name of the stack

# The compiled `read_slot_rows`.
ReadRows = Callable[[Tables, np.int32], jax.Array]
# The compiled `write_slot`.
WriteSlot = Callable[
    [AdapterState, np.int32, dict[Kind, dict[str, np.ndarray]]], AdapterState
]


class SlotTable:
    """The adapters on the device, by slot.

    Attributes:
        state: Adapters and optimizer state of all slots.
        settings: Scaling, dropout and rank of the slots in every adapted linear.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        write_slot: WriteSlot,
        placement: StageSharding = ONE_DEVICE,
        *,
        read_slot: ReadRows | None = None,
        empty: Callable[[], AdapterState] | None = None,
    ):
        """Makes empty slots.

        Args:
            spec: The decoder, or one stage of it.
            write_slot: The compiled function `write_slot` of the decoder.
            placement: Where the slots live.
            read_slot: The compiled `read_slot_rows`; None: it is compiled here.
            empty: Makes the state of empty slots; None: `zero_state` does.
        """
        self._spec, self._write_slot = spec, write_slot
        self._read_slot = read_slot or jax.jit(read_slot_rows)
        self._placement = placement
        assert spec.slots is not None
        num_slots = spec.slots.num_slots
        if empty is None:
            shapes, optimizers = spec.adapter_shapes(), spec.slots.optimizers
            self.state = zero_state(shapes, num_slots, placement, optimizers)
        else:
            self.state = empty()
        self._places = {path: i for i, path in enumerate(spec.adapted)}
        shape = len(self._places), num_slots
        self._host_settings = SlotSettings(
            scaling=np.zeros(shape, np.float32),
            dropout=np.zeros(shape, np.float32),
            rank=np.zeros(shape, np.int32),
        )
        self._upload_settings()
        # Shapes of each slot's tensors without their padding, by path, and the state
        # tensors of its optimizer.
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._state_names: dict[int, tuple[str, ...]] = {}

    @property
    def kept(self) -> dict[Kind, Tables]:
        """The tables that outlast a global batch, in a fixed order."""
        states = sorted(self.state.optimizer_state.items())
        return {PARAMS: self.state.params, **dict(states)}

    def load(self, slot: int, adapter: Adapter, optimizer: str) -> None:
        """Puts an adapter into a slot, with empty optimizer state.

        Args:
            slot: An empty slot.
            adapter: The adapter.
            optimizer: Name of its optimizer, which is one of the run's.
        """
        self._write(slot, {PARAMS: adapter.by_path()})
        self.activate(slot, adapter, OPTIMIZERS[optimizer].state)

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
        self._write(slot, parked.by_kind())
        self.activate(slot, like, tuple(parked.optimizer_state))

    def activate(
        self, slot: int, adapter: Adapter, state_names: tuple[str, ...]
    ) -> None:
        """Sets a slot's scaling, dropout and state tensors; its weights stay."""
        self._state_names[slot] = state_names
        self._shapes[slot] = {p: array.shape for p, array in adapter.by_path().items()}
        self._clear_settings(slot)
        for name, weights in adapter.modules.items():
            place = self._places[linear_path(name)], slot
            self._host_settings.scaling[place] = adapter.scaling(weights)
            self._host_settings.dropout[place] = adapter.dropout
            self._host_settings.rank[place] = weights.rank
        self._upload_settings()

    def has_job(self, slot: int) -> bool:
        """Whether a slot has an adapter in it."""
        return slot in self._shapes

    def clear(self, slot: int) -> None:
        """Empties a slot: weights, optimizer state and settings."""
        self._write(slot, {})
        self._shapes.pop(slot, None)
        self._state_names.pop(slot, None)
        self._clear_settings(slot)
        self._upload_settings()

    def read(self, slot: int, like: Adapter) -> Adapter:
        """Returns the adapter in a slot, with the modules and ranks of `like`."""
        rows = self._rows(slot, (PARAMS,))
        return adapter_from_rows(rows[PARAMS], like)

    def copy(self, slot: int) -> ParkedSlot:
        """Returns the state of a slot, between two global batches; the slot keeps it.

        Raises:
            ValueError: The slot is empty.
        """
        if slot not in self._shapes:
            raise ValueError(f"slot {slot} is empty.")
        shapes, names = self._shapes[slot], self._state_names[slot]
        rows = self._rows(slot, (PARAMS, *names))

        def own(padded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {p: np.array(padded[p][unpadded(s)]) for p, s in shapes.items()}

        return ParkedSlot.of({kind: own(rows[kind]) for kind in (PARAMS, *names)})

    def snapshot(self) -> ReadSlot:
        """Copies all slots to the host, between two global batches; see `ReadSlot`."""
        stacks, shapes = self._spec.stacks, dict(self._shapes)
        names = {slot: (PARAMS, *of) for slot, of in self._state_names.items()}
        tables = to_host(self.kept)

        def read(slot: int) -> ParkedSlot:
            if slot not in shapes:
                raise ValueError(f"slot {slot} is empty.")
            tensors = {}
            for kind in names[slot]:
                rows = {
                    name: np.asarray(table)[slot]
                    for name, table in tables[kind].items()
                }
                paths = to_paths(stacks, rows, axis=0)
                tensors[kind] = {
                    p: paths[p][unpadded(s)] for p, s in shapes[slot].items()
                }
            return ParkedSlot.of(tensors)

        return read

    def _rows(
        self, slot: int, kinds: Sequence[Kind]
    ) -> dict[Kind, dict[str, np.ndarray]]:
        """Reads the tensors of a slot, by kind and path, with their padding."""
        if not self._spec.stacks:
            return {kind: {} for kind in kinds}
        kept, number = self.kept, np.int32(slot)
        # One program reads all kinds, which have the same shapes.
        flat_kinds = jax.device_get(
            everywhere([self._read_slot(kept[kind], number) for kind in kinds])
        )
        shapes = self._stack_shapes()
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
        return {
            kind: to_paths(
                self._spec.stacks,
                {
                    name: part.reshape(shape)
                    for (name, shape), part in zip(
                        shapes.items(), np.split(flat, ends[:-1]), strict=True
                    )
                },
                axis=0,
            )
            for kind, flat in zip(kinds, flat_kinds, strict=True)
        }

    def _stack_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a slot's rows in each stack, by name, in the order of the names."""
        shapes = self._spec.adapter_shapes()
        return {name: shapes[name].shape[1:] for name in sorted(shapes)}

    def _write(
        self, slot: int, tensors: Mapping[Kind, Mapping[str, np.ndarray]]
    ) -> None:
        """Writes tensors by path, without padding; what is not given becomes zero."""
        shapes, kinds = self._stack_shapes(), tuple(self.kept)
        if unknown := sorted(tensors.keys() - set(kinds)):
            raise ValueError(f"the slots have no state {unknown[0]!r} of an optimizer.")
        # One of the sets of kinds in `row_shapes`, each of which has a program.
        written = kinds if len(tensors) > 1 else tuple(tensors)
        rows: dict[Kind, dict[str, np.ndarray]] = {}
        for kind in written:
            rows[kind] = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
            tables = to_paths(self._spec.stacks, rows[kind], axis=0)  # views
            for path, tensor in tensors.get(kind, {}).items():
                tables[path][unpadded(tensor.shape)] = tensor
        self.state = self._write_slot(self.state, np.int32(slot), rows)

    def _clear_settings(self, slot: int) -> None:
        for values in jax.tree.leaves(self._host_settings):
            values[:, slot] = 0

    def _upload_settings(self) -> None:
        # The arrays are copied, as a pending upload may read or share their memory.
        copies = jax.tree.map(np.copy, self._host_settings)
        where = self._placement.sharding(self._placement.by_linear_and_slot)
        self.settings: SlotSettings = put(copies, where)


def row_shapes(
    spec: DecoderSpec,
) -> dict[str, dict[Kind, dict[str, jax.ShapeDtypeStruct]]]:
    """Returns the shapes of what `write_slot` writes, by what is done to the slot.

    A slot is emptied, started with weights alone, or restored with all its state.

    Args:
        spec: The decoder, or one stage of it.
    """
    rows = {
        name: jax.ShapeDtypeStruct(shape.shape[1:], jnp.float32)
        for name, shape in spec.adapter_shapes().items()
    }
    assert spec.slots is not None
    kinds = PARAMS, *state_names(spec.slots.optimizers)
    return {
        "starting a job": {PARAMS: rows},
        "emptying a slot": {},
        "restoring a job": dict.fromkeys(kinds, rows),
    }


def write_slot(
    state: AdapterState, slot: Int[Array, ""], rows: dict[Kind, Rows]
) -> AdapterState:
    """Replaces the state of a slot, and discards its pending gradients.

    Args:
        state: All slots.
        slot: Number of the slot, int32.
        rows: Weights and optimizer state of the slot, by kind, for each stack. Kinds
            that are absent become zero, without a copy from the host.
    """

    def written(tables: Tables, kind: Kind) -> Tables:
        new = rows.get(kind, dict.fromkeys(tables, 0.0))
        return {name: _with_row(t, slot, new[name]) for name, t in tables.items()}

    pending = state.pending
    # On several devices, pending gradients have a first axis of devices.
    axis = pending.is_finite.ndim - 1
    gradients = {n: _with_row(t, slot, 0, axis) for n, t in pending.gradients.items()}
    return AdapterState(
        params=written(state.params, PARAMS),
        optimizer_state={
            name: written(tables, name)
            for name, tables in state.optimizer_state.items()
        },
        pending=Pending(
            gradients=gradients,
            is_finite=_with_row(pending.is_finite, slot, True, axis),
        ),
    )


def _with_row(
    table: Shaped[Array, "..."],
    slot: Int[Array, ""],
    row: Shaped[Array, "..."] | float,
    axis: int = 0,
) -> Shaped[Array, "..."]:
    """Replaces a slot's row; `table.at[slot].set(row)` would be four times the work."""
    shape = (*table.shape[:axis], 1, *table.shape[axis + 1 :])
    rows = jnp.broadcast_to(jnp.asarray(row, table.dtype), shape)
    start = [0] * axis + [slot] + [0] * (table.ndim - axis - 1)
    return jax.lax.dynamic_update_slice(
        table, rows, start, allow_negative_indices=False
    )


def read_slot_rows(tables: Tables, slot: Int[Array, ""]) -> Float[Array, " N"]:
    """Concatenates a slot's rows of a kind, as many small transfers are slow."""
    return jnp.concatenate([tables[name][slot].ravel() for name in sorted(tables)])
