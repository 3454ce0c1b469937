"""Finds products with the shape of an adapter, `(x @ a) @ b` of a small rank.

They are found by shapes alone, so that also those are listed which the normal form does
not recognize.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxlora.fuse.graph import RESULT, Graph
from jaxlora.fuse.linears.branches import MAX_RANK, RANK_FRACTION
from jaxlora.fuse.linears.open_sums import ADDS, PRODUCTS, carries


@dataclasses.dataclass(frozen=True)
class _Side:
    """An operand of a matrix product.

    Attributes:
        atom: The operand.
        summed: Size of what is summed over.
        free: Size of its own dimensions of the result.
    """

    atom: Any
    summed: int
    free: int


def adapter_products(graph: Graph) -> Iterator[tuple[int, bool]]:
    """Yields the equations that multiply by B, and whether it is one adapter's.

    In a product of several, each has a batch dimension of its own.
    """
    for number, eqn in enumerate(graph.jaxpr.eqns):
        if not graph.live[number] or eqn.primitive.name != "dot_general":
            continue
        sides = _sides(eqn)
        for s, b in (sides, sides[::-1]):
            counts = [_adapters(graph, first, b) for first in _behind(graph, s.atom)]
            if any(counts):
                yield number, 1 in counts
                break


def sums_of(graph: Graph, number: int) -> Iterator[int]:
    """Yields the equations that add to an equation's result, or scale the sum."""
    todo, seen = [number], set()
    while todo:
        for value in graph.jaxpr.eqns[todo.pop()].outvars:
            for user in graph.users[value]:
                if user == RESULT or user in seen:
                    continue
                seen.add(user)
                eqn = graph.jaxpr.eqns[user]
                if eqn.primitive.name in ADDS or carries(eqn, value):
                    yield user
                    todo.append(user)


def _sides(eqn: Any) -> tuple[_Side, _Side]:
    contracted, batch = eqn.params["dimension_numbers"]
    sides = []
    for atom, axes, others in zip(eqn.invars, contracted, batch, strict=True):
        shape = atom.aval.shape
        summed = math.prod(shape[axis] for axis in axes)
        shared = math.prod(shape[axis] for axis in others)
        free = math.prod(shape) // max(summed * shared, 1)
        sides.append(_Side(atom, summed, free))
    return sides[0], sides[1]


def _behind(graph: Graph, atom: Any) -> Iterator[Any]:
    """Yields the matrix products of which a value is a multiple."""
    todo, seen = [atom], set()
    while todo:
        eqn = graph.equation(todo.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if eqn.primitive.name == "dot_general":
            yield eqn
        else:
            todo += [v for v in eqn.invars if carries(eqn, v)]


def _adapters(graph: Graph, first: Any, b: _Side) -> int:
    """Returns how many adapters two products may be the A and B of; 0: none."""
    rank = b.summed
    for x, a in (_sides(first), _sides(first)[::-1]):
        limit = min(MAX_RANK, min(a.summed, b.free) // RANK_FRACTION)
        if not 0 < rank <= limit or a.free % rank or x.free < rank:
            continue
        if not _is_computed(graph, a, b) and not _is_constant(graph, x):
            return a.free // rank
    return 0


def _is_constant(graph: Graph, side: _Side) -> bool:
    """Whether an operand depends on no argument, as the identity does."""
    return all(var in graph.maker for var in graph.ancestors([side.atom]))


def _is_computed(graph: Graph, *weights: _Side) -> bool:
    """Whether a weight is computed by a matrix product, and so no parameter."""
    eqns = map(graph.equation, graph.ancestors(side.atom for side in weights))
    return any(eqn and eqn.primitive.name in PRODUCTS for eqn in eqns)
