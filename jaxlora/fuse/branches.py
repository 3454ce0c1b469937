"""Recognises a frozen product and its low-rank branches in a sum of products."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlora.fuse.forms import Atom, Factor, Form, Indices, Names, Term, rename_term
from jaxlora.fuse.linear import Linear, NotThin, check_rank, split_factors
from jaxlora.fuse.site import Branch, Index, Mask, Selection


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """A branch, with the parts that all branches of a linear must share."""

    branch: Branch
    mask: Mask | None
    selection: Selection | None
    equations: frozenset[int]
    term: Term


def find_linear(form: Form, indices: Indices) -> tuple[Linear | None, list[str]]:
    """Finds a frozen product with branches in a sum.

    Returns:
        The linear with the most branches, or None; and the reasons of near misses.
    """
    reasons: list[str] = []
    best: Linear | None = None
    for base in form.terms:
        for linear in _bases(form, base):
            others = [t for t in form.terms if t is not base]
            found = _with_branches(linear, others, indices, reasons)
            if found and (not best or len(found.branches) > len(best.branches)):
                best = found
    return best, [] if best else reasons


def _units(term: Term) -> list[_Unit]:
    """Returns the numeric arrays of a term, and products of them that are variables."""
    units = [
        _Unit(factor=f, number=1.0, members=frozenset({i}), equations=frozenset())
        for i, f in enumerate(term.factors)
        if f.is_number
    ]
    for group in term.groups:
        aval: Any = group.var.aval
        if len(group.members) == len(term.factors) and term.rounded is not None:
            continue
        units.append(
            _Unit(
                factor=Factor(group.var, group.dims, aval.dtype),
                number=group.number,
                members=group.members,
                equations=group.equations,
            )
        )
    return units


def _bases(form: Form, base: Term) -> Iterator[Linear]:
    """Yields the ways to read a term as x times w, those with the fewest scales first.

    Scales of output features behind the product, as of int8 codes, belong to w.
    """
    outer = set(form.indices)
    pairs = [
        (x, w)
        for x, w in itertools.permutations(_units(base), 2)
        if not x.members & w.members
    ]
    pairs.sort(key=lambda pair: -sum(len(unit.members) for unit in pair))
    for x, w in pairs:
        inner = set(x.factor.indices) - outer
        if not inner or inner != set(w.factor.indices) - outer:
            continue
        used, columns = x.members | w.members, outer & set(w.factor.indices)
        scales = [f for i, f in enumerate(base.factors) if i not in used]
        if not all(f.is_number and set(f.indices) <= columns for f in scales):
            continue
        yield Linear(
            x=x.factor,
            w=w.factor,
            w_scales=tuple(scales),
            matrices=_matrices(
                [w.factor, *(base.factors[i] for i in w.members)], inner
            ),
            base=base,
            coefficient=base.coefficient / (x.number * w.number),
            rows=tuple(i for i in x.factor.indices if i in outer),
            in_indices=tuple(i for i in x.factor.indices if i not in outer),
            out_indices=tuple(i for i in w.factor.indices if i in outer),
            equations=base.equations - x.equations - w.equations,
        )


def _matrices(factors: Sequence[Factor], inner: set[Index]) -> tuple[Atom, ...]:
    """Returns the arrays that have input and output features."""
    return tuple(
        f.var for f in factors if inner & set(f.indices) and set(f.indices) - inner
    )


def _with_branches(
    linear: Linear, others: Sequence[Term], indices: Indices, reasons: list[str]
) -> Linear | None:
    found, rest = [], []
    for term in others:
        try:
            found.append(_branch(linear, term, indices))
        except NotThin as error:
            reasons += error.args
            rest.append(term)
    if not found:
        return None
    bias = next((t for t in rest if _is_bias(t, linear)), None)
    used = [f.equations for f in found] + ([] if bias is None else [bias.equations])
    linear = dataclasses.replace(
        linear,
        branches=tuple(f.branch for f in found),
        branch_dtypes=tuple(f.term.rounded for f in found),
        restored=any(t.restored for t in (linear.base, *(f.term for f in found))),
        branch_precisions=tuple(f.term.precisions for f in found),
        bias=bias,
        rest=tuple(t for t in rest if t is not bias),
        equations=linear.equations.union(*used),
    )
    try:
        linear = _with_common_parts(linear, found)
        _check_base(linear, indices)
    except NotThin as error:
        reasons += error.args
        return None
    return linear


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


def _check_base(linear: Linear, indices: Indices) -> None:
    """Raises `NotThin` if the kernels cannot compute the sum."""
    if set(linear.w.indices) & set(linear.rows):
        raise NotThin("its frozen weight differs by sequence")
    if linear.coefficient != 1:
        raise NotThin(f"its frozen product is multiplied by {linear.coefficient:g}")
    factors = [o.var for b in linear.branches for o in (*b.a, *b.b)]
    if any(f.var is factor for f in linear.w_scales for factor in factors):
        raise NotThin(
            "its frozen product and a branch are scaled by the same array: scale their "
            "sum"
        )
    adapters = linear.adapter_indices
    rows = indices.size_of(linear.rows)
    if adapters and linear.selection is None and indices.size_of(adapters) == rows:
        raise NotThin("each row has its own A and B or its own scale")


def _is_bias(term: Term, linear: Linear) -> bool:
    return (
        len(term.factors) == 1
        and term.factors[0].is_number
        and term.coefficient == 1
        and set(term.factors[0].indices) == set(linear.out_indices)
    )


def _branch(linear: Linear, term: Term, indices: Indices) -> _Found:
    """Reads a term as a low-rank branch of a linear; raises `NotThin` if it is none."""
    if sum(f.is_number for f in term.factors) < 3:
        raise NotThin
    for x in _units(term):
        if (names := _same_input(linear, x.factor, indices)) is not None:
            break
    else:
        raise NotThin(*_other_input(linear, term))
    kept = [f for i, f in enumerate(term.factors) if i not in x.members]
    kept = list(
        rename_term(
            dataclasses.replace(term, factors=tuple(kept), groups=()), names
        ).factors
    )
    factors, selection = _selected(linear, kept)
    if any(f.var is linear.x.var for f in (*factors, linear.w)):
        raise NotThin("its weights are the input itself")
    if any(f.var is matrix for f in factors for matrix in linear.matrices):
        raise NotThin("the branch reads the frozen product, as a series adapter does")
    mask = _mask(linear, [f for f in factors if f.keeps is not None])
    factors = [f for f in factors if f.is_number]
    table = () if selection is None else selection.table_indices
    a, b, rank_indices = split_factors(linear, factors, table, indices)
    check_rank(linear, rank_indices, indices)
    branch = Branch(
        a=tuple(f.operand for f in a),
        b=tuple(f.operand for f in b),
        rank_indices=rank_indices,
        coefficient=term.coefficient / x.number,
    )
    return _Found(
        branch=branch,
        mask=mask,
        selection=selection,
        equations=term.equations - x.equations,
        term=term,
    )


def _selected(
    linear: Linear, factors: list[Factor]
) -> tuple[list[Factor], Selection | None]:
    """Replaces the choices of a term by one selection."""
    choices = [f for f in factors if f.choice is not None]
    if not choices:
        return factors, None
    first, choice = choices[0], choices[0].choice
    assert choice is not None
    if any(f.choice != choice or f.dims[:-1] != first.dims[:-1] for f in choices):
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
    if any(set(f.indices) & set(linear.rows) for f in rest if f.is_number):
        raise NotThin("A or B depends on the row beside its adapter")
    if not any(table & set(f.indices) for f in rest):
        raise NotThin
    selection = Selection(
        var=first.var,
        row_dims=first.dims[:-1],
        table_indices=first.dims[-1],
        is_ragged=choice.is_ragged,
        outside=choice.outside,
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


def _other_input(linear: Linear, term: Term) -> list[str]:
    """Explains a term that has the shape of a branch but not the same x."""
    arrays = [f for f in term.factors if f.is_number]
    if any(f.var is linear.x.var for f in arrays):
        return ["the branch sums over another axis of x than the frozen product"]
    outer = {i for f in arrays for i in f.indices}
    if len(arrays) == 3 and set(linear.out_indices) <= outer:
        return ["the branch and the frozen product have different x"]
    return []


def _mask(linear: Linear, masks: Sequence[Factor]) -> Mask | None:
    if not masks:
        return None
    if len(masks) > 1:
        raise NotThin("the branch has several masks")
    (mask,) = masks
    if not set(mask.indices) <= {*linear.rows, *linear.in_indices}:
        raise NotThin(
            "the branch's mask is on its result or inside it, and kernels mask x only; "
            "for gradients of branches with dropout, call jaxlora.fuse before jax.grad"
        )
    assert mask.keeps is not None
    return Mask(operand=mask.operand, keeps=mask.keeps)
