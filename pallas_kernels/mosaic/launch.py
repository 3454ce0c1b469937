"""Launches a persistent kernel that processes the items of several works.

Grid: one program per multiprocessor ("sm"), of three warpgroups ("wg"): two compute,
the last one loads. Each program takes items in turn, first of one work, then of the
next. See docs/hopper_kernels.md.
"""

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

from jaxlora.pallas_kernels.device import traces_shapes_only
from jaxlora.pallas_kernels.mosaic import hopper
from jaxlora.pallas_kernels.mosaic.compile import runnable
from jaxlora.pallas_kernels.mosaic.mask import Mask
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE_WGS, Ring, RingShape
from jaxlora.pallas_kernels.projection import KernelSettings

# Registers per thread of the loading warpgroup and of the computing ones. A block
# starts with equal shares, in multiples of 8. Requests beyond their sum block forever.
_LOADER_REGISTERS, _COMPUTE_REGISTERS = 40, 232
_INITIAL_REGISTERS = 65536 // (128 * (COMPUTE_WGS + 1)) // 8 * 8
# All layouts in the kernels are given explicitly. Inferring them would take twice as
# long as the rest of lowering, and would not make the kernels faster.
_SEMANTICS = plgpu.LoweringSemantics.Lane
assert (
    _LOADER_REGISTERS + COMPUTE_WGS * _COMPUTE_REGISTERS
    <= (COMPUTE_WGS + 1) * _INITIAL_REGISTERS
)


