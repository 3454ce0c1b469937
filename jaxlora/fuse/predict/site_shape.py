"""The sizes of a site, on which alone its predicted time depends."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxlora.fuse.predict.formed import Formed, formed_of
from jaxlora.fuse.predict.work import is_random
from jaxlora.fuse.site import Site


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
        scales: Arrays that multiply the sums of the linears.
        formed: Products of several arrays that the kernels read as one.
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
    scales: int = 0
    formed: tuple[Formed, ...] = ()

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
            scales=sum(len(p.scales) for p in site.projections),
            formed=formed_of(site),
        )


# The equation that computes each variable, for jaxprs with thousands of equations.
_WRITERS: weakref.WeakKeyDictionary[core.Jaxpr, dict[Any, core.JaxprEqn]] = (
    weakref.WeakKeyDictionary()
)


def _writers(jaxpr: core.Jaxpr) -> dict[Any, core.JaxprEqn]:
    if jaxpr not in _WRITERS:
        _WRITERS[jaxpr] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    return _WRITERS[jaxpr]


def _is_drawn(jaxpr: core.Jaxpr, mask: core.Var | core.Literal) -> bool:
    """Tells whether a jaxpr draws the random bits of a mask."""
    writers = _writers(jaxpr)
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

    def run(x, ws, trained, biases, key, dys):
        frozen = lambda x, trained: function(x, ws, trained, biases, key)
        ys, pullback = jax.vjp(frozen, x, trained)
        return ys, pullback(dys)

    dys = jax.eval_shape(function, *arguments)
    return jax.make_jaxpr(run)(*arguments, dys)


def _plain(shape: SiteShape) -> tuple[Callable, tuple]:
    """Returns a function of linears that share x, and the shapes of its arguments.

    The third argument has what is trained: for each linear A, B and the weight's
    scales, and the scale of its sum.
    """
    g, k = shape.adapters, shape.in_features
    dtype = jnp.dtype(shape.dtype)
    formed = {(f.role, f.linear): f for f in shape.formed}

    def run(x, ws, trained, biases, given):
        masks = [_mask(given, i, x.shape, shape) for i in range(shape.masks)]
        ys = []
        for i, (w, (a, b, w_scales, scales)) in enumerate(
            zip(ws, trained, strict=True)
        ):
            kept = jnp.where(masks[i % len(masks)], x, 0) if masks else x
            s = 2 * _multiplied(kept, a, formed.get(("a", i)))
            y = jnp.einsum("gtk,kn->gtn", x, w)
            if (made := formed.get(("w", i))) is not None:
                y = _scaled(y, w_scales, made)
            y = y + _multiplied(s, b, formed.get(("b", i)))
            for scale in scales:
                y = y * scale
            ys.append(y + biases[i] if shape.bias else y)
        return ys

    def array(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def trained(i: int, r: int, n: int) -> tuple:
        made = [formed.get((role, i)) for role in "abw"]
        a, b = (None if f is None else f.arrays for f in made[:2])
        scales = [array(n)] if i < shape.scales else []
        w_scales = made[2].arrays[1:] if made[2] is not None else []
        return a or array(g, k, r), b or array(g, r, n), w_scales, scales

    rows = g, max(shape.tokens // g, 1)
    widths = list(zip(shape.ranks, shape.out_features, strict=True))
    arguments = (
        array(*rows, k),
        [array(k, n) for _, n in widths],
        [trained(i, r, n) for i, (r, n) in enumerate(widths)],
        [array(n) for _, n in widths],
        jax.eval_shape(lambda: jax.random.key(0))
        if shape.draws_masks
        else [array(*rows, k, dtype=bool)] * shape.masks,
    )
    return run, arguments


def _multiplied(x: jax.Array, arrays, formed: Formed | None) -> jax.Array:
    """Multiplies x by A or B, as the function does that has factors of it."""
    if formed is None or formed.is_written:
        table = arrays if formed is None else formed.product(arrays)
        return jnp.einsum("gtk,gkr->gtr", x, table)
    return formed.applied(x, arrays)


def _scaled(y: jax.Array, scales, formed: Formed) -> jax.Array:
    """Scales the frozen product; scales that are not trained have no gradients."""
    if not formed.is_trained:
        scales = jax.lax.stop_gradient(scales)
    _, _, outputs = formed.result
    value = y.reshape(*y.shape[:2], *formed.shape(outputs))
    for scale, labels in zip(scales, formed.factors[1:], strict=True):
        kept = [i for i in outputs if i in labels]
        scale = scale.transpose([labels.index(i) for i in kept])
        sizes = [formed.sizes[i] if i in labels else 1 for i in outputs]
        value = value * scale.reshape(sizes)
    return value.reshape(y.shape)


def _mask(given, index: int, sizes: tuple[int, ...], shape: SiteShape) -> jax.Array:
    """Draws a mask from a key, or returns a given one."""
    if not shape.draws_masks:
        return given[index]
    return jax.random.bernoulli(jax.random.fold_in(given, index), shape=sizes)


def mask_elements(shape: SiteShape) -> int:
    """Returns the elements of all masks together."""
    return shape.masks * math.prod((shape.tokens, shape.in_features))
