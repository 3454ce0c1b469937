"""Linears that share their input, such as q, k and v, in one pass over it."""

from collections import defaultdict
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from jaxlora.modules.multi_lora_linear import MultiLoraLinear, apply_adapted
from jaxlora.modules.routing import LinearInput, Routing


def apply_together(
    linears: Sequence[MultiLoraLinear],
    x: Float[Array, "T K"] | LinearInput,
    routing: Routing,
) -> list[Float[Array, "T _"]]:
    """Applies linears that share x, and reads x only once.

    Linears whose weights have different formats run one format after the other.

    Raises:
        ValueError: Linears with slots differ in `implementation`.
    """
    adapted = [linear for linear in linears if linear.slots is not None]
    kinds = {linear.implementation for linear in adapted}
    if len(kinds) > 1:
        raise ValueError(
            f"linears that run together must share an implementation, got {kinds}."
        )
    outputs: dict[int, Array] = {}
    given = LinearInput.of(x)
    for places in _by_format(linears).values():
        made = apply_adapted([linears[i] for i in places], given, routing)
        outputs |= zip(places, made, strict=True)
    return [
        linear.frozen(given.x, routing) if linear.slots is None else outputs[i]
        for i, linear in enumerate(linears)
    ]


def _by_format(linears: Sequence[MultiLoraLinear]) -> dict[object, list[int]]:
    """Groups the places of linears with slots by how their weights are stored."""
    groups: dict[object, list[int]] = defaultdict(list)
    for i, linear in enumerate(linears):
        if linear.slots is not None:
            groups[jax.tree.structure(linear.weight)].append(i)
    return groups
