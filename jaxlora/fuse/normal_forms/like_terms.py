"""Adds up terms of a sum that are multiples of the same product."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core

from jaxlora.fuse.normal_forms.forms import (
    Dims,
    Factor,
    Form,
    Index,
    Names,
    Term,
    constant,
    fresh,
    holds,
    rename,
)
from jaxlora.fuse.normal_forms.normal import Normalizer

_OFFSETS = ("add", "sub")


def merged(n: Normalizer, form: Form) -> Form:
    """Adds up the terms of a sum that are the same product, rounded in the same way.

    Terms that cancel are left out if all of their arrays are in other terms, so that
    NaN and infinities in these still reach the sum. Otherwise their coefficient is 0.
    """
    outer, kept = frozenset(form.indices), list[Term]()
    for term in form.terms:
        for place, other in enumerate(kept):
            if not term.factors or not _is_rounded_alike(other, term):
                continue
            if same_product(n, other, term, outer):
                kept[place] = dataclasses.replace(
                    other,
                    coefficient=other.coefficient + term.coefficient,
                    equations=other.equations | term.equations,
                )
                break
        else:
            kept.append(term)
    terms = [t for t in kept if t.coefficient != 0]
    gone = [t for t in kept if t.coefficient == 0]
    held = frozenset().union(*map(_arrays, terms))
    terms += [t for t in gone if not _arrays(t) <= held]
    terms = terms or kept[:1]
    return Form(form.dims, tuple(_with_equations(term, gone) for term in terms))


def _arrays(term: Term) -> frozenset[core.Var]:
    return frozenset(f.var for f in term.factors if isinstance(f.var, core.Var))


def _with_equations(term: Term, gone: Iterable[Term]) -> Term:
    """Adds the equations of terms that cancel to one that has all their factors."""
    for other in gone:
        if _arrays(other) <= _arrays(term):
            equations = term.equations | other.equations
            term = dataclasses.replace(term, equations=equations)
    return term


def _is_rounded_alike(first: Term, second: Term) -> bool:
    kinds = [(t.rounded, t.restored, t.precisions) for t in (first, second)]
    return kinds[0] == kinds[1]


def same_product(
    n: Normalizer, first: Term, second: Term, outer: frozenset[Index]
) -> bool:
    """Returns whether two terms have the same factors, but for the names of sums.

    Args:
        n: Knows the sizes of indices.
        first: A term.
        second: Another one.
        outer: The indices that are not summed.
    """
    if len(first.factors) != len(second.factors):
        return False
    same = {i: i for i in outer}
    return _matches(n, first.factors, second.factors, same)


def _matches(
    n: Normalizer,
    first: Sequence[Factor],
    second: Sequence[Factor],
    names: dict[Index, Index],
) -> bool:
    """Finds a partner of each factor for which summed indices are renamed alike."""
    if not first:
        return True
    for place, factor in enumerate(second):
        more = _renaming(n, first[0], factor, names)
        rest = (*second[:place], *second[place + 1 :])
        if more is not None and _matches(n, first[1:], rest, more):
            return True
    return False


def _renaming(
    n: Normalizer, one: Factor, other: Factor, names: dict[Index, Index]
) -> dict[Index, Index] | None:
    """Returns which index of the first is which of the other; None: they differ."""
    alike = [(f.dtype, f.keeps, f.choice, list(map(len, f.dims))) for f in (one, other)]
    if one.var is not other.var or alike[0] != alike[1]:
        return None
    found = dict(names)
    for i, j in zip(one.indices, other.indices, strict=True):
        if n.indices.sizes[i] != n.indices.sizes[j] or found.setdefault(i, j) != j:
            return None
    return found if len({*found.values()}) == len(found) else None


def simplified(n: Normalizer, form: Form) -> Form:
    """Adds up like terms, also those of `m x w - x w`, where `m - 1` is an array.

    Such an array is opened only where that leaves fewer terms.
    """
    form = merged(n, form)
    arrays = (f.var for t in form.terms for f in t.factors)
    for var in dict.fromkeys(v for v in arrays if isinstance(v, core.Var)):
        eqn = n.graph.equation(var)
        if eqn is None or eqn.primitive.name not in _OFFSETS:
            continue
        opened = merged(n, Form(form.dims, tuple(_opened(n, form.terms, var))))
        if len(opened.terms) < len(form.terms):
            form = opened
    return form


def _opened(n: Normalizer, terms: Iterable[Term], var: core.Var) -> Iterator[Term]:
    """Yields the terms of a sum in which an array is opened as another and a number."""
    for term in terms:
        place = next((i for i, f in enumerate(term.factors) if f.var is var), None)
        parts = None if place is None else _parts(n, var, term.factors[place])
        if place is None or parts is None:
            yield term
            continue
        for part in parts:
            yield _replaced(term, place, part)


def _parts(n: Normalizer, var: core.Var, factor: Factor) -> list[Term] | None:
    """Returns the array and the number of a factor that is their sum, or None."""
    eqn: Any = n.graph.equation(var)
    aval: Any = var.aval
    if not factor.is_number or not holds(factor.dtype, aval.dtype):
        return None  # the sum was rounded by a cast
    forms = [n.form(v) for v in eqn.invars]
    numbers = [constant(form) for form in forms]
    if numbers.count(None) != 1:
        return None
    place = numbers.index(None)
    number = next(c for c in numbers if c is not None)
    signs = (1.0, -1.0 if eqn.primitive.name == "sub" else 1.0)
    array = fresh(n.indices, forms[place])
    names = _names_of(n, array.dims, factor.dims)
    if len(array.terms) != 1 or names is None:
        return None
    (term,) = rename(array, names).terms
    if term.rounded is not None or not all(f.is_number for f in term.factors):
        return None
    factors = tuple(dataclasses.replace(f, dtype=factor.dtype) for f in term.factors)
    scaled = dataclasses.replace(
        term, factors=factors, coefficient=signs[place] * term.coefficient, groups=()
    )
    return [scaled, Term(signs[1 - place] * number, ())]


def _names_of(n: Normalizer, mine: Dims, wanted: Dims) -> Names | None:
    """Returns how to rename the indices of an array's dimensions; None: they differ."""
    if list(map(len, mine)) != list(map(len, wanted)):
        return None
    pairs = [
        pair
        for a, b in zip(mine, wanted, strict=True)
        for pair in zip(a, b, strict=True)
    ]
    if any(n.indices.sizes[i] != n.indices.sizes[j] for i, j in pairs):
        return None
    return {i: (j,) for i, j in pairs}


def _replaced(term: Term, place: int, part: Term) -> Term:
    """Returns a term with the factors of another in the place of one of its own."""
    rest = without(term, place)
    return dataclasses.replace(
        rest,
        coefficient=term.coefficient * part.coefficient,
        factors=(*rest.factors, *part.factors),
        equations=term.equations | part.equations,
    )


def without(term: Term, place: int) -> Term:
    """Takes a factor out of a term, and with it the variables that hold its products.

    Args:
        term: The term.
        place: The position of the factor.
    """
    factors = tuple(f for i, f in enumerate(term.factors) if i != place)
    groups = (g for g in term.groups if place not in g.members)
    moved = (
        dataclasses.replace(g, members=frozenset(m - (m > place) for m in g.members))
        for g in groups
    )
    return dataclasses.replace(term, factors=factors, groups=tuple(moved))
