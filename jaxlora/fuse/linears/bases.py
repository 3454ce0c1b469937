"""Reads the terms of a sum as a product of an input with a frozen weight."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlora.fuse.linears.linear import Linear
from jaxlora.fuse.normal_forms.forms import Atom, Factor, Form, Term
from jaxlora.fuse.normal_forms.like_terms import without
from jaxlora.fuse.site import Index


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """An array that is one factor of a term, or the product of several.

    Attributes:
        factor: The array.
        number: The array is this number times the product of the members.
        members: Positions of the factors.
        equations: The equations that computed it.
    """

    factor: Factor
    number: float
    members: frozenset[int]
    equations: frozenset[int]


def units_of(term: Term) -> list[Unit]:
    """Returns the numeric arrays of a term, and products of them that are variables."""
    units = [
        Unit(factor=f, number=1.0, members=frozenset({i}), equations=frozenset())
        for i, f in enumerate(term.factors)
        if f.is_number
    ]
    for group in term.groups:
        aval: Any = group.var.aval
        if len(group.members) == len(term.factors) and term.rounded is not None:
            continue
        units.append(
            Unit(
                factor=Factor(group.var, group.dims, aval.dtype),
                number=group.number,
                members=group.members,
                equations=group.equations,
            )
        )
    return units


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """A way to read a term as a frozen product.

    Attributes:
        linear: The product.
        obstacle: Why the kernels cannot compute it; None: they can.
    """

    linear: Linear
    obstacle: str | None


def bases_of(form: Form, base: Term) -> Iterator[Base]:
    """Yields the ways to read a term as x times w, those with the fewest scales first.

    Scales that another term of the sum has too belong to the sum, and come first. Other
    scales of output features behind the product, as of int8 codes, belong to w.
    """
    outer = set(form.indices)
    pairs = [
        (x, w)
        for x, w in itertools.permutations(units_of(base), 2)
        if not x.members & w.members
    ]
    pairs.sort(key=lambda pair: -sum(len(unit.members) for unit in pair))
    for x, w in pairs:
        inner = set(x.factor.indices) - outer
        if not inner or inner != set(w.factor.indices) - outer:
            continue
        used, columns = x.members | w.members, outer & set(w.factor.indices)
        if not columns:
            continue
        left = [f for i, f in enumerate(base.factors) if i not in used]
        if not all(set(f.indices) <= outer for f in left):
            continue
        linear = Linear(
            x=x.factor,
            w=w.factor,
            matrices=_matrices(
                [w.factor, *(base.factors[i] for i in w.members)], inner
            ),
            base=base,
            coefficient=base.coefficient / (x.number * w.number),
            rows=tuple(i for i in x.factor.indices if i in outer),
            in_indices=tuple(i for i in x.factor.indices if i not in outer),
            out_indices=tuple(i for i in w.factor.indices if i in outer),
            repeats=frozenset(outer - columns - {*x.factor.indices}),
            equations=base.equations - x.equations - w.equations,
        )
        shared = [f for f in left if f.is_number and _is_shared(f, form, base)]
        for scales in [shared, []] if shared else [[]]:
            own = [f for f in left if f not in scales]
            yield Base(
                linear=dataclasses.replace(
                    linear, scales=tuple(scales), w_scales=tuple(own)
                ),
                obstacle=_obstacle(own, columns),
            )


def _obstacle(scales: Sequence[Factor], columns: set[Index]) -> str | None:
    """Returns why kernels cannot scale the weight by some arrays."""
    if any(not f.is_number for f in scales):
        return "a mask is on its frozen product, and kernels mask x of the branch only"
    if any(not set(f.indices) <= columns for f in scales):
        return (
            "its frozen product is multiplied by an array that differs by row, and its "
            "branch is not: kernels scale output features"
        )
    return None


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


def _matrices(factors: Sequence[Factor], inner: set[Index]) -> tuple[Atom, ...]:
    """Returns the arrays that have input and output features."""
    return tuple(
        f.var for f in factors if inner & set(f.indices) and set(f.indices) - inner
    )


def repeated(linear: Linear) -> str | None:
    """Returns why a product that a sum has twice is not one; None: it has it once."""
    base, wanted = linear.base, {linear.x.var, linear.w.var}
    for term in linear.rest:
        if not wanted <= {unit.factor.var for unit in units_of(term)}:
            continue
        if term.precisions != base.precisions:
            how = "at different precisions"
        elif (term.rounded, term.restored) != (base.rounded, base.restored):
            how = "rounded in different ways"
        else:
            how = "with different scales"
        return f"its frozen product is added twice, {how}"
    return None
