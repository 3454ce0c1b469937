"""Reads the terms of a sum as products of an input with a frozen weight."""

import itertools
from collections.abc import Iterator, Sequence

from jax.extend import core

from jaxlora.fuse.normal_forms.forms import Factor, Form, Group, Indices, Term
from jaxlora.fuse.normal_forms.like_terms import without
from jaxlora.fuse.site import Linear


def units_of(term: Term) -> list[Group]:
    """Returns the numeric arrays of a term, and products of them that are variables."""
    units = [
        Group(1.0, factor, frozenset({place}), frozenset())
        for place, factor in enumerate(term.factors)
        if factor.is_number
    ]
    is_rounded = term.rounded is not None
    whole = len(term.factors) if is_rounded else -1  # as a whole, it is the result
    return units + [group for group in term.groups if len(group.members) != whole]


def bases_of(
    indices: Indices, root: core.Var, form: Form, base: Term
) -> Iterator[Linear]:
    """Yields the ways to read a term as x times w, those with the fewest scales first.

    Scales that another term of the sum has too belong to the sum, and come first. Other
    scales of output features behind the product, as of int8 codes, belong to w.

    Args:
        indices: The sizes of all indices.
        root: The variable that holds the sum.
        form: The form of the sum.
        base: The term.
    """
    outer = set(form.indices)
    pairs = [
        (x, w)
        for x, w in itertools.permutations(units_of(base), 2)
        if not x.members & w.members
    ]
    pairs.sort(key=lambda pair: -sum(len(unit.members) for unit in pair))
    for x_unit, w_unit in pairs:
        x, w, used = x_unit.array, w_unit.array, x_unit.members | w_unit.members
        inner = set(x.indices) - outer
        if not inner or inner != set(w.indices) - outer or not outer & set(w.indices):
            continue
        left = [f for i, f in enumerate(base.factors) if i not in used]
        if not all(set(f.indices) <= outer for f in left):
            continue
        matrices = (
            f.var
            for f in (w, *(base.factors[i] for i in w_unit.members))
            if inner & set(f.indices) and set(f.indices) - inner
        )
        shared = [f for f in left if f.is_number and _is_shared(f, form, base)]
        for scales in [shared, []] if shared else [[]]:
            yield Linear(
                root=root,
                dims=form.dims,
                x=x,
                w=w,
                w_scales=tuple(f for f in left if f not in scales),
                scales=tuple(scales),
                rows=tuple(i for i in x.indices if i in outer),
                in_indices=tuple(i for i in x.indices if i not in outer),
                out_indices=tuple(i for i in w.indices if i in outer),
                indices=indices,
                base=base,
                coefficient=base.coefficient / (x_unit.number * w_unit.number),
                matrices=tuple(matrices),
                equations=base.equations - x_unit.equations - w_unit.equations,
            )


def _is_shared(factor: Factor, form: Form, base: Term) -> bool:
    others = (f for t in form.terms if t is not base for f in t.factors)
    return any(is_same(factor, f) for f in others)


def is_same(first: Factor, second: Factor) -> bool:
    """Returns whether two factors of a sum are the same array, read in the same way."""
    kinds = [(f.dims, f.dtype, f.keeps, f.choice) for f in (first, second)]
    return first.var is second.var and kinds[0] == kinds[1]


def without_scales(term: Term, scales: Sequence[Factor]) -> Term | None:
    """Returns a term without the scales of its sum; None: it does not have all."""
    for scale in scales:
        same = (i for i, f in enumerate(term.factors) if is_same(scale, f))
        place = next(same, None)
        if place is None:
            return None
        term = without(term, place)
    return term


def repeated(linear: Linear) -> str | None:
    """Returns why a product that a sum has twice is not one; None: it has it once."""
    base, wanted = linear.base, {linear.x.var, linear.w.var}
    for term in linear.rest:
        if not wanted <= {unit.array.var for unit in units_of(term)}:
            continue
        if term.precisions != base.precisions:
            how = "at different precisions"
        elif (term.rounded, term.restored) != (base.rounded, base.restored):
            how = "rounded in different ways"
        else:
            how = "with different scales"
        return f"its frozen product is added twice, {how}"
    return None
