"""Computes sites with the kernels, from the arrays of the traced function."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.extend import core

from jaxlora.fuse.makers import Maker
from jaxlora.fuse.normal_forms.forms import Factor, Index
from jaxlora.fuse.producers import Gate, Part
from jaxlora.fuse.row_program import RowExpression
from jaxlora.fuse.rows import make_rows, value_of
from jaxlora.fuse.site import Branch, Linear, Site
from jaxlora.pallas_kernels import Gate as KernelGate
from jaxlora.pallas_kernels import (
    GivenMask,
    Projection,
    RowArguments,
    multi_lora_gate,
    multi_lora_linears,
    pack_mask,
    produce,
)
from jaxlora.pallas_kernels.varying import vary, varying_axes


class SiteCall:
    """The arrays of one call of the kernels of a site, laid out as they read them.

    Attributes:
        rows: How the rows are stored.
        projections: The linears.
    """

    def __init__(self, site: Site, values: dict[Any, jax.Array]) -> None:
        """Lays the arrays out.

        Args:
            site: The site.
            values: The arrays of the traced function, by variable; all that the site
                reads, or those but x.
        """
        self.site = site
        self.values = values
        self.rows = make_rows(site.first, site.block_tokens, values)
        self.projections = [
            Projection(w=self._weight(p), bias=self._bias(p), **self._projection(p))
            for p in site.linears
        ]

    def x(self) -> jax.Array:
        """Returns the input, [T, K] in token blocks."""
        first = self.site.first
        x = self._array(first.x, (*first.row_order, *first.in_indices))
        return self._stored(x.astype(self.site.dtype))

    def roots(self, x: jax.Array, s: Sequence[jax.Array] | None) -> list[jax.Array]:
        """Returns the values of the variables that hold the sums.

        Args:
            x: The input, in token blocks.
            s: What was computed beside x; None: nothing.
        """
        blocks, results = self.rows.block_adapter, []
        ys = linear_outputs(self.site, x, self.projections, blocks, s=s)
        for p, y in zip(self.site.linears, ys, strict=True):
            for name in self.site.y_names:
                y = checkpoint_name(y, name)
            results.append(self._root(p, y))
        return results

    def _shape(self, indices: Sequence[Index]) -> tuple[int, ...]:
        return tuple(self.site.first.indices.sizes[i] for i in indices)

    def _array(self, factor: Factor, order: Sequence[Index]) -> jax.Array:
        """Returns an array with one dimension for each of its indices, in an order."""
        value = value_of(factor.var, self.values)
        held = factor.indices
        value = value.reshape(self._shape(held))
        kept = [i for i in order if i in held]
        return value.transpose([held.index(i) for i in kept])

    def _cast(self, factor: Factor, order: Sequence[Index]) -> jax.Array:
        """Returns a factor of A or B as the traced function rounds it.

        What it rounds to the dtype of x stays as it is: so do the kernels, and the
        gradients then are not rounded.
        """
        value = self._array(factor, order)
        is_narrower = factor.dtype.itemsize < value.dtype.itemsize
        if not is_narrower or factor.dtype == self.site.dtype:
            return value
        return value.astype(factor.dtype).astype(value.dtype)

    def _stored(self, value: jax.Array) -> jax.Array:
        """Stores rows of x or of its mask in token blocks."""
        return self.rows.store(value.reshape(-1, self.site.first.in_features))

    def _projection(self, p: Linear) -> dict[str, Any]:
        coefficients = {branch.coefficient for branch in p.branches}
        shared = coefficients.pop() if len(coefficients) == 1 else 1.0
        a = [self._factor(p, branch, "a") for branch in p.branches]
        b = [
            _times(self._factor(p, branch, "b"), branch.coefficient / shared)
            for branch in p.branches
        ]
        is_nan = p.selection is not None and p.selection.outside == "nan"
        scaling = shared * jnp.ones((p.num_adapters,), jnp.float32)
        ones = jnp.ones((self.rows.num_slots,), jnp.float32)
        return {
            "a": self._slots(a[0] if len(a) == 1 else jnp.concatenate(a, axis=2)),
            "b": self._slots(b[0] if len(b) == 1 else jnp.concatenate(b, axis=1)),
            "scaling": self._slots(scaling, np.nan if is_nan else 0.0),
            "dropout": self._mask(p, ones),
        }

    def _slots(self, value: jax.Array, fill: float = 0.0) -> jax.Array:
        """Adds the slot of rows without an adapter, if there is one."""
        extra = self.rows.num_slots - value.shape[0]
        if not extra:
            return value
        pad = [(0, extra)] + [(0, 0)] * (value.ndim - 1)
        return jnp.pad(value, pad, constant_values=fill)

    def _factor(self, p: Linear, branch: Branch, side: str) -> jax.Array:
        """Computes A [G, K, R] or B [G, R, N] of a branch."""
        if side == "a":
            factors, order = branch.a, (*p.in_indices, *branch.rank_indices)
        else:
            factors, order = branch.b, (*branch.rank_indices, *p.out_indices)
        product = self._product(factors, (*p.table_indices, *order))
        rank = p.size_of(branch.rank_indices)
        sizes = (p.in_features, rank) if side == "a" else (rank, p.out_features)
        return product.reshape(p.num_adapters, *sizes)

    def _product(self, factors: Sequence[Factor], order: Sequence[Index]) -> jax.Array:
        """Multiplies arrays, sums over the other indices, and fills in missing ones."""
        held = [i for i in order if any(i in f.indices for f in factors)]
        if len(factors) == 1 and set(factors[0].indices) == set(held):
            product = self._cast(factors[0], held)
        else:
            dtype = jnp.result_type(*(f.var.aval for f in factors))
            product = self._einsum(factors, self._cast, held).astype(dtype)
        return self._filled(product, held, order)

    def _filled(
        self, value: jax.Array, held: Sequence[Index], order: Sequence[Index]
    ) -> jax.Array:
        """Repeats an array over the indices of an order that it lacks."""
        shape = self._shape(order)
        present = (n if i in held else 1 for i, n in zip(order, shape, strict=True))
        return jnp.broadcast_to(value.reshape(*present), shape)

    def _einsum(
        self,
        factors: Sequence[Factor],
        read: Callable[[Factor, Sequence[Index]], jax.Array],
        order: Sequence[Index],
    ) -> jax.Array:
        arguments: list[Any] = []
        for factor in factors:
            arguments += [read(factor, factor.indices), list(factor.indices)]
        return jnp.einsum(*arguments, order, preferred_element_type=jnp.float32)

    def _mask(self, p: Linear, ones: jax.Array) -> GivenMask | None:
        if p.mask is None:
            return None
        order = (*p.row_order, *p.in_indices)
        kept = self._spread(p.mask, order).astype(bool)
        kept = kept if p.mask.keeps else ~kept
        return GivenMask(pack_mask(self._stored(kept)), ones)

    def _spread(self, factor: Factor, order: Sequence[Index]) -> jax.Array:
        """Returns an array in an order, repeated over the indices that it lacks."""
        return self._filled(self._array(factor, order), factor.indices, order)

    def _weight(self, p: Linear) -> jax.Array:
        order, shape = (*p.in_indices, *p.out_indices), (p.in_features, p.out_features)
        if p.is_transposed:
            order, shape = (*p.out_indices, *p.in_indices), shape[::-1]
        if not p.w_scales:
            return self._array(p.w, order).reshape(shape).astype(self.site.dtype)
        as_read = lambda f, order: self._array(f, order).astype(f.dtype)
        product = self._einsum((p.w, *p.w_scales), as_read, order)
        return product.reshape(shape).astype(self.site.dtype)

    def _bias(self, p: Linear) -> jax.Array | None:
        if p.bias is None:
            return None
        return self._array(p.bias, p.out_indices).reshape(-1).astype(p.bias.dtype)

    def _root(self, p: Linear, y: jax.Array) -> jax.Array:
        """Lays the kernels' result out as the traced function's."""
        aval: Any = p.root.aval
        y = self.rows.restore(y)
        order = (*p.row_order, *p.out_indices)
        y = y.reshape(self._shape(order))
        wanted = [i for dim in p.dims for i in dim]
        held = [i for i in wanted if i in order]
        y = y.transpose([order.index(i) for i in held])
        if len(held) < len(wanted):
            y = self._filled(y, held, wanted)
        if p.scales or p.added:
            y = y.astype(jnp.float32)
        for scale in p.scales:
            factor = self._spread(scale, wanted).astype(scale.dtype)
            y = y * factor.astype(jnp.float32)
        for number, summand in p.added:
            added = self._spread(summand, wanted).astype(summand.dtype)
            y = y + _times(added.astype(jnp.float32), number)
        return y.astype(aval.dtype).reshape(aval.shape)


def linear_outputs(
    site: Site,
    x: jax.Array,
    projections: Sequence[Projection],
    block_adapter: jax.Array,
    *,
    s: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Returns the kernels' results, with gradients of w and bias if they are asked for.

    Args:
        site: The site.
        x: The input, in token blocks.
        projections: The linears.
        block_adapter: The slot of each token block.
        s: What was computed beside x; None: nothing.
    """
    w_transposed = site.first.is_transposed
    ys = multi_lora_linears(
        x,
        projections,
        block_adapter,
        w_transposed=w_transposed,
        s=s,
        s_names=site.s_names,
        implementation=site.implementation,
    )
    attach = _with_linear_gradients(w_transposed, site.precision)
    return [attach(y, (p.w, p.bias), x) for y, p in zip(ys, projections, strict=True)]


