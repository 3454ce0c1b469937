"""Finds the row-wise functions that make the inputs of sites.

From the input of a site, the author's element-wise equations are followed backwards to
arrays that are in memory anyway: the results of other sites, of sums and products, and
arrays of the linear's dtype that something else reads too. What varies along rows
alone, such as the root mean square of a norm, or along features alone, such as its
weight, is an argument, which XLA computes.
"""

import dataclasses
import heapq
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.graph import RESULT, Graph
from jaxlora.fuse.row_program import (
    Builder,
    NotRowWise,
    RowExpression,
    is_element_wise,
    is_layout,
)
from jaxlora.fuse.site import Site

# What XLA computes in a kernel of its own, or is there already, beside reductions.
_WRITTEN = {
    "all_gather",
    "all_to_all",
    "argmax",
    "argmin",
    "cholesky",
    "conv_general_dilated",
    "cummax",
    "cummin",
    "cumlogsumexp",
    "cumprod",
    "cumsum",
    "custom_call",
    "dot_general",
    "ffi_call",
    "fft",
    "iota",
    "mesh_cast",
    "name",
    "optimization_barrier",
    "pallas_call",
    "pcast",
    "ppermute",
    "psum",
    "psum_invariant",
    "pvary",
    "ragged_dot_general",
    "reduce_precision",
    "scaled_dot",
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter_mul",
    "sharding_constraint",
    "sort",
    "stop_gradient",
    "top_k",
    "triangular_solve",
}

