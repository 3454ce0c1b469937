"""Recognises a frozen product and its low-rank branches in a sum of products."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlora.fuse.linears.bases import bases_of, is_same, units_of, without_scales
from jaxlora.fuse.normal_forms.choose import other_fill
from jaxlora.fuse.normal_forms.forms import (
    Factor,
    Index,
    Names,
    Term,
    is_float,
    is_moderate,
)
from jaxlora.fuse.normal_forms.like_terms import simplified
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.site import Branch, Linear, Selection

MAX_RANK = 256  # of the tuning tables; larger branches are compute-bound
RANK_FRACTION = 4  # a branch then costs at most half of the frozen product
_SCALED_BY_ROW = "the branch's scale differs by row"


class NotThin(Exception):
    """A term is no low-rank branch of a product; the message may say why."""


class OtherInput(NotThin):
    """A term does not read the input of a frozen product as the product does."""


def find_linear(n: Normalizer, root: core.Var) -> tuple[Linear | None, list[str]]:
    """Finds a frozen product with branches in a sum.

    Args:
        n: Knows the form of each value.
        root: The variable that holds the sum.

    Returns:
        The linear with the most branches, if possible of a product that is not scaled
        by a number, or None; and the reasons for which other terms are no branches of
        it, or of the product that costs most.
    """
    form = simplified(n, n.form(root))
    terms = [t for t in form.terms if t.coefficient != 0]
    best: Linear | None = None
    best_reasons: list[NotThin] = []
    reasons: list[tuple[int, NotThin]] = []
    for term in terms:
        for base in bases_of(n.indices, root, form, term):
            others = [t for t in form.terms if t is not term]
            found, why = _with_branches(n, base, others)
            cost = n.indices.size_of({*base.x.indices, *base.w.indices})
            reasons += [(cost, reason) for reason in why]
            if found and (best is None or _gain(found) > _gain(best)):
                best, best_reasons = found, why
    if best is None:
        most = max((cost for cost, _ in reasons), default=0)
        best_reasons = [reason for cost, reason in reasons if cost == most]
    best_reasons.sort(key=lambda reason: isinstance(reason, OtherInput))
    return best, [str(reason) for reason in best_reasons if reason.args]


def _gain(linear: Linear) -> tuple[int, bool]:
    """Returns what is larger for a better way to read a sum."""
    return len(linear.branches), linear.coefficient == 1


def _with_branches(
    n: Normalizer, linear: Linear, others: Sequence[Term]
) -> tuple[Linear | None, list[NotThin]]:
    """Adds the branches and the bias, and says why other terms are no branches.

    Returns:
        The linear; None if it has no branches. And the reasons.
    """
    branches, biases = list[Branch](), list[Term]()
    unread, rest = list[Term](), list[Term]()
    reasons: list[NotThin] = []
    for term in others:
        inner = without_scales(term, linear.scales)
        try:
            if inner is None or inner.coefficient == 0:
                raise NotThin
            branches.append(_branch(n, linear, inner))
            continue
        except NotThin as error:
            reasons.append(error)
        unread.append(term)
        if inner is not None and not biases and _is_bias(inner, linear):
            biases.append(inner)
        else:
            rest.append(term)
    if not branches:
        return None, reasons
    linear = dataclasses.replace(linear, branches=tuple(branches))
    if any(term.restored for term in linear.terms):
        rest, biases = unread, []  # the kernels would round the sum with the bias
    try:
        _check_parts(linear)
        _check_base(n, linear)
    except NotThin as error:
        return None, [*reasons, error]
    linear = dataclasses.replace(
        linear,
        bias=biases[0].factors[0] if biases else None,
        scales=(*_number(linear.coefficient), *linear.scales),
        rest=tuple(rest),
        equations=linear.equations.union(*(p.equations for p in (*branches, *biases))),
    )
    return linear, reasons


def _number(value: float) -> tuple[Factor, ...]:
    """Returns a number as an array that scales a sum; none for 1."""
    if value == 1:
        return ()
    literal = core.Literal(np.float32(value), jax.typeof(np.float32(value)))
    return (Factor(literal, (), np.dtype(np.float32)),)


def _check_parts(linear: Linear) -> None:
    """Raises `NotThin` if the parts of a linear cannot be in one call."""
    if any(not f.is_number for f in linear.w_scales):
        raise NotThin(
            "a mask is on its frozen product, and kernels mask x of the branch only"
        )
    if any(not set(f.indices) <= set(linear.out_indices) for f in linear.w_scales):
        raise NotThin(
            "its frozen product is multiplied by an array that differs by row, and its "
            "branch is not: kernels scale output features"
        )
    first, *others = linear.branches
    for other in others:
        if not _is_same_mask(first.mask, other.mask):
            raise NotThin("its branches have different dropout masks")
        if (other.selection is None) != (first.selection is None):
            raise NotThin("its branches choose their adapters in different ways")
    if others and first.selection is not None:
        raise NotThin("it has several branches that choose their adapters")


def _is_same_mask(first: Factor | None, second: Factor | None) -> bool:
    if first is None or second is None:
        return first is second
    return is_same(first, second)


def _check_base(n: Normalizer, linear: Linear) -> None:
    """Raises `NotThin` if the kernels cannot compute the sum."""
    if set(linear.w.indices) & set(linear.rows):
        raise NotThin("its frozen weight differs by sequence")
    numbers = [linear.coefficient, *(b.coefficient for b in linear.branches)]
    if not all(is_moderate(number, linear.x.dtype) for number in numbers):
        raise NotThin("its products are multiplied by numbers that are too far apart")
    factors = [o.var for b in linear.branches for o in (*b.a, *b.b)]
    if any(f.var is factor for f in linear.w_scales for factor in factors):
        raise NotThin  # without one of the branches, the sum is scaled
    adapters = linear.adapter_indices
    is_by_row = linear.size_of(adapters) == linear.num_tokens
    if adapters and linear.selection is None and is_by_row:
        gathered = _gather_reason(n, factors)
        raise NotThin(gathered or "each row has its own A and B or its own scale")


def _gather_reason(n: Normalizer, arrays: Iterable[Any]) -> str | None:
    """Returns why a gather is not read as a choice of adapters; None: there is none."""
    for array in arrays:
        eqn = n.graph.equation(array)
        if eqn is None or eqn.primitive.name != "gather":
            continue
        if (fill := other_fill(eqn.params)) is not None:
            return f"ids outside of its tables are filled in with {fill:g}"
        return "A or B is gathered in a way that is not read as a choice by row"
    return None


def _is_bias(term: Term, linear: Linear) -> bool:
    """Whether a term is a vector over the output features, scaled as the product is."""
    return term.coefficient == linear.coefficient and is_vector(term, linear)


def is_vector(term: Term, linear: Linear) -> bool:
    """Whether a term is a multiple of a vector over the output features."""
    return (
        len(term.factors) == 1
        and term.factors[0].is_number
        and set(term.factors[0].indices) == set(linear.out_indices)
    )


def _branch(n: Normalizer, linear: Linear, term: Term) -> Branch:
    """Reads a term as a low-rank branch of a linear; raises `NotThin` if it is none."""
    if sum(f.is_number for f in term.factors) < 3:
        raise NotThin
    for x in units_of(term):
        if (names := _same_input(linear, x.array)) is not None:
            break
    else:
        raise OtherInput(*_other_input(linear, term))
    kept = [f.renamed(names) for i, f in enumerate(term.factors) if i not in x.members]
    _check_features(linear, linear.in_indices, kept)
    held = {*linear.x.indices, *linear.w.indices}
    repeats = {i for dim in linear.dims for i in dim} - held
    if any(repeats & {*f.indices} for f in kept):
        raise NotThin(
            "several adapters or masks are applied to the same rows, and the kernels "
            "give each row one"
        )
    factors, selection = _selected(n, linear, kept)
    if any(f.var is linear.x.var for f in (*factors, linear.w)):
        raise NotThin("its weights are the input itself")
    if _is_base_again(linear, factors):
        raise NotThin
    if any(f.var is matrix for f in factors for matrix in linear.matrices):
        raise NotThin("the branch reads the frozen product, as a series adapter does")
    mask = _mask(n, linear, [f for f in factors if f.keeps is not None])
    factors = [f for f in factors if f.is_number]
    table = () if selection is None else selection.table_indices
    a, b, rank_indices = _split_factors(linear, linear.in_indices, factors, table)
    return Branch(
        a=tuple(a),
        b=tuple(b),
        rank_indices=rank_indices,
        coefficient=term.coefficient / x.number / linear.coefficient,
        mask=mask,
        selection=selection,
        term=term,
        products=tuple(
            frozenset(term.factors[i].var for i in group.members)
            for group in term.groups
            if not group.members & x.members
        ),
        equations=term.equations - x.equations,
    )


def _is_base_again(linear: Linear, factors: Sequence[Factor]) -> bool:
    """Returns whether a term is the frozen product, with other scales."""
    outer = {*linear.rows, *linear.out_indices}
    inside = [f for f in factors if not set(f.indices) <= outer]
    return len(inside) == 1 and inside[0].var is linear.w.var


def _selected(
    n: Normalizer, linear: Linear, factors: list[Factor]
) -> tuple[list[Factor], Selection | None]:
    """Replaces the choices of a term by one selection."""
    choices = [f for f in factors if f.choice is not None]
    if not choices:
        return factors, None
    first, choice = choices[0], choices[0].choice
    assert choice is not None
    outsides = {f.choice.outside for f in choices if f.choice is not None}
    # The product of what is read outside of the tables: NaN if one of them is.
    outside = next(how for how in ("nan", "zero", "clip") if how in outsides)
    same = dataclasses.replace(choice, outside="")
    if any(
        dataclasses.replace(f.choice, outside="") != same
        or f.dims[:-1] != first.dims[:-1]
        for f in choices
        if f.choice is not None
    ):
        raise NotThin("A and B are chosen by different numbers of adapters")
    rows = {i for dim in first.dims[:-1] for i in dim}
    if not rows <= set(linear.rows):
        raise NotThin("its adapter is not chosen by row")
    names: Names = {}
    for other in choices[1:]:
        pairs = zip(other.dims[-1], first.dims[-1], strict=True)
        names |= {i: (j,) for i, j in pairs}
    rest = [f.renamed(names) for f in factors if f.choice is None]
    table = set(first.dims[-1])
    by_row = [f for f in rest if set(f.indices) & set(linear.rows) and f.is_number]
    if any(set(f.indices) <= set(linear.rows) for f in by_row):
        raise NotThin(_SCALED_BY_ROW)
    if by_row:
        gathered = _gather_reason(n, [f.var for f in by_row])
        raise NotThin(gathered or "A or B depends on the row beside its adapter")
    if not any(table & set(f.indices) for f in rest):
        raise NotThin
    selection = Selection(
        var=first.var,
        row_dims=first.dims[:-1],
        table_indices=first.dims[-1],
        is_ragged=choice.is_ragged,
        outside=outside,
    )
    return rest, selection


def _same_input(linear: Linear, x: Factor) -> Names | None:
    """Returns how to rename a term so that x is the linear's; None: it is another."""
    if x.var is not linear.x.var:
        return None
    outer = {*linear.rows, *linear.out_indices}
    names: Names = {}
    for mine, theirs in zip(linear.x.dims, x.dims, strict=True):
        left = list(mine)
        for index in theirs:
            parts: list[Index] = []
            while left and linear.size_of(parts) < linear.size_of([index]):
                parts.append(left.pop(0))
            if linear.size_of(parts) != linear.size_of([index]):
                return None
            if outer & {index, *parts} and parts != [index]:
                return None
            names[index] = tuple(parts)
    return names


