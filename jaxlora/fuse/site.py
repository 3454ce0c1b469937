"""Linears with low-rank branches in a function, and near misses."""

import dataclasses
import math

import numpy as np
from jax import lax
from jax.extend import core

from jaxlora.fuse.graph import Graph

Index = int  # names one dimension, or a part of one, of the arrays of a sum


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operand:
    """An array of the traced function, and what its dimensions stand for.

    Attributes:
        var: The variable, or a literal.
        dims: For each dimension the indices that it is made of, slowest first. A
            dimension of size 1 has none.
        dtype: The dtype to which the traced function casts it.
    """

    var: core.Var | core.Literal
    dims: tuple[tuple[Index, ...], ...]
    dtype: np.dtype

    @property
    def indices(self) -> tuple[Index, ...]:
        """The indices of all dimensions, in order."""
        return tuple(i for dim in self.dims for i in dim)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """A boolean dropout mask of x.

    Attributes:
        operand: The mask; it may lack indices of x, over which it is constant.
        keeps: The value of an element that is kept.
    """

    operand: Operand
    keeps: bool


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

    var: core.Var | core.Literal
    row_dims: tuple[tuple[Index, ...], ...]
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
        products: The arrays of which the function itself computes a product.
    """

    a: tuple[Operand, ...]
    b: tuple[Operand, ...]
    rank_indices: tuple[Index, ...]
    coefficient: float
    products: tuple[frozenset[core.Var | core.Literal], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SiteProjection:
    """One frozen product with branches: `scales * (x W + bias + branches) + rest`.

    Attributes:
        root: The variable that holds the sum.
        root_dims: What the dimensions of `root` stand for.
        w: The frozen weight.
        w_scales: Arrays over output features that the weight is multiplied by.
        branches: Its low-rank branches.
        mask: The dropout mask of the branches' x; None: there is none.
        bias: A vector over the output features; None: there is none.
        scales: Arrays that multiply the sum.
        rest: Further summands, each with its constant factor.
        out_indices: The indices of the output features, slowest first.
        rank: Sum of the branches' ranks.
        out_features: Number of output features, N.
    """

    root: core.Var
    root_dims: tuple[tuple[Index, ...], ...]
    w: Operand
    w_scales: tuple[Operand, ...]
    branches: tuple[Branch, ...]
    mask: Mask | None
    bias: Operand | None
    scales: tuple[Operand, ...]
    rest: tuple[tuple[float, Operand], ...]
    out_indices: tuple[Index, ...]
    rank: int
    out_features: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Names that policies of `jax.checkpoint` may ask for.

    Attributes:
        of_s: Those of s.
        of_y: Those of the frozen product, the branch and their sum.
    """

    of_s: tuple[str, ...] = ()
    of_y: tuple[str, ...] = ()

    def __add__(self, other: "Names") -> "Names":
        return Names(of_s=self.of_s + other.of_s, of_y=self.of_y + other.of_y)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """Linears with adapters that share x and are computed by one call of the kernels.

    Attributes:
        path: Names of the primitives around the site, outermost first, such as
            `("scan", "remat2")`.
        location: File, line and function of the code that made the root.
        graph: The index of the jaxpr that holds the site.
        equations: Indices of the equations of the jaxpr that are no longer needed once
            the site is replaced.
        x: The input.
        projections: The linears.
        sizes: Size of each index.
        adapter_indices: Indices of the rows on which their adapter depends; none: all
            rows have the same adapter.
        selection: How these rows choose an adapter; None: each has one of its own.
        row_indices: The other indices of the rows.
        in_indices: The indices of the input features.
        dtype: The dtype in which the frozen product reads x and w.
        precision: What its products are asked for.
        names: The names that the function gives results inside it.
        implementation: Name of the back end.
        block_tokens: Rows of a token block of the kernels.
        keeps_s: Whether s is computed beside the kernels too, as in a function that
            already is a gradient.
    """

    path: tuple[str, ...]
    location: str
    graph: Graph
    equations: frozenset[int]
    x: Operand
    projections: tuple[SiteProjection, ...]
    sizes: dict[Index, int]
    adapter_indices: tuple[Index, ...]
    selection: Selection | None
    row_indices: tuple[Index, ...]
    in_indices: tuple[Index, ...]
    dtype: np.dtype
    precision: lax.Precision
    names: Names
    implementation: str
    block_tokens: int
    keeps_s: bool = False

    @property
    def jaxpr(self) -> core.Jaxpr:
        """The jaxpr that holds the site."""
        return self.graph.jaxpr

    def size_of(self, indices: tuple[Index, ...]) -> int:
        """Returns the product of the indices' sizes."""
        return math.prod(self.sizes[i] for i in indices)

    @property
    def num_adapters(self) -> int:
        """Number of adapters, G."""
        if self.selection is not None:
            return self.size_of(self.selection.table_indices)
        return self.size_of(self.adapter_indices)

    @property
    def num_tokens(self) -> int:
        """Number of rows of all adapters, T."""
        return self.size_of((*self.adapter_indices, *self.row_indices))

    @property
    def in_features(self) -> int:
        """Number of input features, K."""
        return self.size_of(self.in_indices)


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