Extent = Literal["tile", "row", "feature", "scalar"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Maker:
    """A row-wise function of a traced program that makes the input of a site.

    Attributes:
        x: The variable that holds its result, in the site's dtype.
        read: The variable that the site reads: x, or what x is a cast of.
        tiles: The arrays of rows that it reads, of the site's dtype.
        rows: What it reads of each row, or scalars.
        features: What it reads of each feature.
        expression: The function.
        equations: Numbers of its equations in the jaxpr.
        is_closed: Whether nothing else reads a value that is computed on the way to x.
    """

    x: core.Var
    read: core.Var | core.Literal
    tiles: tuple[core.Var, ...]
    rows: tuple[core.Var, ...]
    features: tuple[core.Var, ...]
    expression: RowExpression
    equations: frozenset[int] = dataclasses.field(compare=False)
    is_closed: bool

    @property
    def inputs(self) -> tuple[core.Var, ...]:
        """The variables that it reads."""
        return *self.tiles, *self.rows, *self.features

    @property
    def feature_dtype(self) -> np.dtype:
        """The dtype in which it reads values of features."""
        return _common_dtype(self.features)

    def arguments(self, num_rows: int, read: Any) -> list[jax.Array]:
        """Returns the arguments of the expression.

        Args:
            num_rows: T.
            read: Returns the array of a variable.
        """
        tiles = [read(v).reshape(num_rows, -1) for v in self.tiles]
        rows = [
            jnp.broadcast_to(read(v).reshape(-1, 1), (num_rows, 1)) for v in self.rows
        ]
        features = [read(v).reshape(1, -1) for v in self.features]
        return [
            *tiles,
            *(row.astype(jnp.float32) for row in rows),
            *(one.astype(self.feature_dtype) for one in features),
        ]


def find_maker(site: Site, roots: Collection[core.Var]) -> Maker | str | None:
    """Returns what makes the input of a site, or why kernels cannot compute it.

    Args:
        site: The site.
        roots: The variables that hold the sums of all sites.

    Returns:
        None if no arithmetic makes it, but a product, a sum or an argument.
    """
    if isinstance(site.x.var, core.Literal):
        return None
    x = _as_read(site.graph, site.x.var, site.dtype)
    eqn = site.graph.equation(x)
    if x in roots or eqn is None or not is_element_wise(eqn):
        return None
    rows, features = site.first.row_order, site.first.in_indices
    if site.x.indices != (*rows, *features):
        return "the features of its input are not its last dimensions"
    held = (not set(features).isdisjoint(dim) for dim in site.x.dims)
    try:
        return _Walk(site, roots).back_from(x, [*held].index(True))
    except NotRowWise as reason:
        return str(reason)


def _as_read(graph: Graph, x: core.Var, dtype: np.dtype) -> core.Var:
    """Returns the variable that holds an input as the products read it."""
    if _aval(x).dtype == dtype:
        return x
    for user in graph.users.get(x, ()):
        if user != RESULT:
            eqn = graph.jaxpr.eqns[user]
            is_cast = eqn.primitive.name == "convert_element_type"
            if is_cast and _aval(eqn.outvars[0]).dtype == dtype:
                return eqn.outvars[0]
    return x


class _Walk:
    """Follows the equations that make one input."""

    def __init__(self, site: Site, roots: Collection[core.Var]) -> None:
        self.graph = site.graph
        self.eqns = site.jaxpr.eqns
        self.site = site
        self.dtype = site.dtype
        self.roots = roots
        self.sizes = site.num_tokens, site.first.in_features
        self.inside: set[int] = set()
        self.splits: dict[core.Var, int] = {}
        self.todo: list[int] = []  # a heap of numbers of equations, the last one first
        self.leaves: dict[Extent, list[core.Var]] = {
            "tile": [],
            "row": [],
            "feature": [],
        }

    def back_from(self, x: core.Var, split: int) -> Maker | None:
        """Returns the maker of x; None if no arithmetic is in it.

        Raises:
            NotRowWise: Kernels cannot compute it.
        """
        aval: Any = x.aval
        if aval.dtype != self.dtype:
            raise NotRowWise(
                f"its input is {aval.dtype.name}, and its products round it"
            )
        self.splits[x] = split
        maker_of = self.graph.maker
        self.todo = [-maker_of[x]]
        while self.todo:
            number = -heapq.heappop(self.todo)
            (*outs,) = self.eqns[number].outvars
            if len(outs) == 1:
                self._visit(outs[0], number, is_x=outs[0] is x)
        for var in self.splits:
            if var not in maker_of:
                self._leave(var)
        if all(is_layout(self.eqns[number]) for number in self.inside):
            return None
        if not self.leaves["tile"]:
            raise NotRowWise("it reads no array of rows")
        return self._maker(x)

    def _visit(self, var: core.Var, number: int, *, is_x: bool) -> None:
        eqn = self.eqns[number]
        if not self._is_constant(eqn) and (
            self._extent(var) != "tile" or self._ends(var, number, is_x)
        ):
            self._leave(var)
            return
        self.inside.add(number)
        for atom, split in self._inputs(self.eqns[number], self.splits[var]):
            if atom not in self.splits and atom in self.graph.maker:
                heapq.heappush(self.todo, -self.graph.maker[atom])
            if self.splits.setdefault(atom, split) != split:
                raise NotRowWise("it reads an array in two ways")

    def _is_constant(self, eqn: Any) -> bool:
        """Returns whether an equation computes the same number in each call."""
        return is_element_wise(eqn) and not any(
            isinstance(atom, core.Var) for atom in eqn.invars
        )

    def _ends(self, var: core.Var, number: int, is_x: bool) -> bool:
        """Returns whether the function reads a variable instead of computing it."""
        if var in self.roots:
            return True
        aval: Any = var.aval
        is_kept = self.graph.is_used_beside(var, self.inside)
        is_kept = is_kept and aval.dtype == self.dtype and not is_x
        if is_element_wise(self.eqns[number]):
            return is_kept
        if not is_kept:
            self._check_is_written(self.eqns[number])
        return True

    def _check_is_written(self, eqn: Any) -> None:
        """Raises `NotRowWise` if XLA would compute an equation where it is read."""
        name, params = eqn.primitive.name, eqn.params.values()
        is_call = any(isinstance(p, core.Jaxpr | core.ClosedJaxpr) for p in params)
        is_kernel = name in _WRITTEN or name.startswith("reduce_")
        is_kernel |= is_call and name != "custom_jvp_call"
        if not is_kernel:
            raise NotRowWise(f"kernels cannot compute {name} on tiles")

    def _leave(self, var: core.Var) -> None:
        extent, aval = self._extent(var), _aval(var)
        if extent == "tile" and aval.dtype != self.dtype:
            raise NotRowWise(
                f"it reads {aval.str_short()} of {self._name_of(var)}, and kernels "
                f"read arrays of {self.dtype.name}"
            )
        if not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize > 4:
            raise NotRowWise(f"it reads {aval.str_short()}, which are no floats")
        kind: Extent = "row" if extent == "scalar" else extent
        if var not in self.leaves[kind]:
            self.leaves[kind].append(var)

    def _name_of(self, var: core.Var) -> str:
        number = self.graph.maker.get(var)
        return "an argument" if number is None else self.eqns[number].primitive.name

    def _extent(self, var: core.Var) -> Extent:
        """Returns along what a variable varies.

        Raises:
            NotRowWise: Along a part of the rows or of the features only.
        """
        aval: Any = var.aval
        split = self.splits[var]
        sizes = math.prod(aval.shape[:split]), math.prod(aval.shape[split:])
        tokens, features = self.sizes
        extents: dict[tuple[int, int], Extent] = {
            (1, 1): "scalar",
            (1, features): "feature",
            (tokens, 1): "row",
            (tokens, features): "tile",
        }
        if sizes not in extents:
            raise NotRowWise(
                f"it reads {aval.str_short()}, which varies along a part of the rows "
                "or of the features"
            )
        return extents[sizes]

    def _inputs(self, eqn: Any, split: int) -> list[tuple[core.Var, int]]:
        """Returns the variables that an equation reads, with their splits."""
        found = []
        for atom in eqn.invars:
            if isinstance(atom, core.Literal):
                continue
            shape, name = atom.aval.shape, eqn.primitive.name
            if not shape:
                found.append((atom, 0))
            elif name == "broadcast_in_dim":
                axes = eqn.params["broadcast_dimensions"]
                found.append((atom, sum(axis < split for axis in axes)))
            elif is_layout(eqn):
                found.append((atom, self._split_of(shape, eqn.outvars[0], split)))
            else:
                found.append((atom, split))
        return found

    def _split_of(self, shape: tuple[int, ...], out: Any, split: int) -> int:
        """Returns the split of an array that is reshaped."""
        sizes = math.prod(out.aval.shape[:split]), math.prod(out.aval.shape[split:])
        for place in range(len(shape) + 1):
            if (math.prod(shape[:place]), math.prod(shape[place:])) == sizes:
                return place
        raise NotRowWise("it reshapes rows and features together")

    def _maker(self, x: core.Var) -> Maker:
        tiles, rows, features = (
            tuple(sorted(self.leaves[kind], key=self._order))
            for kind in ("tile", "row", "feature")
        )
        builder = Builder([*tiles, *rows, *features])
        wide = jnp.dtype(jnp.float32)
        for var in rows:
            builder.cast(var, wide)
        for var in features:
            builder.cast(var, _common_dtype(features))
        for number in sorted(self.inside):
            builder.add(self.eqns[number])
        numbers = len(tiles), len(rows), len(features)
        beside, within = self.graph.is_used_beside, self.inside | self.site.equations
        return Maker(
            x=x,
            read=self.site.x.var,
            tiles=tiles,
            rows=rows,
            features=features,
            expression=builder.expression(*numbers, [x]),
            equations=frozenset(self.inside),
            is_closed=not any(
                beside(self.eqns[n].outvars[0], within)
                for n in self.inside - {self.graph.maker[x]}
            ),
        )

    def _order(self, var: core.Var) -> tuple[int, int]:
        """Orders the arguments as the program does, whatever the variables' names."""
        number = self.graph.maker.get(var, -1)
        inputs: Any = (*self.graph.jaxpr.constvars, *self.graph.jaxpr.invars)
        return number, -1 if number >= 0 else inputs.index(var)


def _aval(var: core.Var) -> Any:
    return var.aval


def _common_dtype(features: Sequence[core.Var]) -> np.dtype:
    return jnp.result_type(*(_aval(v).dtype for v in features), jnp.bfloat16)
