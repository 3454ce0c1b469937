"""Exchanges of the devices that share the experts of a layer (expert parallelism).

Each device has microbatches of its own, and E / n of the experts, with their adapters.
It runs these for the rows of all n devices: `to_experts` comes before its experts, and
`from_experts` after them. Each is the transpose of the other. Rows lie in the order of
the devices, and what devices add to a row is summed in that order, in float32.

An adapter of an expert has all rows of a tick on one device, so its gradient is summed
over no further device along the axis.

All functions run inside `jax.shard_map`, which must be manual over the axis `expert`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxlora.sharding.rules import EXPERT
from jaxlora.sharding.tensor import gathered, with_transpose


def all_rows(x: Shaped[Array, "T ..."]) -> Shaped[Array, "S ..."]:
    """Joins the rows of all devices, without a gradient."""
    return gathered(x, axis=0, over=EXPERT)


def first_expert(num_held: int) -> Int[Array, ""]:
    """Returns the number of the first expert of this device.

    Args:
        num_held: Number of experts on each device.
    """
    return jax.lax.axis_index(EXPERT) * num_held


def _summed(y: Shaped[Array, "S ..."]) -> Shaped[Array, "T ..."]:
    """Returns the sums of what all devices have for the rows of this one."""
    parts = jax.lax.all_to_all(y, EXPERT, split_axis=0, concat_axis=0, tiled=True)
    num_devices = jax.lax.axis_size(EXPERT)
    terms = parts.reshape(num_devices, -1, *y.shape[1:]).astype(jnp.float32)
    return functools.reduce(jnp.add, list(terms)).astype(y.dtype)


# Rows of all devices; what each device adds to a gradient is summed.
to_experts = with_transpose(all_rows, _summed)
# Sums of what all devices add to the own rows.
from_experts = with_transpose(_summed, all_rows)
