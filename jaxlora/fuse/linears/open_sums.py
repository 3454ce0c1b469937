"""Decides which sums of products may still become a part of an adapter's sum.

The normal form of a sum is open: what reads the sum is written in terms of what was
added. That finds `x w + bias`, to which a branch is added later. But a residual stream
is a sum of products too, and if it stayed open, the input of the next linear would be
several terms and no array. So a sum becomes an array of its own where its value is
needed as such: where a norm, a nonlinear function or a matrix product reads it.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from jaxlora.fuse.graph import RESULT, Graph
from jaxlora.fuse.linears.branches import MAX_RANK, RANK_FRACTION
from jaxlora.fuse.normal_forms.forms import Form, Term
from jaxlora.fuse.normal_forms.normal import Normalizer

ADDS = ("add", "add_any", "sub")
PRODUCTS = ("dot_general", "ragged_dot_general")
_SAME = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "name",
    "neg",
    "pvary",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
)


def carries(eqn: Any, value: Any) -> bool:
    """Whether the result of an equation is a multiple of one of its operands.

    It also is where each element has a factor of its own.
    """
    name, readers = eqn.primitive.name, [v is value for v in eqn.invars]
    if name in _SAME:
        return True
    if name == "mul":
        return sum(readers) == 1
    if name == "div":
        return readers == [True, False]
    return name == "select_n" and not readers[0]


def is_open(n: Normalizer, var: core.Var, form: Form) -> bool:
    """Whether a sum may be a part of a larger one.

    Args:
        n: Knows the form of each value.
        var: The variable that holds the sum.
        form: Its form, of several terms.
    """
    if _is_merged_weight(n, form):
        return True
    ends = list(_ends(n.graph, var))
    return not ends or (len(ends) == 1 and _is_thin(n, form, *ends[0]))


def _ends(graph: Graph, var: core.Var) -> Iterator[tuple[Any, core.Var]]:
    """Yields what reads a sum, or a multiple of it, and does not add to it.

    Each is an equation, or None for the jaxpr's results, and the value it reads.
    """
    todo = [var]
    while todo:
        value = todo.pop()
        for number in graph.users[value]:
            eqn = None if number == RESULT else graph.jaxpr.eqns[number]
            if eqn is None or not (eqn.primitive.name in ADDS or carries(eqn, value)):
                yield eqn, value
            elif eqn.primitive.name not in ADDS:
                todo += eqn.outvars


def _is_merged_weight(n: Normalizer, form: Form) -> bool:
    """Whether a sum is a weight with products of low rank added to it.

    A residual stream to which a narrow layer is added has the same form, but for arrays
    that are computed from the stream itself or by another matrix product.
    """
    plain = [t for t in form.terms if t.rounded is None]
    products = [t for t in form.terms if t.rounded is not None]
    size = n.indices.size_of(form.indices)
    if len(plain) != 1 or not products:
        return False
    ranks = [_summed(n, term, form) for term in products]
    if any(r > MAX_RANK or (r * RANK_FRACTION) ** 2 > size for r in ranks):
        return False
    weight, factors = (
        {
            f.var
            for t in terms
            for f in t.factors
            if isinstance(f.var, core.Var) and len(f.indices) > 1
        }
        for terms in (plain, products)
    )
    for var in n.graph.ancestors(factors):
        eqn = n.graph.equation(var)
        if var in weight or (eqn and eqn.primitive.name in PRODUCTS):
            return False
    return True


def _is_thin(n: Normalizer, form: Form, eqn: Any, value: core.Var) -> bool:
    """Whether a product reads a sum of rows of low rank, as of several A."""
    if eqn is None or eqn.primitive.name != "dot_general":
        return False
    contracted, _ = eqn.params["dimension_numbers"]
    aval: Any = value.aval
    ranks = [
        math.prod(aval.shape[axis] for axis in axes)
        for atom, axes in zip(eqn.invars, contracted, strict=True)
        if atom is value
    ]
    return (
        len(ranks) == 1
        and ranks[0] <= MAX_RANK
        and all(
            t.rounded is not None and _summed(n, t, form) >= ranks[0] * RANK_FRACTION
            for t in form.terms
        )
    )


def _summed(n: Normalizer, term: Term, form: Form) -> int:
    """Returns the number of products that each element of a term sums."""
    held = itertools.chain.from_iterable(f.indices for f in term.factors)
    return n.indices.size_of({*held} - {*form.indices})
