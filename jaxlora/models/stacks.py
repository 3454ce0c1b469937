"""Stacks: the adapter tables of like linears in all layers, in one array each.

Each array that a program takes or returns costs host time at every call, and an
optimizer over hundreds of arrays launches hundreds of kernels. So the device holds
stacks, `[G, L, P, Q]`. Each linear of a layer's experts is there as if it were in a
layer of its own: first those of the first expert, layer by layer, so that devices can
divide the experts. Programs take those of a layer as one table `[G, X, P, Q]`.

The canonical form is one table `[G, P, Q]` per dotted path, such as
`layers.0.mlp.up_proj.lora_a`. It does not depend on pipeline stages or on how layers
are stacked. Checkpoints and exports use it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlora.models.build import LayerLinear
from jaxlora.models.slot_modules import SLOT_MODULES
from jaxlora.modules.trained_tensors import tensor_path, trained_tensors

# Paths of the tables that belong to no linear; each is a stack of its own.
OUTSIDE_LINEARS = tuple(module.path for module in SLOT_MODULES.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Tables that share one array.

    Attributes:
        name: Key of the array (`mlp.up_proj.lora_a`).
        paths: Dotted path of each table, in the order of the array's layers.
        modules: Dotted path of each table as programs take it, in that order; those of
            a layer's experts are one.
        num_experts: How many tables are one in programs; None: each is by itself.
    """

    name: str
    paths: tuple[str, ...]
    modules: tuple[str, ...]
    num_experts: int | None = None

    def __post_init__(self):
        if not self.paths:
            raise ValueError(f"stack {self.name!r} has no tables: leave it out.")


def stacks_of(
    layers: Mapping[int, Mapping[LayerLinear, str]], tables: Collection[str]
) -> tuple[Stack, ...]:
    """Returns the stacks of the tables of these layers.

    Args:
        layers: For each layer, by its number, the linears and the names of their
            stacks, which linears of other sizes do not share.
        tables: Dotted paths of the tables that programs take.
    """
    stacks = []
    linears: dict[str, list[tuple[str, LayerLinear]]] = {}
    for i, names in layers.items():
        for linear, stack in names.items():
            linears.setdefault(stack, []).append((f"layers.{i}", linear))
    for stack, members in linears.items():
        for tensor in trained_tensors():
            own = {tensor_path(f"{at}.{x.name}", tensor): (at, x) for at, x in members}
            here = {path: place for path, place in own.items() if path in tables}
            if not here:
                continue
            named = [[f"{at}.{name}" for name in x.names] for at, x in here.values()]
            paths = [
                tensor_path(path, tensor)
                for same_expert in zip(*named, strict=True)
                for path in same_expert
            ]
            experts = members[0][1].experts
            found = Stack(
                name=tensor_path(stack, tensor),
                paths=tuple(paths),
                modules=tuple(here),
                num_experts=None if experts is None else experts.number,
            )
            stacks.append(found)
    outside = (path for path in OUTSIDE_LINEARS if path in tables)
    return *stacks, *(Stack(name=x, paths=(x,), modules=(x,)) for x in outside)


def stacked_shapes(
    stacks: Sequence[Stack], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each stack's array: tables of G P Q make G L P Q.

    Args:
        stacks: Which tables share an array.
        shapes: Shape of each table as programs take it, by path.
    """
    arrays = {}
    for stack in stacks:
        table = shapes[stack.modules[0]]
        g, *sizes = table.shape
        if stack.num_experts is not None:
            sizes = sizes[1:]
        shape = (g, len(stack.paths), *sizes)
        arrays[stack.name] = jax.ShapeDtypeStruct(shape, table.dtype)
    return arrays


def to_paths(stacks: Sequence[Stack], rows: Mapping[str, Any]) -> dict[str, Any]:
    """Splits the rows of one slot into their tables, by path; views of NumPy's arrays.

    Args:
        stacks: Which tables share an array.
        rows: The slot's rows of each stack, by name.
    """
    return {
        path: rows[stack.name][i, ...]
        for stack in stacks
        for i, path in enumerate(stack.paths)
    }


def to_modules(stacks: Sequence[Stack], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Splits stacks into tables as programs take them, by path.

    Args:
        stacks: Which tables share an array.
        arrays: The array of each stack, by name.
    """
    tables = {}
    for stack in stacks:
        array = arrays[stack.name]
        if stack.num_experts is None:
            own = {path: array[:, i] for i, path in enumerate(stack.modules)}
        else:
            every = by_layer(stack, array, axis=1)
            own = {path: every[:, :, i] for i, path in enumerate(stack.modules)}
        tables |= own
    return tables


def by_layer(stack: Stack, array: Any, axis: int) -> Any:
    """Gives the array of a stack, or of some layers of it, two axes, X L.

    Args:
        stack: The stack; without experts, X is 1.
        array: Its array.
        axis: The axis of its tables.
    """
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    return array.reshape(*before, stack.num_experts or 1, -1, *after)


def added(
    stacks: Sequence[Stack],
    arrays: Mapping[str, jax.Array],
    tables: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Adds a table to each layer of the stacks.

    Args:
        stacks: Which tables share an array.
        arrays: The array of each stack, by name.
        tables: Tables to add, as programs take them, by path.
    """
    sums = {}
    for stack in stacks:
        array, axis = arrays[stack.name], 1 if stack.num_experts is None else 2
        # One sum, because XLA copies the whole stack for a sum into one of its layers.
        more = jnp.stack([tables[path] for path in stack.modules], axis)
        sums[stack.name] = array + more.reshape(array.shape)
    return sums
