"""Recognises a frozen product and its low-rank branches in a sum of products."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxlora.fuse.linears.bases import Base, bases_of, units_of, without_scales
from jaxlora.fuse.linears.linear import (
    SCALED_BY_ROW,
    Linear,
    NotThin,
    check_features,
    check_rank,
    split_factors,
)
from jaxlora.fuse.normal_forms.choose import other_fill
from jaxlora.fuse.normal_forms.forms import (
    Factor,
    Form,
    Indices,
    Names,
    Term,
    is_moderate,
    rename_term,
)
from jaxlora.fuse.normal_forms.like_terms import simplified
from jaxlora.fuse.normal_forms.normal import Normalizer
from jaxlora.fuse.site import Branch, Index, Mask, Selection


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """A branch, with the parts that all branches of a linear must share."""

    branch: Branch
    mask: Mask | None
    selection: Selection | None
    equations: frozenset[int]
    term: Term


class OtherInput(NotThin):
    """A term does not read the input of a frozen product as the product does."""


def find_linear(n: Normalizer, form: Form) -> tuple[Linear | None, list[str]]:
    """Finds a frozen product with branches in a sum.

    Returns:
        The linear with the most branches, if possible of a product that is not scaled
        by a number, or None; and the reasons for which other
        terms are no branches of it, or of the product that costs most.
    """
    form = simplified(n, form)
    terms = [t for t in form.terms if t.coefficient != 0]
    best: Linear | None = None
    best_reasons: list[NotThin] = []
    reasons: list[tuple[int, NotThin]] = []
    for term in terms:
        for base in bases_of(form, term):
            others = [t for t in form.terms if t is not term]
            found, why = _with_branches(n, base, others)
            cost = n.indices.size_of({*base.linear.x.indices, *base.linear.w.indices})
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
    n: Normalizer, base: Base, others: Sequence[Term]
) -> tuple[Linear | None, list[NotThin]]:
    """Adds the branches and the bias, and says why other terms are no branches.

    Returns:
        The linear; None if it has no branches. And the reasons.
    """
    linear = base.linear
    found, biases, rest = [], [], []
    reasons: list[NotThin] = []
    for term in others:
        inner = without_scales(term, linear.scales)
        try:
            if inner is None or inner.coefficient == 0:
                raise NotThin
            found.append(_branch(n, linear, inner))
            continue
        except NotThin as error:
            reasons.append(error)
        if inner is not None and not biases and is_bias(inner, linear):
            biases.append(inner)
        else:
            rest.append(term)
    if not found:
        return None, reasons
    restored = any(t.restored for t in (linear.base, *(f.term for f in found)))
    if restored:  # the kernels would round the sum with the bias
        rest, biases = [t for t in others if t in (*rest, *biases)], []
    used = [f.equations for f in found] + [bias.equations for bias in biases]
    linear = dataclasses.replace(
        linear,
        branches=tuple(f.branch for f in found),
        branch_dtypes=tuple(f.term.rounded for f in found),
        restored=restored,
        branch_precisions=tuple(f.term.precisions for f in found),
        bias=next(iter(biases), None),
        rest=tuple(rest),
        equations=linear.equations.union(*used),
    )
    try:
        if base.obstacle is not None:
            raise NotThin(base.obstacle)
        linear = _with_common_parts(linear, found)
        _check_base(n, linear)
    except NotThin as error:
        return None, [*reasons, error]
    return linear, reasons


def _with_common_parts(linear: Linear, found: Sequence[_Found]) -> Linear:
    """Adds the mask and the selection, which all branches must share."""
    for one in found[1:]:
        if not _same_mask(one.mask, found[0].mask):
            raise NotThin("its branches have different dropout masks")
        if (one.selection is None) != (found[0].selection is None):
            raise NotThin("its branches choose their adapters in different ways")
    if len(found) > 1 and found[0].selection is not None:
        raise NotThin("it has several branches that choose their adapters")
    return dataclasses.replace(linear, mask=found[0].mask, selection=found[0].selection)


def _same_mask(first: Mask | None, second: Mask | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        first.operand.var is second.operand.var
        and first.operand.dims == second.operand.dims
        and first.keeps == second.keeps
    )


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
    rows = n.indices.size_of(linear.rows)
    if adapters and linear.selection is None and n.indices.size_of(adapters) == rows:
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


def is_bias(term: Term, linear: Linear) -> bool:
    """Whether a term is a vector over the output features, scaled as the product is."""
    return term.coefficient == linear.coefficient and is_vector(term, linear)


def is_vector(term: Term, linear: Linear) -> bool:
    """Whether a term is a multiple of a vector over the output features."""
    return (
        len(term.factors) == 1
        and term.factors[0].is_number
        and set(term.factors[0].indices) == set(linear.out_indices)
    )


def _branch(n: Normalizer, linear: Linear, term: Term) -> _Found:
    """Reads a term as a low-rank branch of a linear; raises `NotThin` if it is none."""
    if sum(f.is_number for f in term.factors) < 3:
        raise NotThin
    for x in units_of(term):
        if (names := _same_input(linear, x.factor, n.indices)) is not None:
            break
    else:
        raise OtherInput(*_other_input(n, linear, term))
    kept = [f for i, f in enumerate(term.factors) if i not in x.members]
    kept = list(
        rename_term(
            dataclasses.replace(term, factors=tuple(kept), groups=()), names
        ).factors
    )
    check_features(linear, kept)
    if any(linear.repeats & {*f.indices} for f in kept):
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
    a, b, rank_indices = split_factors(linear, factors, table, n.indices)
    check_rank(linear, rank_indices, n.indices)
    branch = Branch(
        a=tuple(f.operand for f in a),
        b=tuple(f.operand for f in b),
        rank_indices=rank_indices,
        coefficient=term.coefficient / x.number / linear.coefficient,
        products=tuple(
            frozenset(term.factors[i].var for i in group.members)
            for group in term.groups
            if not group.members & x.members
        ),
    )
    return _Found(
        branch=branch,
        mask=mask,
        selection=selection,
        equations=term.equations - x.equations,
        term=term,
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
    rest = tuple(f for f in factors if f.choice is None)
    rest = rename_term(Term(1.0, rest), names).factors
    table = set(first.dims[-1])
    by_row = [f for f in rest if set(f.indices) & set(linear.rows) and f.is_number]
    if any(set(f.indices) <= set(linear.rows) for f in by_row):
        raise NotThin(SCALED_BY_ROW)
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
    return list(rest), selection


def _same_input(linear: Linear, x: Factor, indices: Indices) -> Names | None:
    """Returns how to rename a term so that x is the linear's; None: it is another."""
    if x.var is not linear.x.var:
        return None
    outer = {*linear.rows, *linear.out_indices}
    names: Names = {}
    for mine, theirs in zip(linear.x.dims, x.dims, strict=True):
        left = list(mine)
        for index in theirs:
            parts: list[Index] = []
            while left and indices.size_of(parts) < indices.sizes[index]:
                parts.append(left.pop(0))
            if indices.size_of(parts) != indices.sizes[index]:
                return None
            if outer & {index, *parts} and parts != [index]:
                return None
            names[index] = tuple(parts)
    return names


def _other_input(n: Normalizer, linear: Linear, term: Term) -> list[str]:
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
        inner = tuple(i for i in x.factor.indices if i not in outer)
        other = dataclasses.replace(linear, x=x.factor, in_indices=inner)
        table = {i for f in factors if f.choice is not None for i in f.dims[-1]}
        try:
            numbers = [f for f in factors if f.is_number]
            _, _, bond = split_factors(other, numbers, tuple(table), n.indices)
            check_rank(linear, bond, n.indices)
        except NotThin:
            continue
        if inner and bond:
            return ["the branch and the frozen product have different x"]
    return []


def _mask(n: Normalizer, linear: Linear, masks: Sequence[Factor]) -> Mask | None:
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
    (mask,) = masks
    assert mask.keeps is not None
    return Mask(operand=mask.operand, keeps=mask.keeps)


def _compares_floats(n: Normalizer, mask: Factor) -> bool:
    eqn = n.graph.equation(mask.var)
    if eqn is None or eqn.primitive.name != "eq":
        return False
    return any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)
