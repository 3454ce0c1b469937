"""Launches persistent kernels: one block a multiprocessor, each with many items."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ring import COMPUTE, Ring, RingShape


class Role(Protocol):
    """A kind of work: how an item is loaded and how it is computed."""

    def about(self, item) -> tuple:
        """What to read of device memory before an item starts: a tuple of scalars.

        It is read while the item before is worked on, as such a read takes as long as
        several steps of the ring.
        """
        ...

    def load(self, item, about, step):
        """Fills the stages of an item; returns the next step of the ring."""
        ...

    def compute(self, item, about, step, wg):
        """Computes an item in one warpgroup; returns the next step of the ring."""
        ...


def launch(
    make_role: Callable[..., Role],
    operands: Sequence[jax.Array],
    out_type: jax.ShapeDtypeStruct,
    items: int,
    shape: RingShape,
    *,
    num_sms: int,
    interpret: Any = None,
) -> jax.Array:
    """Runs a kernel that does `items` items, dealt out in turn.

    Args:
        make_role: (ring, references of operands and result) -> the kind of work.
        operands: Arrays in device memory; the first one's dtype is the tiles'.
        out_type: Of the result.
        items: How many.
        shape: Of the ring.
        num_sms: Multiprocessors to use.
        interpret: Parameters of Pallas' GPU interpreter, or None.
    """

    def body(*refs):
        x, w, lines, (out, total), *barriers = refs[len(operands) + 1 :]
        flat = (x, w, lines, out, total, *barriers)
        ring = Ring(shape, *flat)
        role = make_role(ring, *refs[: len(operands) + 1])
        wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
        mine = lax.div(items - 1 - sm + num_sms, jnp.int32(num_sms))

        def each_item(do):
            def one(i, carry):
                step, about = carry
                item = sm + i * num_sms
                following = role.about(jnp.minimum(item + num_sms, items - 1))
                return do(item, about, step), following

            first = role.about(jnp.minimum(sm, items - 1))
            return lax.fori_loop(0, mine, one, (jnp.int32(0), first))[0]

        @pl.when(wg == COMPUTE)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            ring.drain(each_item(role.load))

        @pl.when(wg < COMPUTE)
        def _():
            plgpu.set_max_registers(232, action="increase")
            each_item(lambda item, about, step: role.compute(item, about, step, wg))
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=shape.scratch(operands[0].dtype),
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        interpret=interpret,
    )

    @jax.custom_batching.custom_vmap
    def run(*operands):
        return kernel(*operands)

    @run.def_vmap
    def _(axis_size, in_batched, *operands):
        raise NotImplementedError(
            "vmap of multi_lora_linear(implementation='mosaic'): lay the batch out as "
            "token rows and name each block's adapter in block_adapter instead."
        )

    return run(*operands)
