"""Tables of like linears of all layers, in one array each.

Each array that a program takes or returns costs the host time at every call, and an
optimiser over hundreds of them is hundreds of kernels.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax

_LAYERS = re.compile(r"layers\.([\d,]+)\.(.+)")  # which, and of what


def _parts(name: str) -> tuple[list[int], str]:
    match = _LAYERS.fullmatch(name)
    assert match is not None, name
    return [int(layer) for layer in match[1].split(",")], match[2]


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
        (layer,), rest = _parts(path)
        layers[rest].append(layer)
    stacks = {}
    for rest, some in layers.items():
        some.sort()
        g, *table = shapes[f"layers.{some[0]}.{rest}"].shape
        name = f"layers.{','.join(map(str, some))}.{rest}"
        dtype = shapes[f"layers.{some[0]}.{rest}"].dtype
        stacks[name] = jax.ShapeDtypeStruct((g, len(some), *table), dtype)
    return stacks


def by_path(stacks: Mapping[str, Any], *, axis: int) -> dict[str, Any]:
    """The tables in stacks, by path; of NumPy arrays, views.

    Args:
        stacks: By name.
        axis: That of the layers: 1, or 0 in the rows of one slot.
    """
    tables = {}
    for name, stack in stacks.items():
        layers, rest = _parts(name)
        for i, layer in enumerate(layers):
            place = (slice(None),) * axis + (i,)
            tables[f"layers.{layer}.{rest}"] = stack[place]
    return tables


def added(
    stacks: Mapping[str, jax.Array], tables: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The stacks, with a table added to each of their layers."""
    sums = {}
    for name, stack in stacks.items():
        layers, rest = _parts(name)
        for i, layer in enumerate(layers):
            stack = stack.at[:, i].add(tables[f"layers.{layer}.{rest}"])
        sums[name] = stack
    return sums
