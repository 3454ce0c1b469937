"""The state of slots: empty, written and read by slot, and where it lives."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int, Shaped

from jaxlora.adapters.division import WHOLE, TableDivision
from jaxlora.adapters.optimizer import AdapterState, Pending
from jaxlora.adapters.optimizers.state import (
    Kind,
    Tables,
    started,
    state_shapes,
)
from jaxlora.adapters.optimizers.table import ADAMW
from jaxlora.adapters.parked_slot import (
    PARAMS,
)
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.stacks import Stack, to_paths
from jaxlora.modules.trained_tensors import unpadded


def empty_state(
    shapes: dict[str, jax.ShapeDtypeStruct],
    num_slots: int,
    placement: StageSharding,
    optimizers: Sequence[str],
    division: TableDivision = WHOLE,
) -> AdapterState:
    """Computes the state of empty slots; see `zero_state`."""
    parts = lanes = terms = ()
    if placement.num_devices > 1:
        parts, lanes = (placement.num_parts,), (placement.num_lanes,)
        terms = (placement.num_devices,)

    def zeros(name: str, *axes: int) -> jax.Array:
        return jnp.zeros((*axes, *shapes[name].shape), shapes[name].dtype)

    is_finite = jnp.ones((*lanes, num_slots), jnp.bool_)
    gradients = {
        n: zeros(n, *(parts if n in division.weights else terms)) for n in shapes
    }
    return AdapterState(
        params=zero_tables(shapes),
        optimizer_state={
            kind: {n: jnp.zeros(s.shape, s.dtype) for n, s in tables.items()}
            for kind, tables in state_shapes(optimizers, shapes).items()
        },
        pending=Pending(gradients=gradients, is_finite=is_finite),
    )


def zero_tables(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Tables:
    """Makes weights of zeros, by name of the stack."""
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}


def state_specs(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    placement: StageSharding,
    optimizers: Sequence[str],
    division: TableDivision = WHOLE,
) -> Any:
    """Returns partition specs of the state of slots; see `zero_state`."""
    # With partition specs in the place of arrays.
    state: Any = AdapterState
    states = state_shapes(optimizers, dict(shapes))
    return state(
        params=placement.tables(shapes, division.weights),
        optimizer_state={
            kind: placement.tables(tables, division.states.get(kind, {}))
            for kind, tables in states.items()
        },
        pending=_pending_specs(shapes, placement, division),
    )


def _pending_specs(
    names: Iterable[str], placement: StageSharding, division: TableDivision
) -> Any:
    """Returns partition specs of `Pending`, for stacks of these names."""
    pending: Any = Pending
    gradients = placement.gradients(names, division.weights)
    return pending(gradients=gradients, is_finite=placement.rows)


def zero_state(
    shapes: dict[str, jax.ShapeDtypeStruct],
    num_slots: int,
    placement: StageSharding = ONE_DEVICE,
    optimizers: Sequence[str] = (ADAMW.name,),
) -> AdapterState:
    """Makes empty slots.

    Args:
        shapes: Shapes of the tables, by name.
        num_slots: Number of slots G.
        placement: Where the slots live.
        optimizers: Names of the optimizers of the run.
    """
    return _make_empty(tuple(shapes.items()), num_slots, placement, tuple(optimizers))()


@functools.lru_cache(maxsize=32)
def _make_empty(
    shapes: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    num_slots: int,
    placement: StageSharding,
    optimizers: tuple[str, ...],
) -> Callable[[], AdapterState]:
    make = functools.partial(
        empty_state, dict(shapes), num_slots, placement, optimizers
    )
    specs = state_specs(dict(shapes), placement, optimizers)
    return jax.jit(make, out_shardings=placement.all_committed(specs))


def row_shapes(spec: DecoderSpec) -> dict[str, tuple[Any, ...]]:
    """Returns what `write_slot` takes besides a slot, by what is done to the slot.

    A slot is emptied, started with weights alone, or restored with all its state.

    Args:
        spec: The decoder, or one stage of it.
    """
    assert spec.slots is not None
    tables = spec.adapter_shapes()
    kept = {PARAMS: tables, **state_shapes(spec.slots.optimizers, tables)}
    rows = {
        kind: {n: jax.ShapeDtypeStruct(t.shape[1:], t.dtype) for n, t in own.items()}
        for kind, own in kept.items()
    }
    number = jax.ShapeDtypeStruct((), jnp.int32)
    found: dict[str, tuple[Any, ...]] = {
        "starting a job": ({PARAMS: rows[PARAMS]}, number),
        "emptying a slot": ({},),
    }
    if len(rows) > 1:
        found["restoring a job"] = (rows,)
    return found


def padded_rows(
    stacks: Sequence[Stack],
    tables: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns a slot's rows of tables, for the host to write.

    Args:
        stacks: The stacks that have these tables.
        tables: The tables, or their shapes, by name of the stack.
        tensors: The slot's tensors without padding, by path; those that are absent are
            zero.
    """
    rows = {n: np.zeros(table.shape[1:], table.dtype) for n, table in tables.items()}
    views = to_paths(stacks, rows)
    for path, tensor in tensors.items():
        # The first B is zero, as the rows are. To write it would make the kernel of
        # the host find memory for it, which takes longer than to draw A.
        if tensor.any():
            views[path][unpadded(tensor.shape)] = tensor
    return rows


