"""Linears with low-rank branches in a function, from the search to the kernels' call.

Fields with `compare=False` say where something is, or are read by the search alone.
Calls of the kernels depend on the other fields.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.graph import Graph
from jaxlora.fuse.normal_forms.forms import Atom, Dims, Factor, Index, Indices, Term


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The selection of each row's adapter from tables of A and B.

    Attributes:
        var: The adapter of each row, or if `is_ragged` the number of consecutive rows
            of each adapter.
        row_dims: For each dimension of the adapters of the rows, its indices.
        table_indices: The indices of the tables' dimension.
        is_ragged: Whether `var` holds numbers of rows.
        outside: What a row without an adapter gets: the nearest adapter (`clip`), no
            branch (`zero`) or NaN (`nan`).
    """

    var: Atom
    row_dims: Dims
    table_indices: tuple[Index, ...]
    is_ragged: bool
    outside: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Branch:
    """A low-rank term `coefficient * x A B`.

    A and B are products of arrays: traced scalings, vectors over the rank, and so on
    are factors of one of them.

    Attributes:
        a: The factors of A.
        b: The factors of B.
        rank_indices: The indices that A and B share and that are summed over.
        coefficient: Product of the constant factors; also of a mask's 1 / keep.
        mask: The dropout mask of its x, which may lack indices of x, over which it is
            constant; None: there is none.
        selection: How rows choose their adapter; None: they do not.
        term: The term that it is.
        products: The arrays of which the function itself computes a product.
        equations: The equations that compute it from x, and from A and B.
    """

    a: tuple[Factor, ...]
    b: tuple[Factor, ...]
    rank_indices: tuple[Index, ...]
    coefficient: float
    mask: Factor | None
    selection: Selection | None
    term: Term = dataclasses.field(compare=False)
    products: tuple[frozenset[Atom], ...] = dataclasses.field(compare=False)
    equations: frozenset[int] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A frozen product with branches: `scales * (x W + bias + branches) + added`.

    All branches have the same mask and selection.

    Attributes:
        root: The variable that holds the sum.
        dims: What the dimensions of `root` stand for.
        x: The input.
        w: The frozen weight.
        w_scales: Arrays over output features that the weight is multiplied by.
        branches: Its low-rank branches.
        bias: A vector over the output features; None: there is none.
        scales: Arrays that multiply the sum of the product, the branches and the bias.
        added: Further summands, each an array with a constant factor.
        rows: Indices of the rows.
        in_indices: Indices of the input features, over which the product sums.
        out_indices: Indices of the output features, slowest first.
        indices: The sizes of all indices.
        base: The term of the frozen product.
        coefficient: The number that multiplies the frozen product.
        matrices: The weight, and matrices of which it is a product with scales.
        parts: The variables that are slices of the input.
        rest: The terms of `added`, and those that no variable holds.
        rest_reason: Why one of these is no branch; None: it is not known.
        used_reason: Why a larger sum, which uses a part too, is no linear; None: it is
            not known.
        equations: The equations that compute the sum, but for `added`.
    """

    root: core.Var
    dims: Dims
    x: Factor
    w: Factor
    w_scales: tuple[Factor, ...] = ()
    branches: tuple[Branch, ...] = ()
    bias: Factor | None = None
    scales: tuple[Factor, ...] = ()
    added: tuple[tuple[float, Factor], ...] = ()
    rows: tuple[Index, ...]
    in_indices: tuple[Index, ...]
    out_indices: tuple[Index, ...]
    indices: Indices = dataclasses.field(compare=False)
    base: Term = dataclasses.field(compare=False)
    coefficient: float = dataclasses.field(compare=False)
    matrices: tuple[Atom, ...] = dataclasses.field(compare=False)
    parts: frozenset[core.Var] = dataclasses.field(default=frozenset(), compare=False)
    rest: tuple[Term, ...] = dataclasses.field(default=(), compare=False)
    rest_reason: str | None = dataclasses.field(default=None, compare=False)
    used_reason: str | None = dataclasses.field(default=None, compare=False)
    equations: frozenset[int] = dataclasses.field(compare=False)

    @property
    def mask(self) -> Factor | None:
        """The dropout mask of the branches' x."""
        return self.branches[0].mask if self.branches else None

    @property
    def selection(self) -> Selection | None:
        """How rows choose their adapter; None: each adapter has rows of its own."""
        return self.branches[0].selection if self.branches else None

    @property
    def adapter_indices(self) -> tuple[Index, ...]:
        """Indices of the rows on which their adapter depends.

        None of them: all rows have the same adapter.
        """
        if self.selection is not None:
            chosen = {i for dim in self.selection.row_dims for i in dim}
        else:
            factors = (f for branch in self.branches for f in (*branch.a, *branch.b))
            chosen = {i for f in factors for i in f.indices}
        return tuple(i for i in self.rows if i in chosen)

    @property
    def row_indices(self) -> tuple[Index, ...]:
        """The other indices of the rows."""
        adapters = self.adapter_indices
        return tuple(i for i in self.rows if i not in adapters)

    @property
    def row_order(self) -> tuple[Index, ...]:
        """Indices of the rows as the kernels store them: by adapter."""
        return *self.adapter_indices, *self.row_indices

    @property
    def table_indices(self) -> tuple[Index, ...]:
        """Indices of the adapters in A and B."""
        selection = self.selection
        return self.adapter_indices if selection is None else selection.table_indices

    def size_of(self, indices: Iterable[Index]) -> int:
        """Returns the product of the indices' sizes."""
        return self.indices.size_of(indices)

    @property
    def num_adapters(self) -> int:
        """Number of adapters, G."""
        return self.size_of(self.table_indices)

    @property
    def num_tokens(self) -> int:
        """Number of rows of all adapters, T."""
        return self.size_of(self.rows)

    @property
    def in_features(self) -> int:
        """Number of input features, K."""
        return self.size_of(self.in_indices)

    @property
    def out_features(self) -> int:
        """Number of output features, N."""
        return self.size_of(self.out_indices)

    @property
    def rank(self) -> int:
        """Sum of the branches' ranks."""
        return sum(self.size_of(branch.rank_indices) for branch in self.branches)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the frozen product and of its branches."""
        return self.base, *(branch.term for branch in self.branches)

    @property
    def precision(self) -> lax.Precision | None:
        """The precision that its products are asked for; None: they differ."""
        asked = frozenset().union(*(term.precisions for term in self.terms))
        return None if len(asked) > 1 else next(iter(asked), lax.Precision.DEFAULT)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is stored with output features first."""
        return self.w.indices[-1] in self.in_indices

    @functools.cached_property
    def inputs(self) -> tuple[core.Var, ...]:
        """The variables that it reads, each once."""
        factors = [self.x, self.w, *self.w_scales]
        factors += [f for branch in self.branches for f in (*branch.a, *branch.b)]
        factors += [f for f in (self.mask, self.bias) if f is not None]
        factors += [*self.scales, *(f for _, f in self.added)]
        atoms = [f.var for f in factors]
        if self.selection is not None:
            atoms.append(self.selection.var)
        return tuple(dict.fromkeys(v for v in atoms if isinstance(v, core.Var)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """Linears that share x and their adapters' rows: one call of the kernels.

    Attributes:
        linears: The linears.
        path: Names of the primitives around the site, outermost first, such as
            `("scan", "remat2")`.
        location: File, line and function of the code that made the root.
        graph: The index of the jaxpr that holds the site.
        precision: What its products are asked for.
        s_names: The names that the function gives s, for policies of `jax.checkpoint`.
        y_names: Those of the frozen product, the branch and their sum.
        implementation: Name of the back end.
        block_tokens: Rows of a token block of the kernels.
        keeps_s: Whether s is computed beside the kernels too, as in a function that
            already is a gradient.
    """

    linears: tuple[Linear, ...]
    path: tuple[str, ...] = dataclasses.field(compare=False)
    location: str = dataclasses.field(compare=False)
    graph: Graph = dataclasses.field(compare=False)
    precision: lax.Precision
    s_names: tuple[str, ...]
    y_names: tuple[str, ...]
    implementation: str
    block_tokens: int
    keeps_s: bool

    @property
    def first(self) -> Linear:
        """The first linear; the others have the same x, rows and adapters."""
        return self.linears[0]

    @property
    def x(self) -> Factor:
        """The input."""
        return self.first.x

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the frozen products read x and w."""
        return self.x.dtype

    @property
    def num_tokens(self) -> int:
        """Number of rows of all adapters, T."""
        return self.first.num_tokens

    @property
    def jaxpr(self) -> core.Jaxpr:
        """The jaxpr that holds the site."""
        return self.graph.jaxpr

    @property
    def roots(self) -> tuple[core.Var, ...]:
        """The variables that hold the sums."""
        return tuple(linear.root for linear in self.linears)

    @property
    def masks(self) -> set[Any]:
        """The variables that hold dropout masks."""
        masks = (linear.mask for linear in self.linears)
        return {mask.var for mask in masks if mask is not None}

    @functools.cached_property
    def inputs(self) -> tuple[core.Var, ...]:
        """The variables that it reads, each once."""
        return tuple(dict.fromkeys(v for one in self.linears for v in one.inputs))

    @functools.cached_property
    def equations(self) -> frozenset[int]:
        """The equations that are not needed once the site is replaced."""
        return frozenset().union(*(linear.equations for linear in self.linears))


def group_sites(sites: Sequence[Site]) -> tuple[Site, ...]:
    """Joins sites of one jaxpr that have the same x and do not depend on each other."""
    groups: list[Site] = []
    alike: dict[Hashable, list[int]] = {}
    for site in sites:
        places = alike.setdefault(_kind(site), [])
        for place in places:
            first = groups[place]
            if not site.graph.depends(site.inputs, first.roots):
                groups[place] = dataclasses.replace(
                    first,
                    linears=(*first.linears, *site.linears),
                    s_names=first.s_names + site.s_names,
                    y_names=first.y_names + site.y_names,
                )
                break
        else:
            places.append(len(groups))
            groups.append(site)
    return tuple(groups)


def ungroup(site: Site) -> tuple[Site, ...]:
    """Returns the sites that were joined, one for each linear."""
    return tuple(dataclasses.replace(site, linears=(one,)) for one in site.linears)


def _kind(site: Site) -> Hashable:
    """Returns what the linears of one call must have in common."""
    linear = site.first
    if linear.selection is not None:
        return site  # its rows are laid out for it alone
    place = linear.x.indices.index  # of an index among those of x
    roles = linear.adapter_indices, linear.row_indices, linear.in_indices
    layout = tuple(tuple((place(i), linear.size_of([i])) for i in r) for r in roles)
    how = site.implementation, site.block_tokens, site.dtype, site.precision
    is_masked = linear.mask is not None
    return linear.x.var, layout, how, site.keeps_s, is_masked, linear.is_transposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A sum that is almost a linear with an adapter, and why it is left as it is.

    It also is a product with the shape of an adapter that is in no such sum.

    Attributes:
        path: Names of the primitives around it, outermost first.
        location: File, line and function of the code that made it.
        reason: Why it is not fused, as a clause without a full stop.
        is_adapter: Whether it has products with the shape of an adapter's.
    """

    path: tuple[str, ...]
    location: str
    reason: str
    is_adapter: bool = False
