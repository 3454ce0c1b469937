"""Launches persistent kernels: one block a multiprocessor, each with many items."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.mosaic.ring import COMPUTE, Ring, RingShape

# Registers of a thread of the loading warpgroup and of the computing ones. A block
# starts with an equal share for each, in eights, and waits for ever for more than that.
_LOADER, _COMPUTER = 40, 232
_AT_START = 65536 // (128 * (COMPUTE + 1)) // 8 * 8
assert _LOADER + COMPUTE * _COMPUTER <= (COMPUTE + 1) * _AT_START


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
    role: Callable[..., Role],
    operands: dict[str, Any],
    out_types: dict[str, Any],
    items: int,
    shape: RingShape,
    *,
    dtype: DTypeLike,
    num_sms: int,
    interpret: Any = None,
    **settings,
) -> dict[str, Any]:
    """Runs a kernel that does `items` items, dealt out in turn.

    Args:
        role: The kind of work, made of the ring, references of operands and results
            by name, and `settings`.
        operands: Trees of arrays in device memory.
        out_types: Trees of shapes and dtypes.
        items: How many.
        shape: Of the ring.
        dtype: Of the ring's tiles.
        num_sms: Multiprocessors to use.
        interpret: Parameters of Pallas' GPU interpreter, or None.
        **settings: What is known when the kernel is compiled.

    Returns:
        The results by name.
    """
    arrays, tree = jax.tree.flatten(operands)
    types, out_tree = jax.tree.flatten(out_types)

    def body(*refs):
        ins, outs = refs[: len(arrays)], refs[len(arrays) : len(arrays) + len(types)]
        x, w, lines, spare, (out, total), *barriers = refs[len(arrays) + len(types) :]
        ring = Ring(shape, *(x, w, lines, spare, out, total), *barriers)
        named = jax.tree.unflatten(tree, ins) | jax.tree.unflatten(out_tree, outs)
        work = role(ring=ring, **named, **settings)
        wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
        mine = lax.div(items - 1 - sm + num_sms, jnp.int32(num_sms))

        def each_item(do):
            def one(i, carry):
                step, about = carry
                item = sm + i * num_sms
                following = work.about(jnp.minimum(item + num_sms, items - 1))
                return do(item, about, step), following

            first = work.about(jnp.minimum(sm, items - 1))
            return lax.fori_loop(0, mine, one, (jnp.int32(0), first))[0]

        @pl.when(wg == COMPUTE)
        def _():
            plgpu.set_max_registers(_LOADER, action="decrease")
            ring.drain(each_item(work.load))

        @pl.when(wg < COMPUTE)
        def _():
            plgpu.set_max_registers(_COMPUTER, action="increase")
            each_item(lambda item, about, step: work.compute(item, about, step, wg))
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=types,
        scratch_types=shape.scratch(dtype),
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        kernel_name=f"lora_{role.__name__.lower()}",
        interpret=interpret,
    )

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return kernel(*arrays)

    @run.def_vmap
    def _(axis_size, in_batched, *arrays):
        raise NotImplementedError(
            "vmap of multi_lora_linear(implementation='mosaic'): lay the batch out as "
            "token rows and name each block's adapter in block_adapter instead."
        )

    return jax.tree.unflatten(out_tree, run(*arrays))