@runtime_checkable
class Role(Protocol):
    """The code of a kind of work: how an item is loaded and how it is computed."""

    @property
    def ring(self) -> Ring:
        """Barriers."""
        ...

    def prefetch(self, item) -> tuple:
        """Reads the scalars in device memory that an item needs before it starts.

        The previous item is still being computed meanwhile: such a read takes as long
        as several steps of the ring.
        """
        ...

    def load(self, index, item, prefetched, step):
        """Fills the stages of an item; returns the next step of the ring.

        The index counts the items of this multiprocessor.
        """
        ...

    def compute(self, item, prefetched, step, wg):
        """Computes an item in one warpgroup; returns the next step of the ring."""
        ...


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands"],
    meta_fields=[
        "role",
        "out_types",
        "num_items",
        "num_side_items",
        "ring",
        "static_args",
        "approx_math",
    ],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Items of one kind. A kernel is compiled from all fields but the operands.

    Attributes:
        role: Makes the role from the ring, the references to its arrays in shared
            memory, to operands and to results, and `static_args`, by name.
        operands: Trees of arrays in device memory, by name. `num_items_gmem`, [1], is
            the number of items if that is known at run time only.
        out_types: (name, tree of shapes and dtypes) of each result.
        num_items: Number of items, or the most of them.
        num_side_items: Number of items, the first ones, that run on the side
            multiprocessors.
        ring: Shape of the ring, and what else is in shared memory.
        static_args: (name, value) of the compile-time arguments.
        approx_math: Whether divisions, exponentials and roots may err by a few units in
            the last place of float32. It holds for all works of a kernel.
    """

    role: Callable[..., Role]
    operands: dict[str, Any]
    out_types: tuple[tuple[str, Any], ...]
    num_items: int
    num_side_items: int = 0
    ring: RingShape
    static_args: tuple[tuple[str, Any], ...] = ()
    approx_math: bool = False

    @property
    def name(self) -> str:
        return self.role.__name__.lower()


@dataclasses.dataclass(frozen=True)
class _ItemRange:
    """The items of one multiprocessor: `count` items from `first`, `stride` apart."""

    first: Any
    stride: Any
    count: Any


def _assign_items(
    work: Work, num_items, sm, num_sms: int, num_side_sms: int
) -> _ItemRange:
    """Assigns items in turn; the last `num_side_sms` programs take the side items."""
    num_main_sms = num_sms - num_side_sms
    is_side = sm >= num_main_sms
    begin = jnp.where(is_side, 0, work.num_side_items)
    end = jnp.where(is_side, work.num_side_items, num_items)
    stride = jnp.where(is_side, max(num_side_sms, 1), num_main_sms)
    first = begin + jnp.where(is_side, sm - num_main_sms, sm)
    count = lax.div(jnp.maximum(end - first, 0) + stride - 1, stride)
    return _ItemRange(first, stride, count)


def _each_item(work: Work, role: Role, items: _ItemRange, do):
    """Calls `do(index, item, prefetched, step)` of each item; returns the next step."""

    def prefetch(item):
        return role.prefetch(jnp.minimum(item, work.num_items - 1))

    def one(i, carry):
        step, prefetched = carry
        item = items.first + i * items.stride
        following = prefetch(item + items.stride)
        return do(i, item, prefetched, step), following

    start = jnp.int32(0), prefetch(items.first)
    return lax.fori_loop(0, items.count, one, start)[0]


def launch(works: Sequence[Work], num_side_sms: int = 0) -> list[dict[str, Any]]:
    """Runs a kernel that processes each work's items, one work after the other.

    It is traced and compiled once for all calls with works of like shapes. An array
    that several operands share is one operand of the kernel: XLA's compile time grows
    with their number.

    Args:
        works: The works. A multiprocessor goes on to the next work as soon as its own
            items are done, so no work may depend on the results of another.
        num_side_sms: Number of side multiprocessors, which run only side items.

    Returns:
        The results of each work, by name.
    """
    if traces_shapes_only():
        types = [dict(work.out_types) for work in works]
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), types)
    arrays, tree = jax.tree.flatten(list(works))
    distinct = {id(array): array for array in arrays}
    index = {key: i for i, key in enumerate(distinct)}
    return _launch(
        list(distinct.values()),
        tree=tree,
        operand_indices=tuple(index[id(array)] for array in arrays),
        num_sms=hopper.num_sms(),
        num_side_sms=num_side_sms,
        interpret=hopper.interpret_params(),
    )


@functools.partial(
    jax.jit,
    static_argnames=(
        "tree",
        "operand_indices",
        "num_sms",
        "num_side_sms",
        "interpret",
    ),
)
def _launch(
    inputs: list[jax.Array],
    *,
    tree: Any,
    operand_indices: tuple[int, ...],
    num_sms: int,
    num_side_sms: int,
    interpret: Any,
) -> list[dict[str, Any]]:
    """Runs the works of `tree`; operand i is the input `operand_indices[i]`."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    kernel = Kernel(
        works=jax.tree.unflatten(tree, [shapes[i] for i in operand_indices]),
        inputs=shapes,
        operand_indices=operand_indices,
        num_sms=num_sms,
        num_side_sms=num_side_sms,
    )
    run = jax.custom_batching.sequential_vmap(runnable(kernel, interpret))
    outs = jax.tree.structure([dict(work.out_types) for work in kernel.works])
    return jax.tree.unflatten(outs, run(*inputs))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """All that a kernel is compiled from; see `launch`.

    Attributes:
        works: The works, whose operands are shapes.
        inputs: Shapes of the kernel's inputs.
        operand_indices: Number of the input that each operand of the works is.
        num_sms: Number of multiprocessors.
        num_side_sms: Number of side multiprocessors.
    """

    works: list[Work]
    inputs: list[jax.ShapeDtypeStruct]
    operand_indices: tuple[int, ...]
    num_sms: int
    num_side_sms: int

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of all results, flat."""
        return jax.tree.leaves([dict(work.out_types) for work in self.works])

    def function(self, interpret: Any = None) -> Callable[..., list[jax.Array]]:
        """Returns the kernel as a function of its inputs, to be traced.

        Args:
            interpret: Parameters of Pallas' GPU interpreter, or None.
        """
        works = self.works
        groups = [group for work in works for group in work.ring.groups()]
        return plgpu.kernel(
            self._body,
            out_type=self.out_types,
            scratch_types={
                "arrays": groups if len(groups) == 1 else plgpu.RefUnion(*groups),
                "barriers": [work.ring.barriers() for work in works],
                "work_done": plgpu.Barrier(
                    num_arrivals=COMPUTE_WGS, num_barriers=max(len(works) - 1, 1)
                ),
            },
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=COMPUTE_WGS + 1,
            thread_name="wg",
            kernel_name="_".join(["lora", *dict.fromkeys(work.name for work in works)]),
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=_SEMANTICS,
                approx_math=any(work.approx_math for work in works),
            ),
        )

    def _body(self, *refs, arrays, barriers, work_done) -> None:
        """The kernel's code, for references to inputs, results and shared memory."""
        works, num_in = self.works, len(self.inputs)
        in_tree = jax.tree.structure([work.operands for work in works])
        out_tree = jax.tree.structure([dict(work.out_types) for work in works])
        outs = jax.tree.unflatten(out_tree, refs[num_in:])
        operands = jax.tree.unflatten(in_tree, [refs[i] for i in self.operand_indices])
        groups = iter(arrays)
        wg, sm = lax.axis_index("wg"), lax.axis_index("sm")
        todo = []
        for i, work in enumerate(works):
            named = _select(operands[i]) | outs[i] | dict(work.static_args)
            for _ in work.ring.groups():
                named |= next(groups)
            ring = Ring(work.ring, **barriers[i])
            counted = named.pop("num_items_gmem", None)
            num_items = work.num_items if counted is None else counted[0]
            sms = self.num_sms, self.num_side_sms
            items = _assign_items(work, num_items, sm, *sms)
            todo.append((work, work.role(ring=ring, **named), items))
        pl.when(wg == COMPUTE_WGS)(lambda: _load_all(todo, work_done))
        pl.when(wg < COMPUTE_WGS)(lambda: _compute_all(todo, work_done, wg))


def _load_all(todo: list[tuple[Work, Role, _ItemRange]], work_done) -> None:
    """Loads the items of each work, in the loading warpgroup."""
    plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
    for i, (work, role, items) in enumerate(todo):
        if i:
            plgpu.barrier_wait(work_done.at[i - 1])
        num_steps = _each_item(work, role, items, role.load)
        role.ring.drain(num_steps, items.count)


def _compute_all(todo: list[tuple[Work, Role, _ItemRange]], work_done, wg) -> None:
    """Computes the items of each work, in one computing warpgroup."""
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    for i, (work, role, items) in enumerate(todo):

        def compute(index, item, prefetched, step, role=role):
            del index
            return role.compute(item, prefetched, step, wg)

        _each_item(work, role, items, compute)
        plgpu.wait_smem_to_gmem(0)
        if i + 1 < len(todo):  # the rings share their memory
            plgpu.barrier_arrive(work_done.at[i])
            plgpu.barrier_wait(work_done.at[i])


def _select(operands: dict[str, Any]) -> dict[str, Any]:
    """Selects this projection's masks and settings.

    Their indices are read once per kernel instead of once per item.
    """
    is_shared = lambda x: isinstance(x, Mask | KernelSettings)
    one = lambda x: x.select() if is_shared(x) else x
    return jax.tree.map(one, operands, is_leaf=is_shared)
