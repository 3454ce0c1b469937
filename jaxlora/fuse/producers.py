"""Norms and gates beside sites that one call of the kernels can compute with them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlora.fuse.makers import Maker, find_maker
from jaxlora.fuse.row_program import NotRowWise, RowExpression
from jaxlora.fuse.rows import is_in_blocks
from jaxlora.fuse.site import Linear, Site
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
        gradient: Maps the outputs, and the gradient of the function's result, to the
            gradients of the outputs.
        following: The site whose input it makes.
    """

    maker: Maker
    gradient: RowExpression
    following: Site


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A site, with the row-wise functions before and after it that one call computes.

    Attributes:
        site: The site.
        producer: Makes its input, and s beside it; None: its input is read.
        gate: Makes the input of another site from its outputs, and s beside it. In the
            backward pass it makes ds beside their gradients. None: its outputs are
            written.
        refusal: Why kernels cannot compute the function that makes its input, or cannot
            compute it with the linears before it; None: they can, or there is none.
    """

    site: Site
    producer: Maker | None = None
    gate: Gate | None = None
    refusal: str | None = dataclasses.field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The functions that the call computes beside linears, or `kernels`."""
        names = "producer" * bool(self.producer), "gate" * bool(self.gate)
        return " and ".join(filter(None, names)) or "kernels"

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
            made |= {*self.site.roots}
        found = [v for each in (*self.makers, *self.sites) for v in each.inputs]
        return tuple(v for v in dict.fromkeys(found) if v not in made)

    @functools.cached_property
    def outputs(self) -> tuple[core.Var, ...]:
        """The variables that it computes."""
        return *self.sites[-1].roots, *(maker.x for maker in self.makers)


def find_parts(sites: Sequence[Site]) -> list[Part]:
    """Returns each site of one jaxpr with all that kernels can compute around it."""
    number_of = {root: n for n, site in enumerate(sites) for root in site.roots}
    found = [Part(site=site) for site in sites]
    for after, site in enumerate(sites):
        maker = find_maker(site, number_of.keys())
        reason = _no_producer(maker, site) if isinstance(maker, Maker) else maker
        if reason is not None or not isinstance(maker, Maker):
            found[after] = dataclasses.replace(found[after], refusal=reason)
            continue
        for before in sorted({number_of[v] for v in maker.tiles if v in number_of}):
            gate = _gate(sites[before], maker, site)
            if isinstance(gate, Gate):
                found[before] = dataclasses.replace(found[before], gate=gate)
            else:
                reason = gate
        found[after] = dataclasses.replace(found[after], producer=maker, refusal=reason)
    return found


def _no_producer(maker: Maker, site: Site) -> str | None:
    """Returns why kernels cannot compute s beside the input of a site, or None."""
    others = [v for v in site.inputs if v is not maker.read]
    if site.graph.depends(others, {maker.x, maker.read}):
        return "other arrays of its linears are computed from its input"
    if site.keeps_s:
        return "the function already is a gradient, which reads s too"
    if not is_in_blocks(site):
        return "its rows are sorted or padded for the kernels"
    return _unsupported(maker.expression, maker, site, [site], is_gradient=False)


def _gate(site: Site, maker: Maker, following: Site) -> Gate | str:
    """Returns the gate that reads an output of a site, or why there is none."""
    reason = _no_gate(site, maker, following)
    if reason is not None:
        return reason
    try:
        gradient = maker.expression.gradient(site.dtype)
    except NotRowWise as found:
        return f"the gradient of its gate: {found}"
    reason = _unsupported(gradient, maker, following, [site], is_gradient=True)
    if reason is not None:
        return f"the gradient of its gate: {reason}"
    return Gate(maker=maker, gradient=gradient, following=following)


def _no_gate(site: Site, maker: Maker, following: Site) -> str | None:
    """Returns why the outputs of a site cannot stay within a call, or None."""
    roots = site.roots
    # Both are in the order of the program.
    if maker.tiles != roots or maker.rows or maker.features:
        return "its gate reads more than the outputs of linears that share their input"
    if any(site.graph.is_used_beside(root, maker.equations) for root in roots):
        return "the inputs of its gate are also used elsewhere"
    if not maker.is_closed:
        return "a value inside of its gate is also used elsewhere"
    others = [v for v in following.inputs if v is not maker.read]
    if site.graph.depends(others, {*roots, site.x.var, maker.x, maker.read}):
        return "other arrays of the linears behind its gate are computed in the region"
    if site.s_names or site.y_names:
        return "the inputs of its gate have names for policies of jax.checkpoint"
    if not all(map(_is_plain, site.linears)):
        return "the inputs of its gate are scaled or added to behind their products"
    if site.first.is_transposed:
        return "the weights before its gate are stored with output features first"
    if not is_in_blocks(site) or site.keeps_s:
        return "the rows before its gate are sorted or padded for the kernels"
    if _routing(site) != _routing(following):
        return "the linears before and behind its gate choose adapters differently"
    return None


def _is_plain(linear: Linear) -> bool:
    """Returns whether the kernels' own result is the output."""
    aval: Any = linear.root.aval
    order = [*linear.row_order, *linear.out_indices]
    is_in_order = order == [i for dim in linear.dims for i in dim]
    is_changed = linear.scales or linear.added or aval.dtype != linear.x.dtype
    return is_in_order and not is_changed


def _routing(site: Site) -> tuple:
    """Describes how the rows of a site choose their adapters."""
    linear, selection = site.first, site.first.selection
    chosen = None
    if selection is not None:
        chosen = selection.var, selection.outside, selection.is_ragged
    rows, slots = (
        [linear.size_of([i]) for i in indices]
        for indices in (linear.row_indices, linear.adapter_indices)
    )
    backend = site.implementation, site.precision
    return chosen, slots, rows, linear.num_adapters, site.block_tokens, backend


def _unsupported(
    function: RowExpression,
    maker: Maker,
    site: Site,
    sites: Sequence[Site],
    *,
    is_gradient: bool,
) -> str | None:
    """Returns why the kernels of a site cannot compute a function, or None."""
    of, features = jax.ShapeDtypeStruct, site.first.in_features
    tile = of((site.num_tokens, features), site.dtype)
    arguments = RowArguments(
        [tile] * function.num_tiles,
        [of((site.num_tokens,), np.dtype(np.float32))] * function.num_rows,
        [of((features,), maker.feature_dtype)] * function.num_features,
    )
    return unsupported_producer(
        function,
        arguments,
        [_shapes(linear) for one in sites for linear in one.linears],
        is_gradient=is_gradient,
        implementation=site.implementation,
    )


def _shapes(p: Linear) -> Projection:
    """Returns a projection as the kernels get it, with shapes in place of arrays."""
    of, slots, k = jax.ShapeDtypeStruct, p.num_adapters, p.in_features
    floats: Any = jnp.float32
    shapes: dict[str, Any] = {
        "w": of((k, p.out_features), p.x.dtype),
        "a": of((slots, k, p.rank), floats),
        "b": of((slots, p.rank, p.out_features), floats),
        "scaling": of((slots,), floats),
    }
    mask: GivenMask | None = None
    if p.mask is not None:
        words: Any = of((num_words(p.num_tokens), k), jnp.uint32)
        mask = GivenMask(words, shapes["scaling"])
    return Projection(**shapes, dropout=mask)
