"""Launches persistent kernels: one block a multiprocessor, each with many items."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxlora.pallas_kernels.mosaic.mask import Mask
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE, Ring, RingShape
from jaxlora.pallas_kernels.settings import KernelSettings

# Registers per thread of the loading warpgroup and of the computing ones. A block
# starts with equal shares, in multiples of 8. Requests beyond their sum block forever.
_LOADER, _COMPUTER = 40, 232
_AT_START = 65536 // (128 * (COMPUTE + 1)) // 8 * 8
# All layouts in the kernels are given explicitly. Inferring them would take twice as
# long as the rest of lowering, and would not make the kernels faster.
_SEMANTICS = plgpu.LoweringSemantics.Lane
assert _LOADER + COMPUTE * _COMPUTER <= (COMPUTE + 1) * _AT_START


@runtime_checkable
class Role(Protocol):
    """A kind of work: how an item is loaded and how it is computed."""

    @property
    def ring(self) -> Ring:
        """Shared memory."""
        ...

    def about(self, item) -> tuple:
        """Prefetches scalars from device memory before an item starts; a tuple.

        They are read while the previous item is computed, because such a read takes as
        long as several steps of the ring.
        """
        ...

    def load(self, index, item, about, step):
        """Fills the stages of an item; returns the next step of the ring.

        The index counts the items of this multiprocessor.
        """
        ...

    def compute(self, item, about, step, wg):
        """Computes an item in one warpgroup; returns the next step of the ring."""
        ...


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands"],
    meta_fields=["role", "out_types", "items", "beside", "ring", "settings"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Items of one kind. A kernel is compiled from all fields but the operands.

    Attributes:
        role: The kind, made of the ring, references of operands and results by name,
            and `settings`.
        operands: Trees of arrays in device memory, by name.
        out_types: (name, tree of shapes and dtypes) of each result.
        items: Number of items.
        beside: Number of items, the first ones, that run on the side multiprocessors.
        ring: Shape of the ring in shared memory.
        settings: (name, value) of the compile-time settings.
    """

    role: Callable[..., Role]
    operands: dict[str, Any]
    out_types: tuple[tuple[str, Any], ...]
    items: int
    beside: int = 0
    ring: RingShape
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return self.role.__name__.lower()


@dataclasses.dataclass(frozen=True)
class _Deal:
    """The items of one multiprocessor: `count` of them, from `first` on."""

    first: Any
    stride: Any
    count: Any


def _deal(work: Work, sm, num_sms: int, apart: int) -> _Deal:
    """Deals items round-robin; side items among the last `apart` multiprocessors."""
    main = num_sms - apart
    is_apart = sm >= main
    begin = jnp.where(is_apart, 0, work.beside)
    end = jnp.where(is_apart, work.beside, work.items)
    stride = jnp.where(is_apart, max(apart, 1), main)
    first = begin + jnp.where(is_apart, sm - main, sm)
    count = lax.div(jnp.maximum(end - first, 0) + stride - 1, stride)
    return _Deal(first, stride, count)


def _each_item(work: Work, role: Role, deal: _Deal, do):
    """Calls `do(index, item, about, step)` for each item; returns the steps taken."""

    def read(item):
        return role.about(jnp.minimum(item, work.items - 1))

    def one(i, carry):
        step, about = carry
        item = deal.first + i * deal.stride
        following = read(item + deal.stride)
        return do(i, item, about, step), following

    start = jnp.int32(0), read(deal.first)
    return lax.fori_loop(0, deal.count, one, start)[0]


def launch(
    works: Sequence[Work],
    *,
    dtype: DTypeLike,
    num_sms: int,
    apart: int = 0,
    interpret: Any = None,
) -> list[dict[str, Any]]:
    """Runs a kernel that processes each work's items, one work after the other.

    It is traced and compiled once for all calls with works of like shapes. An array
    that several operands share is one operand of the kernel: XLA's compile time grows
    with their number.

    Args:
        works: The works. A multiprocessor goes on to the next work as soon as its own
            items are done, so no work may depend on the results of another.
        dtype: Dtype of the rings' tiles.
        num_sms: Number of multiprocessors to use.
        apart: Number of side multiprocessors, which run only the works' side items.
        interpret: Parameters of Pallas' GPU interpreter, or None.

    Returns:
        The results of each work, by name.
    """
    arrays, tree = jax.tree.flatten(list(works))
    shared = {id(array): array for array in arrays}
    place = {key: i for i, key in enumerate(shared)}
    return _launch(
        list(shared.values()),
        tree=tree,
        places=tuple(place[id(array)] for array in arrays),
        dtype=dtype,
        num_sms=num_sms,
        apart=apart,
        interpret=interpret,
    )


