"""Stacks: the adapter tables of like linears in all layers, in one array each.

Each array that a program takes or returns costs host time at every call, and an
optimizer over hundreds of arrays launches hundreds of kernels. So the device holds
stacks, `[G, L, P, Q]`.

The canonical form is one table `[G, P, Q]` per dotted path, such as
`layers.0.mlp.up_proj.lora_a`. It does not depend on pipeline stages or on how layers
are stacked. Checkpoints and exports use it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
    """

    name: str
    paths: tuple[str, ...]

    def __post_init__(self):
        if not self.paths:
            raise ValueError(f"stack {self.name!r} has no tables: leave it out.")


def stacks_of(
    layers: Mapping[int, Mapping[str, str]], tables: Collection[str]
) -> tuple[Stack, ...]:
    """Returns the stacks of the tables of these layers.

    Args:
        layers: For each layer, by its number, the linears and the names of their
            stacks, which linears of other sizes do not share.
        tables: Dotted paths of the tables that there are.
    """
    stacks = []
    linears: dict[str, list[str]] = {}
    for i, names in layers.items():
        for name, stack in names.items():
            linears.setdefault(stack, []).append(f"layers.{i}.{name}")
    for stack, members in linears.items():
        for tensor in trained_tensors():
            paths = (tensor_path(member, tensor) for member in members)
            paths = tuple(path for path in paths if path in tables)
            if paths:
                stacks.append(Stack(name=tensor_path(stack, tensor), paths=paths))
    outside = (path for path in OUTSIDE_LINEARS if path in tables)
    return *stacks, *(Stack(name=path, paths=(path,)) for path in outside)


def stacked_shapes(
    stacks: Sequence[Stack], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each stack's array: tables of G P Q make G L P Q.

    Args:
        stacks: Which tables share an array.
        shapes: Shape of each table, by path.
    """
    arrays = {}
    for stack in stacks:
        table = shapes[stack.paths[0]]
        g, *sizes = table.shape
        shape = (g, len(stack.paths), *sizes)
        arrays[stack.name] = jax.ShapeDtypeStruct(shape, table.dtype)
    return arrays


def to_paths(
    stacks: Sequence[Stack], arrays: Mapping[str, Any], *, axis: int
) -> dict[str, Any]:
    """Splits stacks into their tables, by path; views if the arrays are NumPy's.

    Args:
        stacks: Which tables share an array.
        arrays: The array of each stack, by name.
        axis: Axis of the layers: 1, or 0 in the rows of one slot.
    """
    before = (slice(None),) * axis
    return {
        path: arrays[stack.name][*before, i, ...]
        for stack in stacks
        for i, path in enumerate(stack.paths)
    }


def added(
    stacks: Sequence[Stack],
    arrays: Mapping[str, jax.Array],
    tables: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Adds a table to each layer of the stacks.

    Args:
        stacks: Which tables share an array.
        arrays: The array of each stack, by name.
        tables: Tables to add, by path.
    """
    sums = {}
    for stack in stacks:
        # One sum, because XLA copies the whole stack for a sum into one of its layers.
        more = jnp.stack([tables[path] for path in stack.paths], axis=1)
        sums[stack.name] = arrays[stack.name] + more
    return sums