def _times(value: jax.Array, number: float) -> jax.Array:
    return value if number == 1 else value * number


@functools.cache
def _with_linear_gradients(
    w_transposed: bool, precision: lax.Precision
) -> Callable[..., jax.Array]:
    """Returns a function that gives y the gradients of (w, bias), from x."""

    def pull(frozen, x, dy):
        w, bias = frozen
        spec = "tn,tk->nk" if w_transposed else "tk,tn->kn"
        dw = jnp.einsum(
            spec,
            *((dy, x) if w_transposed else (x, dy)),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        if bias is None:
            return dw.astype(w.dtype), None
        dbias = dy.sum(axis=0, dtype=jnp.float32).astype(bias.dtype)
        return dw.astype(w.dtype), dbias

    return with_frozen_gradients(pull)


def with_frozen_gradients(pull: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a function that gives a result the gradients of frozen arrays.

    The kernels take weights and biases as frozen. The function takes the result, the
    frozen arrays and the others, and returns the result. The gradients of the frozen
    arrays are computed only where one is asked for; the others get none here.

    Args:
        pull: Computes the gradients of the frozen arrays, from the frozen arrays, the
            others, and the gradient of the result.
    """

    @jax.custom_vjp
    def attach(y, frozen, rest):
        return y

    def forward(y, frozen, rest):
        is_trained = any(leaf.perturbed for leaf in jax.tree.leaves(frozen))
        values = custom_vjp_primal_tree_values((frozen, rest))
        return y.value, values if is_trained else None

    def backward(residuals, dy):
        if isinstance(dy, jax.custom_derivatives.SymbolicZero):
            return None, None, None
        if residuals is None:
            return dy, None, None
        return dy, pull(*residuals, dy), None

    attach.defvjp(forward, backward, symbolic_zeros=True)
    return attach


def part_call(part: Part) -> Callable[..., list[jax.Array]]:
    """Returns a function from the values of a part's inputs to those of its outputs."""

    def call(*values: jax.Array) -> list[jax.Array]:
        values = vary(values, varying_axes(values))
        with (
            jax.default_matmul_precision(part.site.precision.name.lower()),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
        ):
            return _results(part, dict(zip(part.inputs, values, strict=True)))

    return call


def _results(part: Part, values: dict[Any, jax.Array]) -> list[jax.Array]:
    site = SiteCall(part.site, values)
    made = []
    if part.producer is None:
        x, s = site.x(), None
    else:
        x, s = _produced(part.producer, site, values)
        made.append(_as_var(x, part.producer.x))
    if part.gate is None:
        return [*site.roots(x, s), *made]
    following = SiteCall(part.gate.following, values)
    h, s = _gated(part.gate, site, following, x, s)
    made.append(_as_var(h, part.gate.maker.x))
    return [*following.roots(h, s), *made]


def _as_var(value: jax.Array, var: core.Var) -> jax.Array:
    aval: Any = var.aval
    return value.reshape(aval.shape)


def _produced(
    maker: Maker, site: SiteCall, values: dict[Any, jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the input of a site, and s of its linears."""
    arguments = maker.arguments(site.site.num_tokens, values.__getitem__)
    op = _with_own_gradient(maker.expression, site.site.implementation)
    return op(arguments, site.projections, site.rows.block_adapter)


@functools.cache
def _with_own_gradient(function: RowExpression, implementation: str):
    """Makes the op of a producer, whose gradient is that of its function in JAX."""

    @jax.custom_vjp
    def op(arguments, projections, block_adapter):
        tiles, rest = arguments[: function.num_tiles], arguments[function.num_tiles :]
        rows, features = rest[: function.num_rows], rest[function.num_rows :]
        given = RowArguments(tiles, [r[:, 0] for r in rows], [f[0] for f in features])
        options = {"implementation": implementation}
        return produce(function, given, projections, block_adapter, **options)

    def forward(arguments, projections, block_adapter):
        return op(arguments, projections, block_adapter), arguments

    def backward(arguments, gradients):
        dx, _ = gradients  # the linears compute the gradient of A
        _, pull = jax.vjp(lambda arguments: function(*arguments)[0], arguments)
        return *pull(dx), None, None

    op.defvjp(forward, backward)
    return op


def _gated(
    gate: Gate,
    site: SiteCall,
    following: SiteCall,
    x: jax.Array,
    s: list[jax.Array] | None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the input of the following site, and s of its linears."""
    function = gate.maker.expression
    h, following_s = multi_lora_gate(
        x,
        site.projections,
        KernelGate(function, gate.gradient),
        following.projections,
        site.rows.block_adapter,
        s=s,
        implementation=site.site.implementation,
    )
    plain = functools.partial(_plain_gate, site.site, function)

    def pull(frozen, rest, dh):  # the linears and the gate are computed again
        return jax.vjp(lambda frozen: plain(frozen, rest), frozen)[1](dh)[0]

    frozen = [(p.w, p.bias) for p in site.projections]
    rest = x, site.projections, site.rows.block_adapter
    attach = with_frozen_gradients(pull)
    return attach(h, frozen, jax.lax.stop_gradient(rest)), following_s


def _plain_gate(site: Site, function: RowExpression, frozen, rest) -> jax.Array:
    """Computes the result of a gate with gradients of the frozen arrays."""
    x, projections, block_adapter = rest
    given = [
        dataclasses.replace(p, w=w, bias=bias)
        for p, (w, bias) in zip(projections, frozen, strict=True)
    ]
    outputs = linear_outputs(site, x, given, block_adapter)
    return function(*outputs)[0]
