"""A frozen product with low-rank branches, and how a term is split into A and B."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxlora.fuse.normal_forms.forms import Atom, Factor, Indices, Term
from jaxlora.fuse.site import Branch, Index, Mask, Selection

MAX_RANK = 256  # of the tuning tables; larger branches are compute-bound
SCALED_BY_ROW = "the branch's scale differs by row"
RANK_FRACTION = 4  # a branch then costs at most half of the frozen product


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A frozen product in a sum, and its branches.

    Attributes:
        x: The factor that is the input.
        parts: The variables that are slices of the input.
        w: The factor that is the weight.
        w_scales: Factors that scale the weight's output features.
        matrices: The weight, and matrices of which it is a product with scales.
        base: The term of the frozen product.
        coefficient: The number that multiplies the frozen product.
        rows: Indices of the rows.
        in_indices: Indices that the product sums over.
        out_indices: Indices of the output features.
        branches: The branches.
        branch_dtypes: The smallest dtype to which each branch was rounded.
        restored: Whether a sum in the product or in a branch was rounded and then cast
            to a dtype that holds more values, which the kernels do not do.
        branch_precisions: What the products of each branch were asked for.
        selection: How rows choose their adapter.
        mask: The branches' dropout mask.
        bias: The term that is a vector over the output features.
        scales: Factors that scale the sum of the product, the branches and the bias.
        rest: The other terms.
        repeats: Indices of the sum over which the frozen product is repeated.
        equations: The equations that compute the product, the branches and the bias.
    """

    x: Factor
    w: Factor
    matrices: tuple[Atom, ...]
    base: Term
    coefficient: float
    rows: tuple[Index, ...]
    in_indices: tuple[Index, ...]
    out_indices: tuple[Index, ...]
    branches: tuple[Branch, ...] = ()
    branch_dtypes: tuple[np.dtype | None, ...] = ()
    restored: bool = False
    branch_precisions: tuple[frozenset[lax.Precision], ...] = ()
    parts: frozenset[Any] = frozenset()
    selection: Selection | None = None
    w_scales: tuple[Factor, ...] = ()
    mask: Mask | None = None
    bias: Term | None = None
    scales: tuple[Factor, ...] = ()
    rest: tuple[Term, ...] = ()
    repeats: frozenset[Index] = frozenset()
    equations: frozenset[int] = frozenset()

    @property
    def adapter_indices(self) -> tuple[Index, ...]:
        """The indices of the rows on which their adapter depends."""
        if self.selection is not None:
            chosen = {i for dim in self.selection.row_dims for i in dim}
        else:
            operands = (o for branch in self.branches for o in (*branch.a, *branch.b))
            chosen = {i for o in operands for i in o.indices}
        return tuple(i for i in self.rows if i in chosen)


class NotThin(Exception):
    """A term is no low-rank branch of a product; the message may say why."""


def split_factors(
    linear: Linear,
    factors: Sequence[Factor],
    table: Sequence[Index],
    indices: Indices,
) -> tuple[list[Factor], list[Factor], tuple[Index, ...]]:
    """Splits the factors into A and B, with the smallest rank between them."""
    inner, outer = set(linear.in_indices), set(linear.out_indices)
    check_features(linear, factors)
    if any(inner & set(f.indices) and outer & set(f.indices) for f in factors):
        raise NotThin
    fixed_a = [f for f in factors if inner & set(f.indices)]
    free = [f for f in factors if not (inner | outer) & set(f.indices)]
    fixed_b = [f for f in factors if outer & set(f.indices)]
    _check_scales(linear, free, [*fixed_a, *fixed_b])
    best = None
    for sides in itertools.product((False, True), repeat=len(free)):
        a = fixed_a + [f for f, in_a in zip(free, sides, strict=True) if in_a]
        b = fixed_b + [f for f, in_a in zip(free, sides, strict=True) if not in_a]
        bond = _shared(a, b, exclude={*linear.rows, *inner, *outer, *table})
        if best is None or indices.size_of(bond) < indices.size_of(best[2]):
            best = a, b, bond
    assert best is not None
    return best


def check_features(linear: Linear, factors: Sequence[Factor]) -> None:
    """Raises `NotThin` if A and B lack features of x or of the result."""
    held = {i for f in factors for i in f.indices}
    if not held.issuperset(linear.in_indices):
        raise NotThin("A does not multiply all features of x")
    if not held.issuperset(i for i in linear.out_indices if i not in linear.rows):
        raise NotThin(
            "the branch has another shape than the frozen product: it is repeated over "
            "output features"
        )


def _check_scales(
    linear: Linear, free: Sequence[Factor], fixed: Sequence[Factor]
) -> None:
    """Raises `NotThin` if a scale depends on rows on which A and B do not depend."""
    rows = set(linear.rows)
    by_row = {i for f in fixed for i in f.indices} & rows
    if any(set(f.indices) & rows - by_row for f in free):
        raise NotThin(SCALED_BY_ROW)


def _shared(
    a: Sequence[Factor], b: Sequence[Factor], exclude: set[Index]
) -> tuple[Index, ...]:
    in_b = {i for f in b for i in f.indices}
    in_a = (i for f in a for i in f.indices)
    return tuple(dict.fromkeys(i for i in in_a if i in in_b and i not in exclude))


def check_rank(
    linear: Linear, rank_indices: tuple[Index, ...], indices: Indices
) -> None:
    """Raises `NotThin` if a branch's rank is not small beside the frozen product."""
    rank = indices.size_of(rank_indices)
    k, n = (indices.size_of(i) for i in (linear.in_indices, linear.out_indices))
    if rank > min(k, n):
        raise NotThin  # nothing of low rank
    limit = min(MAX_RANK, min(k, n) // RANK_FRACTION)
    if rank > limit:
        raise NotThin(
            f"the branch's rank {rank} is not small: it may be at most {limit}, which "
            f"is the smaller of {MAX_RANK} and min(K, N) / {RANK_FRACTION} for "
            f"K={k} and N={n}"
        )


def rank_of(branches: Sequence[Branch], sizes) -> int:
    """Returns the sum of the branches' ranks."""
    return sum(math.prod(sizes[i] for i in b.rank_indices) for b in branches)
