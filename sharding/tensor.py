"""Exchanges of the devices that share the features of a layer (tensor parallelism).

Each device has a part of the heads and of the MLP's features. Between the halves of a
layer, it has a part of the rows: `gather_rows` comes before the linears whose outputs
are divided, and `scatter_rows` after those whose inputs are. Each is the transpose of
the other, so a half layer has an all-gather and a reduce-scatter in each pass. They are
g and its conjugate of Megatron-LM (arXiv 2205.05198, section 4.2.2), and move as much
as an all-reduce. The transpose of `jax.lax.psum` would add the gradient once more for
each device, where `jax.shard_map` does not check which values vary.

All functions run inside `jax.shard_map`, which must be manual over the axis `tensor`,
unless the number of devices is 1.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxlora.sharding.rules import TENSOR


def gather_rows(x: Shaped[Array, "..."], num_devices: int) -> Shaped[Array, "..."]:
    """Joins the rows of all devices; what each device adds to a gradient is summed.

    Args:
        x: The rows of this device.
        num_devices: Number of devices.
    """
    return x if num_devices == 1 else _gather_rows(x)


def scatter_rows(x: Shaped[Array, "..."], num_devices: int) -> Shaped[Array, "..."]:
    """Sums x over the devices; each gets its own part of the rows.

    Args:
        x: A term of each row.
        num_devices: Number of devices.
    """
    return x if num_devices == 1 else _scatter_rows(x)


def whole_rows(x: Shaped[Array, "..."], num_devices: int) -> Shaped[Array, "..."]:
    """Joins the rows of all devices, which then compute the same gradient of them."""
    return x if num_devices == 1 else _whole_rows(x)


def with_transpose(
    run: Callable[[Any], Any], transpose: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Returns a function whose gradient is that of its result, transposed."""
    made = jax.custom_vjp(run)
    made.defvjp(lambda x: (run(x), None), lambda _, dy: (transpose(dy),))
    return made


def _joined(x):
    return gathered(x, axis=0)


def _scattered(x):
    return jax.lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True)


_gather_rows = with_transpose(_joined, _scattered)
_scatter_rows = with_transpose(_scattered, _joined)
_whole_rows = with_transpose(_joined, lambda dy: own_part(dy, axis=0))
_sum_out = with_transpose(lambda x: jax.lax.psum(x, TENSOR), lambda dy: dy)


def sum_out[T](x: T, num_devices: int) -> T:
    """Returns the sum of arrays over the devices; a term's gradient is that of it."""
    return x if num_devices == 1 else _sum_out(x)


def counted_once(x: Shaped[Array, "..."], num_devices: int) -> Shaped[Array, "..."]:
    """Returns x on the first device and zero on others: a term of a sum over them."""
    if num_devices == 1:
        return x
    return jnp.where(jax.lax.axis_index(TENSOR) == 0, x, jnp.zeros_like(x))


def trained_once(x: Shaped[Array, "..."], num_devices: int) -> Shaped[Array, "..."]:
    """Returns x, whose gradient is zero on all devices but the first.

    It is for weights that all devices use alike, as gradients are summed over them.
    """
    if num_devices == 1:
        return x
    is_first = jax.lax.axis_index(TENSOR) == 0
    return jnp.where(is_first, x, jax.lax.stop_gradient(x))


def first_index(size: int, num_devices: int) -> Int[Array, ""] | int:
    """Returns the index of this device's first feature among those of all devices.

    Args:
        size: Number of features on each device.
        num_devices: Number of devices.
    """
    return 0 if num_devices == 1 else jax.lax.axis_index(TENSOR) * size


def own_indices(
    indices: Int[Array, " T"], size: int, num_devices: int
) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
    """Returns indices into this device's part of a table, and which of them are in it.

    Those that are not in it become some index that is.

    Args:
        indices: Indices into the whole table.
        size: Rows of the table on each device.
        num_devices: Number of devices.
    """
    own = indices - first_index(size, num_devices)
    return jnp.clip(own, 0, size - 1), (own >= 0) & (own < size)


def own_slice(
    x: Shaped[Array, "..."], axis: int, num_parts: int, num_devices: int
) -> Shaped[Array, "..."]:
    """Returns the part of x that this device uses, where several use the same one.

    Args:
        x: An array, whole on each device.
        axis: The axis that is cut.
        num_parts: Number of parts; divides the number of devices.
        num_devices: Number of devices.
    """
    size = x.shape[axis] // num_parts
    part = jax.lax.axis_index(TENSOR) * num_parts // num_devices
    return jax.lax.dynamic_slice_in_dim(x, part * size, size, axis)


def own_sections(
    x: Shaped[Array, "..."],
    axis: int,
    sections: Sequence[int],
    num_parts: int,
    num_devices: int,
) -> Shaped[Array, "..."]:
    """Returns the part of each section of x that this device uses, joined.

    Args:
        x: An array, whole on each device.
        axis: The axis that is cut.
        sections: Proportions of the sections of the axis.
        num_parts: Number of parts; divides the number of devices.
        num_devices: Number of devices.
    """
    each = x.shape[axis] // sum(sections)
    ends = [each * end for end in itertools.accumulate(sections)]
    found = jnp.split(x, ends[:-1], axis)
    own = [own_slice(one, axis, num_parts, num_devices) for one in found]
    return jnp.concatenate(own, axis)


def gathered(
    x: Shaped[Array, "..."], axis: int, over: str = TENSOR
) -> Shaped[Array, "..."]:
    """Joins the parts of all devices along an axis of the array.

    Args:
        x: The part of this device.
        axis: The axis.
        over: Axis of the mesh whose devices have the parts.
    """
    return jax.lax.all_gather(x, over, axis=axis, tiled=True)


def own_part(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Returns this device's part of an array that is whole on each device."""
    num_parts = jax.lax.axis_size(TENSOR)
    return own_slice(x, axis, num_parts, num_parts)
