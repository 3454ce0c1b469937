"""Recognises a frozen product and its low-rank branches in a sum of products."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxlora.fuse.normal import Factor, Form, Indices, Names, Term, rename_term
from jaxlora.fuse.site import Branch, Index, Mask, Operand

MAX_RANK = 256  # of the tuning tables; larger branches are compute-bound
RANK_FRACTION = 4  # a branch then costs at most half of the frozen product


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A frozen product in a sum, and its branches.

    Attributes:
        x: The factor that is the input.
        w: The factor that is the weight.
        base: The term of the frozen product.
        rows: Indices of the rows.
        in_indices: Indices that the product sums over.
        out_indices: Indices of the output features.
        branches: The branches, with the terms that they were.
        adapter_indices: The rows' indices on which A or B depend.
        mask: The branches' dropout mask.
        bias: The term that is a vector over the output features.
        rest: The other terms.
    """

    x: Factor
    w: Factor
    base: Term
    rows: tuple[Index, ...]
    in_indices: tuple[Index, ...]
    out_indices: tuple[Index, ...]
    branches: tuple[tuple[Branch, Term], ...] = ()
    adapter_indices: tuple[Index, ...] = ()
    mask: Mask | None = None
    bias: Term | None = None
    rest: tuple[Term, ...] = ()


class NotThin(Exception):
    """A term is no low-rank branch of a product; the message may say why."""


def find_linear(form: Form, indices: Indices) -> tuple[Linear | None, list[str]]:
    """Finds a frozen product with branches in a sum.

    Returns:
        The linear with the most branches, or None; and why near misses are none.
    """
    reasons: list[str] = []
    best: Linear | None = None
    for base in form.terms:
        for linear, others in _bases(form, base):
            found = _with_branches(linear, others, indices, reasons)
            if found and (not best or len(found.branches) > len(best.branches)):
                best = found
    return best, [] if best else reasons


def _bases(form: Form, base: Term):
    """Yields the ways to read a term as x times w, with the other terms."""
    others = [t for t in form.terms if t is not base]
    if any(f.keeps is not None for f in base.factors):
        base, others = _without_common_mask(base, others)
    if len(base.factors) != 2 or any(f.keeps is not None for f in base.factors):
        return
    outer = set(form.indices)
    for x, w in itertools.permutations(base.factors):
        rows = tuple(i for i in x.indices if i in outer)
        in_indices = tuple(i for i in x.indices if i not in outer)
        out_indices = tuple(i for i in w.indices if i in outer)
        # A variable's dimensions may carry one index once only.
        if in_indices and set(in_indices) == set(w.indices) - outer:
            yield (
                Linear(
                    x=x,
                    w=w,
                    base=base,
                    rows=rows,
                    in_indices=in_indices,
                    out_indices=out_indices,
                ),
                others,
            )


def _without_common_mask(base: Term, others: list[Term]) -> tuple[Term, list[Term]]:
    """Reads a masked x as an array of its own, in all terms that have its mask."""
    mask = next(f for f in base.factors if f.keeps is not None)
    if mask.masked is None:
        return base, others
    return _absorb(base, mask.var), [_absorb(t, mask.var) for t in others]


def _absorb(term: Term, mask_var) -> Term:
    """Replaces a mask and the array that it multiplies by their product's variable."""
    masks = [f for f in term.factors if f.var is mask_var]
    if len(masks) != 1 or masks[0].masked is None:
        return term
    number, var, dims = masks[0].masked
    arrays = [
        f
        for f in term.factors
        if f.keeps is None and set(f.indices) == set(masks[0].indices)
    ]
    if len(arrays) != 1:
        return term
    product = Factor(var, dims, arrays[0].dtype)
    rest = tuple(f for f in term.factors if f is not masks[0] and f is not arrays[0])
    return dataclasses.replace(
        term, coefficient=term.coefficient / number, factors=(product, *rest)
    )


def _with_branches(
    linear: Linear, others: Sequence[Term], indices: Indices, reasons: list[str]
) -> Linear | None:
    branches, rest, masks = [], [], []
    for term in others:
        try:
            branch, mask = _branch(linear, term, indices)
        except NotThin as error:
            reasons += error.args
            rest.append(term)
            continue
        branches.append((branch, term))
        masks.append(mask)
    if not branches:
        return None
    try:
        _check_base(linear, [b for b, _ in branches])
        mask = _common_mask(masks)
    except NotThin as error:
        reasons += error.args
        return None
    adapters = {i for b, _ in branches for f in (*b.a, *b.b) for i in f.indices}
    bias = next((t for t in rest if _is_bias(t, linear)), None)
    return dataclasses.replace(
        linear,
        branches=tuple(branches),
        adapter_indices=tuple(i for i in linear.rows if i in adapters),
        mask=mask,
        bias=bias,
        rest=tuple(t for t in rest if t is not bias),
    )


def _check_base(linear: Linear, branches: Sequence[Branch]) -> None:
    """Raises `NotThin` if the kernels cannot compute the frozen product."""
    if set(linear.w.indices) & set(linear.rows):
        raise NotThin("its frozen weight is another one for each sequence")
    if linear.base.coefficient != 1:
        raise NotThin(
            f"its frozen product is multiplied by {linear.base.coefficient:g}"
        )


