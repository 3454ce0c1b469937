"""Sums a slot's pending gradients over the devices that have a part of them.

The devices of a mesh do so in one program (`exchange`). Replicas on devices of their
own run no program together: each hands its part of a slot to the replica that takes the
step (`read_part`), which adds the parts in the order of the replicas (`add_part`), and
hands out the new weights (`write_weights`).
"""

import functools
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from jaxlora.adapters.division import WHOLE, Axes
from jaxlora.adapters.optimizer import Pending
from jaxlora.adapters.optimizers.state import Tables
from jaxlora.adapters.stage_sharding import StageSharding
from jaxlora.sharding.rules import TENSOR
from jaxlora.sharding.tensor import counted_once, gathered, own_part


def exchanged_slots(slots: Collection[int], placement: StageSharding) -> list[np.int32]:
    """Returns the argument `slot` of each call of `exchange` before an optimizer step.

    Args:
        slots: The slots that step.
        placement: The devices of the stage; a single one exchanges nothing.
    """
    return [] if placement.num_devices == 1 else list(map(np.int32, sorted(slots)))


def exchange(
    pending: Pending,
    slot: Int[Array, ""],
    *,
    axes: Sequence[str],
    whole_axes: Sequence[str] = (),
    divided: Collection[str] = (),
    divided_axes: Sequence[str] = (),
) -> Pending:
    """Gives every device the sum of a slot's pending gradients over all devices.

    A device has all of the gradient of its own part of a divided table. Of a table that
    is whole on each device, it has a term.

    It takes one slot, and the host calls it for each slot that steps. In a program that
    chooses slots itself, by a loop or a condition, XLA would let the host wait for a
    GPU's choice, and so for all work that is queued before it.

    Args:
        pending: Gradients of this device, 1 G ...
        slot: Number of the slot, int32.
        axes: Axes of the mesh whose devices have microbatches of their own.
        whole_axes: Further axes over which tables are summed that are not divided.
        divided: Names of the tables of which a device has a part.
        divided_axes: Axes over which these are summed.
    """
    rows = jax.tree.map(lambda x: x[0, slot], pending)
    own = {name: x for name, x in rows.gradients.items() if name in divided}
    whole = {name: x for name, x in rows.gradients.items() if name not in divided}
    is_finite = rows.is_finite
    if axes:
        is_finite = jax.lax.all_gather(is_finite, tuple(axes)).all()
    new = Pending(
        gradients=_sums(own, divided_axes) | _sums(whole, (*axes, *whole_axes)),
        is_finite=is_finite,
    )

    def written(all_slots: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(all_slots, new[None], slot, axis=1)

    return jax.tree.map(written, pending, new)


def _sums(tables: Tables, axes: Sequence[str]) -> Tables:
    if not axes:
        return tables
    flat, to_tables = ravel_pytree(tables)
    return to_tables(_sum(flat, axes))


def _sum(flat: Float[Array, " N"], axes: Sequence[str]) -> Float[Array, " N"]:
    """Sums an array over devices in their order; each one sums a chunk of it.

    A sum in a fixed order gives the same bits twice. A ring's depends on its size.
    """
    if not flat.size:  # a stage without adapted linears
        return flat
    parts = jax.lax.axis_size(tuple(axes))
    chunks = jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)
    mine = jax.lax.all_to_all(chunks, tuple(axes), split_axis=0, concat_axis=0)
    total = functools.reduce(jnp.add, list(mine))
    return jax.lax.all_gather(total, tuple(axes), tiled=True)[: flat.size]


# ---- replicas ------------------------------------------------------------------------
#
# Replicas may divide tables along `tensor`, each among its own number of devices. What
# they send is whole, as one array, because many are slow to send. These functions run
# on each device of a replica; those with a mesh have a first axis of gradients, of
# size 1.


