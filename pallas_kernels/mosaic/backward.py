"""The end of a backward pass: dx of all projections, with the gradients of A and B."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from jaxlora.pallas_kernels.mosaic.launch import Work
from jaxlora.pallas_kernels.mosaic.products import expand_with_outers
from jaxlora.pallas_kernels.mosaic.ring_shape import STEP
from jaxlora.pallas_kernels.operands import MAX_RANK, padded_rank
from jaxlora.pallas_kernels.parts import Parts


def run_backward(
    expand: Callable[[slice], Work],
    outers: list[tuple[Work, Parts]],
    ranks: list[int],
) -> tuple[Array, list[dict[str, Array]]]:
    """Runs expand and the outer products, as many projections in a launch as fit.

    The stages of the ranks of all projections of a launch must fit into the ring.

    Args:
        expand: Makes the work that sums the terms of some of the projections.
        outers: The work of dB for each projection, then that of dA for all of them.
        ranks: The largest rank of each projection.

    Returns:
        dx [T, K], and for each projection `a` [G, K, R] and `b` [G, R, N], in float32.
    """
    dx, gradients = [], []
    group = MAX_RANK // max(padded_rank(max(ranks)), STEP)
    for first in range(0, len(ranks), group):
        part, computed = expand_with_outers(expand(slice(first, first + group)), outers)
        dx.append(part)
        gradients += computed
        outers = []
    *db, da = gradients
    return functools.reduce(jnp.add, dx), [
        {"a": da_i[:, :, :r], "b": db_i[:, :r]}
        for da_i, (db_i,), r in zip(da, db, ranks, strict=True)
    ]