def _other_input(linear: Linear, term: Term) -> list[str]:
    """Explains a term that would be a branch if it had the same x."""
    arrays = [f for f in term.factors if f.is_number]
    if any(f.var is linear.x.var for f in arrays):
        return [
            "the branch has another axis of x as rows, or sums over another axis, than "
            "the frozen product"
        ]
    outer = {*linear.rows, *linear.out_indices}
    for x in units_of(term):
        factors = [f for i, f in enumerate(term.factors) if i not in x.members]
        inner = [i for i in x.array.indices if i not in outer]
        table = [i for f in factors if f.choice is not None for i in f.dims[-1]]
        numbers = [f for f in factors if f.is_number]
        try:
            _, _, bond = _split_factors(linear, inner, numbers, table)
        except NotThin:
            continue
        if inner and bond:
            return ["the branch and the frozen product have different x"]
    return []


def _mask(n: Normalizer, linear: Linear, masks: Sequence[Factor]) -> Factor | None:
    if not masks:
        return None
    for mask in masks:
        if set(mask.indices) <= {*linear.rows, *linear.in_indices}:
            continue
        if _compares_floats(n, mask):
            raise NotThin("it chooses adapters by ids that are floats, not integers")
        raise NotThin(
            "the branch's mask is on its result or inside it, and kernels mask x only; "
            "for gradients of branches with dropout, call jaxlora.fuse before jax.grad"
        )
    if len(masks) > 1:
        raise NotThin("the branch has several masks")
    return masks[0]


