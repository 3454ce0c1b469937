"""Parts of a program that one call of the kernels computes, and regions of them."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.kernel_call import inputs_of
from jaxlora.fuse.linears.sharing import users_of
from jaxlora.fuse.regions.makers import Maker, Makers
from jaxlora.fuse.regions.row_expression import NotRowWise, RowExpression
from jaxlora.fuse.rows import is_in_blocks
from jaxlora.fuse.site import Site, SiteProjection
from jaxlora.fuse.trace import live_equations
from jaxlora.pallas_kernels import (
    GivenMask,
    Projection,
    RowArguments,
    unsupported_producer,
)
from jaxlora.pallas_kernels.given_mask import num_words


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """A row-wise function of the outputs of one site that makes the input of another.

    Attributes:
        maker: The function.
        gradient: From the outputs, and the gradient of its result, to theirs.
        following: The site whose input it makes.
    """

    maker: Maker
    gradient: RowExpression
    following: Site


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A site, with the row-wise functions before and behind it that one call computes.

    Attributes:
        site: The site.
        producer: Makes its input, and s beside it; None: its input is read.
        gate: Makes the input of another site of its outputs, and s beside it, and in
            the backward pass ds beside their gradients; None: its outputs are written.
    """

    site: Site
    producer: Maker | None = None
    gate: Gate | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Its sites."""
        return (self.site,) if self.gate is None else (self.site, self.gate.following)

    @property
    def makers(self) -> tuple[Maker, ...]:
        """Its row-wise functions."""
        behind = None if self.gate is None else self.gate.maker
        return tuple(m for m in (self.producer, behind) if m is not None)

    @functools.cached_property
    def inputs(self) -> tuple[core.Var, ...]:
        """The variables that it reads, each once."""
        made = {*self.outputs, *(maker.read for maker in self.makers)}
        if self.gate is not None:
            made |= {p.root for p in self.site.projections}
        found = [v for maker in self.makers for v in maker.inputs]
        found += [v for site in self.sites for v in inputs_of(site)]
        return tuple(v for v in dict.fromkeys(found) if v not in made)

    @functools.cached_property
    def outputs(self) -> tuple[core.Var, ...]:
        """The variables that it computes."""
        roots = tuple(p.root for p in self.sites[-1].projections)
        return *roots, *(maker.x for maker in self.makers)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """Sites of one jaxpr that row-wise functions connect, with these functions.

    Attributes:
        sites: The sites.
        makers: The functions that kernels can compute, by the number of the site.
        producers: Numbers of the sites beside whose inputs kernels can compute s.
        gates: Gates from one site to another, by their numbers.
        refusals: For the number of a site, why kernels cannot compute what makes its
            input, or cannot be its gate.
    """

    sites: tuple[Site, ...]
    makers: dict[int, Maker]
    producers: frozenset[int]
    gates: dict[tuple[int, int], Gate]
    refusals: dict[int, str]

    def results_of(self, elements: Iterable[tuple[str, int]]) -> list[core.Var]:
        """Returns the variables of the results of sites and of row-wise functions.

        Args:
            elements: `site` or `rows`, each with the number of the site.
        """
        found: list[core.Var] = []
        for kind, number in elements:
            if kind == "site":
                found += [p.root for p in self.sites[number].projections]
            else:
                found.append(self.makers[number].x)
        return found


def find_regions(sites: Sequence[Site]) -> list[Region]:
    """Returns the regions of the sites of one jaxpr; each site is in one."""
    if not sites:
        return []
    jaxpr = sites[0].jaxpr
    makers = Makers(jaxpr, users_of(jaxpr, live_equations(jaxpr)))
    roots = frozenset(p.root for site in sites for p in site.projections)
    found, refusals = {}, {}
    for number, site in enumerate(sites):
        maker = makers.find(site, roots)
        reason = maker if isinstance(maker, str) else None
        if isinstance(maker, Maker):
            reason = _no_producer(makers, maker, site)
            found[number] = maker
        if reason is not None:
            refusals[number] = reason
    producers = found.keys() - refusals.keys()
    number_of = {p.root: n for n, site in enumerate(sites) for p in site.projections}
    gates = {}
    for after in sorted(producers):
        maker = found[after]
        for before in sorted({number_of[v] for v in maker.tiles if v in number_of}):
            gate = _gate(makers, sites[before], maker, sites[after])
            if isinstance(gate, str):
                refusals[after] = gate
            else:
                gates[before, after] = gate
    groups = _connected(len(sites), gates)
    return [
        _region(sites, group, found, producers, gates, refusals) for group in groups
    ]


def _region(sites, group, makers, producers, gates, refusals) -> Region:
    new = {old: number for number, old in enumerate(group)}
    return Region(
        sites=tuple(sites[old] for old in group),
        makers={new[old]: makers[old] for old in group if old in producers},
        producers=frozenset(new[old] for old in group if old in producers),
        gates={
            (new[before], new[after]): gate
            for (before, after), gate in gates.items()
            if after in new
        },
        refusals={new[old]: refusals[old] for old in group if old in refusals},
    )


def _connected(count: int, gates: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Returns the groups of numbers that gates connect, in order."""
    beside: list[list[int]] = [[] for _ in range(count)]
    for before, after in gates:
        beside[before].append(after)
        beside[after].append(before)
    groups, seen = [], set()
    for number in range(count):
        todo, group = [number], []
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                group.append(one)
                todo += beside[one]
        if group:
            groups.append(sorted(group))
    return groups