@functools.partial(
    jax.jit,
    static_argnames=("tree", "places", "dtype", "num_sms", "apart", "interpret"),
)
def _launch(
    ins: list[jax.Array],
    *,
    tree: Any,
    places: tuple[int, ...],
    dtype: DTypeLike,
    num_sms: int,
    apart: int,
    interpret: Any,
) -> list[dict[str, Any]]:
    """The kernel of `tree`'s works, whose i-th operand is the places[i]-th array."""
    works: list[Work] = jax.tree.unflatten(tree, [ins[i] for i in places])
    in_tree = jax.tree.structure([work.operands for work in works])
    types, out_tree = jax.tree.flatten([dict(work.out_types) for work in works])

    def body(*refs):
        outs = jax.tree.unflatten(out_tree, refs[len(ins) : len(ins) + len(types)])
        stages, barriers, done = refs[len(ins) + len(types) :]
        operands = jax.tree.unflatten(in_tree, [refs[i] for i in places])
        wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
        todo = []
        for i, work in enumerate(works):
            ring = Ring(work.ring, *stages[i], *barriers[i])
            named = _here(operands[i]) | outs[i] | dict(work.settings)
            deal = _deal(work, sm, num_sms, apart)
            todo.append((work, work.role(ring=ring, **named), deal))

        @pl.when(wg == COMPUTE)
        def _():
            plgpu.set_max_registers(_LOADER, action="decrease")
            for i, (work, role, deal) in enumerate(todo):
                if i:
                    plgpu.barrier_wait(done.at[i - 1])
                steps = _each_item(work, role, deal, role.load)
                role.ring.drain(steps, deal.count)

        @pl.when(wg < COMPUTE)
        def _():
            plgpu.set_max_registers(_COMPUTER, action="increase")
            for i, (work, role, deal) in enumerate(todo):

                def compute(index, item, about, step, role=role):
                    del index
                    return role.compute(item, about, step, wg)

                _each_item(work, role, deal, compute)
                plgpu.wait_smem_to_gmem(0)
                if i + 1 < len(todo):  # the rings share their memory
                    plgpu.barrier_arrive(done.at[i])
                    plgpu.barrier_wait(done.at[i])

    tiles = [work.ring.tiles(dtype) for work in works]
    kernel = plgpu.kernel(
        body,
        out_type=types,
        scratch_types=[
            tiles if len(tiles) == 1 else plgpu.RefUnion(*tiles),
            [work.ring.barriers() for work in works],
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=max(len(works) - 1, 1)),
        ],
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        kernel_name="_".join(["lora", *dict.fromkeys(work.name for work in works)]),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=_SEMANTICS),
    )

    return jax.tree.unflatten(out_tree, _without_vmap(kernel)(*ins))


def _here(operands: dict[str, Any]) -> dict[str, Any]:
    """Selects this projection's masks and settings.

    Their indices are read once per kernel instead of once per item.
    """
    is_shared = lambda x: isinstance(x, Mask | KernelSettings)
    one = lambda x: x.here() if is_shared(x) else x
    return jax.tree.map(one, operands, is_leaf=is_shared)


def _without_vmap(kernel: Callable) -> Callable:
    """Makes the kernel raise an error under vmap that says what to do instead."""

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return kernel(*arrays)

    @run.def_vmap
    def _(axis_size, in_batched, *arrays):
        raise NotImplementedError(
            "vmap of multi_lora_linear(implementation='mosaic'): lay the batch out as "
            "token rows and name each block's adapter in block_adapter instead."
        )

    return run