def write_reference(
    params: Tables, slot: Int[Array, ""], rows: dict[str, Shaped[Array, "L ..."]]
) -> Tables:
    """Replaces the weights of a slot's reference; see `ReferenceTable`.

    Args:
        params: The weights of all slots, by name of the stack.
        slot: Number of the slot, int32.
        rows: The weights of the slot.
    """
    return {name: _with_row(t, slot, rows[name]) for name, t in params.items()}


def write_slot(
    state: AdapterState,
    slot: Int[Array, ""],
    rows: dict[Kind, dict[str, Shaped[Array, "L ..."]]],
    optimizer: Int[Array, ""] | None = None,
    *,
    optimizers: Sequence[str] = (ADAMW.name,),
) -> AdapterState:
    """Replaces the state of a slot, and discards its pending gradients.

    Args:
        state: All slots.
        slot: Number of the slot, int32.
        rows: Weights and optimizer state of the slot, by kind, for each stack. Kinds
            that are absent become zero, without a copy from the host.
        optimizer: Number of the optimizer whose state begins with these weights, int32;
            None: no job begins.
        optimizers: Names of the optimizers of the run.
    """
    if optimizer is not None:
        rows = rows | started(rows[PARAMS], optimizer, optimizers)

    def written(tables: Any, kind: Kind) -> Any:
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


def read_slot_rows(
    tables: dict[str, Shaped[Array, "G L ..."]],
    slot: Int[Array, ""],
    *,
    where: Sharding | None = None,
) -> Shaped[Array, " N"]:
    """Concatenates a slot's rows of a kind, as many small transfers are slow.

    Args:
        tables: The tables of the kind, by name of the stack.
        slot: Number of the slot, int32.
        where: Placement to which the rows are brought first; None: they stay.
    """
    rows = {name: table[slot] for name, table in tables.items()}
    if where is not None:
        rows = jax.lax.with_sharding_constraint(rows, where)
    return jnp.concatenate([rows[name].ravel() for name in sorted(rows)])


def divided_rows(flat: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Divides what `read_slot_rows` has joined, into views of NumPy's arrays.

    Args:
        flat: The rows of a slot, N.
        shapes: Their shapes, by name of the stack.
    """
    rows, start = {}, 0
    for name in sorted(shapes):
        stop = start + math.prod(shapes[name])
        rows[name] = flat[start:stop].reshape(shapes[name])
        start = stop
    return rows