def _no_producer(makers: Makers, maker: Maker, site: Site) -> str | None:
    """Returns why kernels cannot compute s beside the input of a site, or None."""
    others = [v for v in inputs_of(site) if v is not maker.read]
    if makers.depends(others, {maker.x, maker.read}):
        return "other arrays of its linears are computed from its input"
    if site.keeps_s:
        return "the function already is a gradient, which reads s too"
    if not is_in_blocks(site):
        return "its rows are sorted or padded for the kernels"
    return _unsupported(maker.expression, maker, site, [site], is_gradient=False)


def _gate(makers: Makers, site: Site, maker: Maker, following: Site) -> Gate | str:
    """Returns the gate that reads an output of a site, or why it is none."""
    roots = [p.root for p in site.projections]
    reason = _no_gate(makers, site, maker, following)
    if reason is not None:
        return reason
    try:
        gradient = in_order(maker, roots).gradient(site.dtype)
    except NotRowWise as found:
        return f"the gradient of its gate: {found}"
    reason = _unsupported(gradient, maker, following, [site], is_gradient=True)
    if reason is not None:
        return f"the gradient of its gate: {reason}"
    return Gate(maker=maker, gradient=gradient, following=following)


def _no_gate(makers: Makers, site: Site, maker: Maker, following: Site) -> str | None:
    """Returns why the outputs of a site cannot stay within a call, or None."""
    roots = [p.root for p in site.projections]
    if set(maker.tiles) != set(roots) or maker.rows or maker.features:
        return "its gate reads more than the outputs of linears that share their input"
    if any(makers.is_used_beside(root, maker.equations) for root in roots):
        return "the inputs of its gate are also used elsewhere"
    if not maker.is_closed:
        return "a value inside of its gate is also used elsewhere"
    others = [v for v in inputs_of(following) if v is not maker.read]
    if makers.depends(others, {*roots, site.x.var, maker.x, maker.read}):
        return "other arrays of the linears behind its gate are computed in the region"
    if site.names.of_s or site.names.of_y:
        return "the inputs of its gate have names for policies of jax.checkpoint"
    if not all(_is_plain(p, site) for p in site.projections):
        return "the inputs of its gate are scaled or added to behind their products"
    if is_transposed(site):
        return "the weights before its gate are stored with output features first"
    if not is_in_blocks(site) or site.keeps_s:
        return "the rows before its gate are sorted or padded for the kernels"
    if _routing(site) != _routing(following):
        return "the linears before and behind its gate choose adapters differently"
    return None


def _is_plain(p: SiteProjection, site: Site) -> bool:
    """Tells whether the kernels' own result is the output."""
    aval: Any = p.root.aval
    order = (*site.adapter_indices, *site.row_indices, *p.out_indices)
    held = tuple(i for dim in p.root_dims for i in dim)
    return not (p.scales or p.rest) and held == order and aval.dtype == site.dtype


def is_transposed(site: Site) -> bool:
    """Tells whether the weights of a site are stored with output features first."""
    return all(p.w.indices[-1] in site.in_indices for p in site.projections)


def _routing(site: Site) -> tuple:
    """Describes how the rows of a site choose their adapters."""
    chosen = None
    if site.selection is not None:
        chosen = site.selection.var, site.selection.outside, site.selection.is_ragged
    rows = [site.sizes[i] for i in site.row_indices]
    slots = [site.sizes[i] for i in site.adapter_indices]
    backend = site.implementation, site.precision
    return chosen, slots, rows, site.num_adapters, site.block_tokens, backend


def in_order(maker: Maker, roots: Sequence[core.Var]) -> RowExpression:
    """Returns a gate's function of the outputs of a site in the site's order."""
    return maker.expression.permuted([maker.tiles.index(root) for root in roots])


def _unsupported(
    function: RowExpression,
    maker: Maker,
    site: Site,
    sites: Sequence[Site],
    *,
    is_gradient: bool,
) -> str | None:
    """Returns why the kernels of a site cannot compute a function, or None."""
    of = jax.ShapeDtypeStruct
    tile = of((site.num_tokens, site.in_features), site.dtype)
    arguments = RowArguments(
        [tile] * function.num_tiles,
        [of((site.num_tokens,), np.dtype(np.float32))] * function.num_rows,
        [of((site.in_features,), maker.feature_dtype)] * function.num_features,
    )
    return unsupported_producer(
        function,
        arguments,
        [_shapes(p, one) for one in sites for p in one.projections],
        is_gradient=is_gradient,
        implementation=site.implementation,
    )


def _shapes(p: SiteProjection, site: Site) -> Projection:
    """Returns a projection as the kernels get it, with shapes in place of arrays."""
    of, slots, k = jax.ShapeDtypeStruct, site.num_adapters, site.in_features
    floats: Any = jnp.float32
    shapes: dict[str, Any] = {
        "w": of((k, p.out_features), site.dtype),
        "a": of((slots, k, p.rank), floats),
        "b": of((slots, p.rank, p.out_features), floats),
        "scaling": of((slots,), floats),
    }
    mask: GivenMask | None = None
    if p.mask is not None:
        words: Any = of((num_words(site.num_tokens), k), jnp.uint32)
        mask = GivenMask(words, shapes["scaling"])
    return Projection(**shapes, dropout=mask)
