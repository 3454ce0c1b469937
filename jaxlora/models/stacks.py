"""Tables of like linears of all layers, in one array each.

Each array that a program takes or returns costs the host time at every call, and an
optimiser over hundreds of them is hundreds of kernels.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

_LAYERS = re.compile(r"layers\.([\d,]+)\.(.+)")  # which, and of what


def _paths(name: str) -> list[str]:
    """Paths of a stack's tables, in their order."""
    match = _LAYERS.fullmatch(name)
    assert match is not None, name
    return [f"layers.{layer}.{match[2]}" for layer in match[1].split(",")]


def stacked_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the stacks, by name: G P Q of each layer make G L P Q.

    A stack's name says which layers it holds: `layers.0,1,3.mlp.up_proj.lora_a`.

    Args:
        shapes: Of the tables, by path (`layers.0.mlp.up_proj.lora_a`).
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for path in shapes:
        _, layer, rest = path.split(".", 2)
        layers[rest].append(int(layer))
    stacks = {}
    for rest, some in layers.items():
        name = f"layers.{','.join(map(str, sorted(some)))}.{rest}"
        table = shapes[_paths(name)[0]]
        g, *sizes = table.shape
        stacks[name] = jax.ShapeDtypeStruct((g, len(some), *sizes), table.dtype)
    return stacks


def by_path(stacks: Mapping[str, Any], *, axis: int) -> dict[str, Any]:
    """The tables in stacks, by path; of NumPy arrays, views.

    Args:
        stacks: By name.
        axis: That of the layers: 1, or 0 in the rows of one slot.
    """
    before = (slice(None),) * axis
    return {
        path: stack[*before, i]
        for name, stack in stacks.items()
        for i, path in enumerate(_paths(name))
    }


def added(
    stacks: Mapping[str, jax.Array], tables: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The stacks, with a table added to each of their layers."""
    sums = {}
    for name, stack in stacks.items():
        # In one sum: XLA copies all of the stack for a sum into one of its layers.
        more = jnp.stack([tables[path] for path in _paths(name)], axis=1)
        sums[name] = stack + more
    return sums