def read_part(
    pending: Pending,
    slot: Int[Array, ""],
    *,
    whole_axes: Sequence[str] = (),
    divided: Axes = WHOLE.weights,
) -> tuple[Float[Array, " N"], Bool[Array, ""]]:
    """Returns a replica's gradients of a slot as one array.

    Args:
        pending: Gradients of all slots.
        slot: Number of the slot, int32.
        whole_axes: Axes of the mesh over which tables are summed that are not divided.
        divided: Axis of the features, of tables that are divided over them.

    Returns:
        The gradients, and whether they are finite.
    """
    rows = jax.tree.map(lambda x: _slot_row(x, slot, pending), pending)
    each = rows.gradients
    own = {n: gathered(each[n], axis - 1) for n, axis in divided.items()}
    whole = {n: x for n, x in each.items() if n not in divided}
    flat, _ = ravel_pytree(own | _sums(whole, whole_axes))
    return flat, rows.is_finite


def add_part(
    pending: Pending,
    slot: Int[Array, ""],
    flat: Float[Array, " N"],
    is_finite: Bool[Array, ""],
    *,
    num_tensor: int = 1,
    divided: Axes = WHOLE.weights,
) -> Pending:
    """Adds another replica's gradients of a slot to the pending ones, in float32.

    A device adds its part of a divided table. The devices have terms of the others, so
    the first one adds those.

    Args:
        pending: Gradients of all slots.
        slot: Number of the slot, int32.
        flat: What `read_part` has returned on the other replica.
        is_finite: Likewise.
        num_tensor: Number of devices of the replica.
        divided: See `read_part`.
    """
    rows = jax.tree.map(lambda x: _slot_row(x, slot, pending), pending)
    parts = _own_rows(flat, rows.gradients, divided)
    for name in parts.keys() - divided.keys():
        parts[name] = counted_once(parts[name], num_tensor)
    new = Pending(
        gradients={n: x + parts[n] for n, x in rows.gradients.items()},
        is_finite=rows.is_finite & is_finite,
    )
    return _with_rows(pending, slot, new)


def write_weights(
    params: Tables,
    pending: Pending,
    slot: Int[Array, ""],
    flat: Float[Array, " N"],
    *,
    divided: Axes = WHOLE.weights,
) -> tuple[Tables, Pending]:
    """Replaces the weights of a slot on a replica, and discards its gradients.

    Args:
        params: Weights of all slots.
        pending: Gradients of all slots.
        slot: Number of the slot, int32.
        flat: What `read_slot_rows` has returned on the replica that has stepped.
        divided: See `read_part`.
    """
    old = {name: x[slot] for name, x in params.items()}
    rows = _own_rows(flat, old, divided)
    none = Pending(
        gradients={n: jnp.zeros_like(x) for n, x in old.items()},
        is_finite=jnp.ones((), jnp.bool_),
    )
    write = lambda x, row: jax.lax.dynamic_update_index_in_dim(x, row, slot, axis=0)
    return jax.tree.map(write, params, rows), _with_rows(pending, slot, none)


def _own_rows(flat: Float[Array, " N"], like: Tables, divided: Axes) -> Tables:
    """Cuts an array into whole tables of a slot; returns this device's parts of them.

    Args:
        flat: The tables, in the order of their names.
        like: This device's parts of the tables.
        divided: See `read_part`.
    """
    rows, first = {}, 0
    for name in sorted(like):
        shape, axis = list(like[name].shape), None
        if name in divided:
            axis = divided[name] - 1
            shape[axis] *= jax.lax.axis_size(TENSOR)
        size = math.prod(shape)
        row = flat[first : first + size].reshape(shape)
        rows[name] = row if axis is None else own_part(row, axis)
        first += size
    return rows


def _slot_row(x: jax.Array, slot: jax.Array, pending: Pending) -> jax.Array:
    return x[slot] if pending.is_finite.ndim == 1 else x[0, slot]


def _with_rows(pending: Pending, slot: jax.Array, rows: Pending) -> Pending:
    axis = pending.is_finite.ndim - 1

    def written(table: jax.Array, row: jax.Array) -> jax.Array:
        row = row if axis == 0 else row[None]
        return jax.lax.dynamic_update_index_in_dim(table, row, slot, axis)

    return jax.tree.map(written, pending, rows)