def _compares_floats(n: Normalizer, mask: Factor) -> bool:
    eqn = n.graph.equation(mask.var)
    if eqn is None or eqn.primitive.name != "eq":
        return False
    return any(is_float(v.aval) for v in eqn.invars)


def _split_factors(
    linear: Linear,
    inner: Sequence[Index],
    factors: Sequence[Factor],
    table: Sequence[Index],
) -> tuple[list[Factor], list[Factor], tuple[Index, ...]]:
    """Splits the factors into A and B, with the smallest rank between them.

    Args:
        linear: The linear.
        inner: Indices of the features of the branch's input.
        factors: The factors.
        table: Indices of the adapters in tables.

    Raises:
        NotThin: They are not A and B of a rank that is small beside the linear.
    """
    _check_features(linear, inner, factors)
    rows, outer = set(linear.rows), set(linear.out_indices)
    fixed_a = [f for f in factors if not set(inner).isdisjoint(f.indices)]
    fixed_b = [f for f in factors if not outer.isdisjoint(f.indices)]
    if any(f in fixed_b for f in fixed_a):
        raise NotThin
    fixed = (*fixed_a, *fixed_b)
    free = [f for f in factors if f not in fixed]
    by_row = rows.intersection(i for f in fixed for i in f.indices)
    if any(rows.intersection(f.indices) - by_row for f in free):
        raise NotThin(_SCALED_BY_ROW)
    best = None
    for sides in itertools.product((False, True), repeat=len(free)):
        a = fixed_a + [f for f, in_a in zip(free, sides, strict=True) if in_a]
        b = fixed_b + [f for f, in_a in zip(free, sides, strict=True) if not in_a]
        shared = {i for f in b for i in f.indices} - {*rows, *inner, *outer, *table}
        bond = tuple(dict.fromkeys(i for f in a for i in f.indices if i in shared))
        if best is None or linear.size_of(bond) < linear.size_of(best[2]):
            best = a, b, bond
    assert best is not None
    _check_rank(linear, best[2])
    return best


def _check_features(
    linear: Linear, inner: Sequence[Index], factors: Sequence[Factor]
) -> None:
    """Raises `NotThin` if A and B lack features of x or of the result."""
    held = {i for f in factors for i in f.indices}
    if not held.issuperset(inner):
        raise NotThin("A does not multiply all features of x")
    if not held.issuperset(i for i in linear.out_indices if i not in linear.rows):
        raise NotThin(
            "the branch has another shape than the frozen product: it is repeated over "
            "output features"
        )


def _check_rank(linear: Linear, rank_indices: tuple[Index, ...]) -> None:
    """Raises `NotThin` if a branch's rank is not small beside the frozen product."""
    rank, k, n = linear.size_of(rank_indices), linear.in_features, linear.out_features
    if rank > min(k, n):
        raise NotThin  # nothing of low rank
    limit = min(MAX_RANK, min(k, n) // RANK_FRACTION)
    if rank > limit:
        raise NotThin(
            f"the branch's rank {rank} is not small: it may be at most {limit}, which "
            f"is the smaller of {MAX_RANK} and min(K, N) / {RANK_FRACTION} for "
            f"K={k} and N={n}"
        )
