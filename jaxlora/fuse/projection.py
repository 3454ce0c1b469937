"""Makes the projection of a site from a linear that was found."""

from typing import Any

import numpy as np
from jax.extend import core

from jaxlora.fuse.forms import Dims, Form, Indices, Term
from jaxlora.fuse.linear import Linear, rank_of
from jaxlora.fuse.rows import is_sorted, sorted_blocks
from jaxlora.fuse.site import Operand, SiteProjection
from jaxlora.pallas_kernels.dropout import TILE_TOKENS


def projection_of(
    linear: Linear, root: core.Var, form: Form, sizes: dict[int, int]
) -> SiteProjection:
    """Returns the projection of a linear.

    Summands that no variable holds are left out.

    Args:
        linear: The linear.
        root: The variable that holds its sum.
        form: The form of the sum.
        sizes: The size of each index.
    """
    rest = (_summand(term, form.dims) for term in linear.rest)
    return SiteProjection(
        root=root,
        root_dims=form.dims,
        w=linear.w.operand,
        w_scales=tuple(f.operand for f in linear.w_scales),
        branches=linear.branches,
        mask=linear.mask,
        bias=None if linear.bias is None else linear.bias.factors[0].operand,
        scales=tuple(f.operand for f in linear.scales),
        rest=tuple(summand for summand in rest if summand is not None),
        out_indices=linear.out_indices,
        rank=rank_of(linear.branches, sizes),
        out_features=int(np.prod([sizes[i] for i in linear.out_indices])),
    )


def block_sizes(linear: Linear, indices: Indices) -> tuple[int, ...]:
    """Returns the sizes of token blocks that suit a linear, the best first."""
    rows = indices.size_of(i for i in linear.rows if i not in linear.adapter_indices)
    if linear.selection is not None and is_sorted(rows):
        table = indices.size_of(linear.selection.table_indices)
        return sorted_blocks(indices.size_of(linear.rows), table)
    return rows, -(-rows // TILE_TOKENS) * TILE_TOKENS


def _summand(term: Term, dims: Dims) -> tuple[float, Operand] | None:
    """Returns a number and a variable whose product a term is, or None.

    Args:
        term: The term.
        dims: What the dimensions of the sum stand for.
    """
    (first, *others), outer = term.factors, {i for dim in dims for i in dim}
    if not others and first.is_number and set(first.indices) <= outer:
        return term.coefficient, term.factors[0].operand
    for group in term.groups:
        if len(group.members) == len(term.factors):
            aval: Any = group.var.aval
            operand = Operand(var=group.var, dims=group.dims, dtype=aval.dtype)
            return term.coefficient / group.number, operand
    return None
