"""The sizes of a site, on which alone its predicted time depends."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxlora.fuse.site import Site
from jaxlora.fuse.work import is_random


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SiteShape:
    """The sizes of linears with adapters that share x.

    Attributes:
        tokens: T, the rows of all adapters.
        in_features: K.
        out_features: N of each linear.
        ranks: Rank of each linear's branches together.
        adapters: G.
        dtype: Name of the dtype of x and W.
        masks: Number of different dropout masks.
        draws_masks: Whether the function draws the random bits of the masks itself.
        bias: Whether a linear has a bias.
    """

    tokens: int
    in_features: int
    out_features: tuple[int, ...]
    ranks: tuple[int, ...]
    adapters: int = 1
    dtype: str = "bfloat16"
    masks: int = 0
    draws_masks: bool = False
    bias: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x and W."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(self.ranks)

    @classmethod
    def of(cls, site: Site) -> "SiteShape":
        """Returns the sizes of a site."""
        masks = {p.mask.operand.var for p in site.projections if p.mask is not None}
        return cls(
            tokens=site.num_tokens,
            in_features=site.in_features,
            out_features=tuple(p.out_features for p in site.projections),
            ranks=tuple(p.rank for p in site.projections),
            adapters=site.num_adapters,
            dtype=site.dtype.name,
            masks=len(masks),
            draws_masks=any(_is_drawn(site.jaxpr, mask) for mask in masks),
            bias=any(p.bias is not None for p in site.projections),
        )


def _is_drawn(jaxpr: core.Jaxpr, mask: core.Var | core.Literal) -> bool:
    """Tells whether a jaxpr draws the random bits of a mask."""
    writers: dict[Any, core.JaxprEqn] = {
        v: eqn for eqn in jaxpr.eqns for v in eqn.outvars
    }
    seen, todo = set(), [mask]
    while todo:
        equation = writers.get(todo.pop())
        if equation is None or id(equation) in seen:
            continue
        if is_random(equation):
            return True
        seen.add(id(equation))
        todo += [v for v in equation.invars if isinstance(v, core.Var)]
    return False


def forward_program(shape: SiteShape) -> core.Jaxpr:
    """Traces the forward pass of a site in plain JAX, as its author may write it."""
    function, arguments = _plain(shape)
    return jax.make_jaxpr(function)(*arguments)


def training_program(shape: SiteShape) -> core.Jaxpr:
    """Traces the forward and backward pass of a site in plain JAX; W is frozen."""
    function, arguments = _plain(shape)

    def run(x, ws, tables, biases, key, dys):
        frozen = lambda x, tables: function(x, ws, tables, biases, key)
        ys, pullback = jax.vjp(frozen, x, tables)
        return ys, pullback(dys)

    dys = jax.eval_shape(function, *arguments)
    return jax.make_jaxpr(run)(*arguments, dys)


def _plain(shape: SiteShape) -> tuple[Callable, tuple]:
    """Returns a function of linears that share x, and the shapes of its arguments."""
    g, k = shape.adapters, shape.in_features
    dtype = jnp.dtype(shape.dtype)

    def run(x, ws, tables, biases, given):
        masks = [_mask(given, i, x.shape, shape) for i in range(shape.masks)]
        ys = []
        for i, (w, (a, b)) in enumerate(zip(ws, tables, strict=True)):
            kept = jnp.where(masks[i % len(masks)], x, 0) if masks else x
            s = 2 * jnp.einsum("gtk,gkr->gtr", kept, a)
            y = jnp.einsum("gtk,kn->gtn", x, w) + jnp.einsum("gtr,grn->gtn", s, b)
            ys.append(y + biases[i] if shape.bias else y)
        return ys

    def array(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    rows = g, max(shape.tokens // g, 1)
    widths = list(zip(shape.ranks, shape.out_features, strict=True))
    arguments = (
        array(*rows, k),
        [array(k, n) for _, n in widths],
        [(array(g, k, r), array(g, r, n)) for r, n in widths],
        [array(n) for _, n in widths],
        jax.eval_shape(lambda: jax.random.key(0))
        if shape.draws_masks
        else [array(*rows, k, dtype=bool)] * shape.masks,
    )
    return run, arguments


def _mask(given, index: int, sizes: tuple[int, ...], shape: SiteShape) -> jax.Array:
    """Draws a mask from a key, or returns a given one."""
    if not shape.draws_masks:
        return given[index]
    return jax.random.bernoulli(jax.random.fold_in(given, index), shape=sizes)


def mask_elements(shape: SiteShape) -> int:
    """Returns the elements of all masks together."""
    return shape.masks * math.prod((shape.tokens, shape.in_features))