def _common_mask(masks: Sequence[Mask | None]) -> Mask | None:
    first, *others = masks
    for other in others:
        same = first is other is None or (
            first is not None
            and other is not None
            and first.operand.var is other.operand.var
            and first.operand.dims == other.operand.dims
            and first.keeps == other.keeps
        )
        if not same:
            raise NotThin("its branches have different dropout masks")
    return first


def _is_bias(term: Term, linear: Linear) -> bool:
    return (
        len(term.factors) == 1
        and term.factors[0].keeps is None
        and term.coefficient == 1
        and set(term.factors[0].indices) == set(linear.out_indices)
    )


def _branch(linear: Linear, term: Term, indices: Indices) -> tuple[Branch, Mask | None]:
    """Reads a term as a low-rank branch of a linear; raises `NotThin` if it is none."""
    arrays = [f for f in term.factors if f.keeps is None]
    if len(arrays) < 3:
        raise NotThin
    for x in arrays:
        if (names := _same_input(linear, x, term)) is not None:
            break
    else:
        raise NotThin(*_other_input(linear, arrays))
    term = rename_term(dataclasses.replace(term, factors=_without(term, x)), names)
    factors = [f for f in term.factors if f.keeps is None]
    if any(f.var is linear.x.var for f in (*factors, linear.w)):
        raise NotThin("its weights are the input itself")
    mask = _mask(linear, [f for f in term.factors if f.keeps is not None])
    a, b, rank_indices = _split(linear, factors, indices)
    _check_rank(linear, rank_indices, indices)
    return (
        Branch(
            a=tuple(map(_operand, a)),
            b=tuple(map(_operand, b)),
            rank_indices=rank_indices,
            coefficient=term.coefficient,
        ),
        mask,
    )


def _without(term: Term, x: Factor) -> tuple[Factor, ...]:
    return tuple(f for f in term.factors if f is not x)


def _same_input(linear: Linear, x: Factor, term: Term) -> Names | None:
    """Returns how to rename a term so that x is the linear's; None: it is another."""
    if x.var is not linear.x.var or len(x.indices) != len(linear.x.indices):
        return None
    names: Names = {}
    for mine, theirs in zip(linear.x.dims, x.dims, strict=True):
        if len(mine) != len(theirs):
            return None
        for i, j in zip(mine, theirs, strict=True):
            if i in linear.rows or j in linear.rows or j in linear.out_indices:
                if i != j:
                    return None
            else:
                names[j] = (i,)
    return names


def _other_input(linear: Linear, arrays: Sequence[Factor]) -> list[str]:
    """Explains a term that has the shape of a branch but not the same x."""
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
            "the branch's mask is on its result or inside it, not on x; kernels have "
            "masks of x only"
        )
    if mask.keeps is None:
        raise NotThin
    return Mask(operand=_operand(mask), keeps=mask.keeps)


def _operand(factor: Factor) -> Operand:
    return Operand(var=factor.var, dims=factor.dims)


def _split(
    linear: Linear, factors: Sequence[Factor], indices: Indices
) -> tuple[list[Factor], list[Factor], tuple[Index, ...]]:
    """Splits the factors into A and B, with the smallest rank between them."""
    inner, outer = set(linear.in_indices), set(linear.out_indices)
    held = {i for f in factors for i in f.indices}
    if not (inner <= held and outer <= held):
        raise NotThin
    if any(inner & set(f.indices) and outer & set(f.indices) for f in factors):
        raise NotThin
    fixed_a = [f for f in factors if inner & set(f.indices)]
    free = [f for f in factors if not (inner | outer) & set(f.indices)]
    fixed_b = [f for f in factors if outer & set(f.indices)]
    best = None
    for sides in itertools.product((False, True), repeat=len(free)):
        a = fixed_a + [f for f, in_a in zip(free, sides, strict=True) if in_a]
        b = fixed_b + [f for f, in_a in zip(free, sides, strict=True) if not in_a]
        bond = _shared(a, b, exclude={*linear.rows, *inner, *outer})
        if best is None or indices.size_of(bond) < indices.size_of(best[2]):
            best = a, b, bond
    assert best is not None
    return best


def _shared(
    a: Sequence[Factor], b: Sequence[Factor], exclude: set[Index]
) -> tuple[Index, ...]:
    in_b = {i for f in b for i in f.indices}
    in_a = (i for f in a for i in f.indices)
    return tuple(dict.fromkeys(i for i in in_a if i in in_b and i not in exclude))


def _check_rank(
    linear: Linear, rank_indices: tuple[Index, ...], indices: Indices
) -> None:
    rank = indices.size_of(rank_indices)
    k, n = (indices.size_of(i) for i in (linear.in_indices, linear.out_indices))
    if rank > min(MAX_RANK, min(k, n) // RANK_FRACTION):
        raise NotThin(
            f"the branch's rank {rank} is not small: the limits are {MAX_RANK} and "
            f"a {RANK_FRACTION}th of the {k} x {n} features"
        )


def rank_of(branches: Sequence[Branch], sizes) -> int:
    """Returns the sum of the branches' ranks."""
    return sum(math.prod(sizes[i] for i in b.rank_indices) for b in branches)
