"""Computes a site with the kernels, from the arrays of the traced function."""

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

from jaxlora.fuse.rows import make_rows, value_of
from jaxlora.fuse.site import Branch, Index, Operand, Site, SiteProjection
from jaxlora.pallas_kernels import (
    GivenMask,
    Projection,
    multi_lora_linears,
    pack_mask,
)


def inputs_of(site: Site) -> list[core.Var]:
    """Returns the variables that a site reads, each once."""
    operands = [site.x]
    for p in site.projections:
        operands += [p.w, *p.w_scales]
        operands += [o for branch in p.branches for o in (*branch.a, *branch.b)]
        operands += [] if p.mask is None else [p.mask.operand]
        operands += [] if p.bias is None else [p.bias]
        operands += [*p.scales, *(operand for _, operand in p.rest)]
    atoms = [operand.var for operand in operands]
    if site.selection is not None:
        atoms.append(site.selection.var)
    return list(dict.fromkeys(v for v in atoms if isinstance(v, core.Var)))


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
            values: The arrays of the traced function, by variable; all of `inputs_of`,
                or those but x.
        """
        self.site = site
        self.values = values
        self.rows = make_rows(site, values)
        layouts = {self._is_transposed(p.w) for p in site.projections}
        self._w_transposed = layouts == {True}
        self.projections = [
            Projection(
                w=self._weight(p, self._w_transposed),
                bias=self._bias(p),
                **self._projection(p),
            )
            for p in site.projections
        ]

    def x(self) -> jax.Array:
        """Returns the input, [T, K] in token blocks."""
        x = self._array(self.site.x, self._x_order())
        return self._stored(x.astype(self.site.dtype))

    def outputs(
        self, x: jax.Array, s: Sequence[jax.Array] | None = None
    ) -> list[jax.Array]:
        """Returns the kernels' results, with gradients of frozen arrays.

        Args:
            x: The input, in token blocks.
            s: What was computed beside x; None: nothing.
        """
        return linear_outputs(
            self.site,
            x,
            self.projections,
            self.rows.block_adapter,
            w_transposed=self._w_transposed,
            s=s,
        )

    def roots(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the values of the variables that hold the sums."""
        results = []
        for p, y in zip(self.site.projections, outputs, strict=True):
            for name in self.site.names.of_y:
                y = checkpoint_name(y, name)
            results.append(self._root(p, y))
        return results

    def _x_order(self) -> tuple[Index, ...]:
        site = self.site
        return (*site.adapter_indices, *site.row_indices, *site.in_indices)

    def _shape(self, indices: Sequence[Index]) -> tuple[int, ...]:
        return tuple(self.site.sizes[i] for i in indices)

    def _array(self, operand: Operand, order: Sequence[Index]) -> jax.Array:
        """Returns an array with one dimension for each of its indices, in an order."""
        value = value_of(operand.var, self.values)
        held = operand.indices
        value = value.reshape(self._shape(held))
        kept = [i for i in order if i in held]
        return value.transpose([held.index(i) for i in kept])

    def _cast(self, operand: Operand, order: Sequence[Index]) -> jax.Array:
        """Returns a factor of A or B as the traced function rounds it.

        What it rounds to the dtype of x stays as it is: so do the kernels, and the
        gradients then are not rounded.
        """
        value = self._array(operand, order)
        is_narrower = operand.dtype.itemsize < value.dtype.itemsize
        if not is_narrower or operand.dtype == self.site.dtype:
            return value
        return value.astype(operand.dtype).astype(value.dtype)

    def _stored(self, value: jax.Array) -> jax.Array:
        """Stores rows of x or of its mask in token blocks."""
        return self.rows.store(value.reshape(-1, self.site.in_features))

    def _projection(self, p: SiteProjection) -> dict[str, Any]:
        coefficients = {branch.coefficient for branch in p.branches}
        shared = coefficients.pop() if len(coefficients) == 1 else 1.0
        a = [self._factor(p, branch, "a") for branch in p.branches]
        b = [
            _times(self._factor(p, branch, "b"), branch.coefficient / shared)
            for branch in p.branches
        ]
        scaling = shared * jnp.ones((self.site.num_adapters,), jnp.float32)
        ones = jnp.ones((self.rows.num_slots,), jnp.float32)
        return {
            "a": self._slots(a[0] if len(a) == 1 else jnp.concatenate(a, axis=2)),
            "b": self._slots(b[0] if len(b) == 1 else jnp.concatenate(b, axis=1)),
            "scaling": self._slots(scaling, self._outside()),
            "dropout": self._mask(p, ones),
        }

    def _outside(self) -> float:
        """Returns the scaling of rows without an adapter."""
        selection = self.site.selection
        return np.nan if selection and selection.outside == "nan" else 0.0

    def _slots(self, value: jax.Array, fill: float = 0.0) -> jax.Array:
        """Adds the slot of rows without an adapter, if there is one."""
        extra = self.rows.num_slots - value.shape[0]
        if not extra:
            return value
        pad = [(0, extra)] + [(0, 0)] * (value.ndim - 1)
        return jnp.pad(value, pad, constant_values=fill)

    def _factor(self, p: SiteProjection, branch: Branch, side: str) -> jax.Array:
        """Computes A [G, K, R] or B [G, R, N] of a branch."""
        site = self.site
        if side == "a":
            operands, order = branch.a, (*site.in_indices, *branch.rank_indices)
        else:
            operands, order = branch.b, (*branch.rank_indices, *p.out_indices)
        selection = site.selection
        slots = site.adapter_indices if selection is None else selection.table_indices
        product = self._product(operands, (*slots, *order))
        rank = site.size_of(branch.rank_indices)
        sizes = (site.in_features, rank) if side == "a" else (rank, p.out_features)
        return product.reshape(site.num_adapters, *sizes)

    def _product(
        self, operands: Sequence[Operand], order: Sequence[Index]
    ) -> jax.Array:
        """Multiplies arrays, sums over the other indices, and fills in missing ones."""
        held = [i for i in order if any(i in o.indices for o in operands)]
        if len(operands) == 1 and set(operands[0].indices) == set(held):
            product = self._cast(operands[0], held)
        else:
            dtype = jnp.result_type(*(o.var.aval for o in operands))
            arguments: list[Any] = []
            for o in operands:
                arguments += [self._cast(o, o.indices), list(o.indices)]
            product = jnp.einsum(
                *arguments, held, preferred_element_type=jnp.float32
            ).astype(dtype)
        present = [self.site.sizes[i] if i in held else 1 for i in order]
        return jnp.broadcast_to(product.reshape(present), self._shape(order))

    def _mask(self, p: SiteProjection, ones: jax.Array) -> GivenMask | None:
        if p.mask is None:
            return None
        order, operand = self._x_order(), p.mask.operand
        kept = self._spread(operand, order).astype(bool)
        kept = kept if p.mask.keeps else ~kept
        return GivenMask(pack_mask(self._stored(kept)), ones)

    def _spread(self, operand: Operand, order: Sequence[Index]) -> jax.Array:
        """Returns an array in an order, repeated over the indices that it lacks."""
        value = self._array(operand, order)
        present = [self.site.sizes[i] if i in operand.indices else 1 for i in order]
        return jnp.broadcast_to(value.reshape(present), self._shape(order))

    def _is_transposed(self, w: Operand) -> bool:
        return w.indices[-1] in self.site.in_indices

    def _weight(self, p: SiteProjection, transposed: bool) -> jax.Array:
        site = self.site
        order = (*site.in_indices, *p.out_indices)
        shape = (site.in_features, p.out_features)
        if transposed:
            order, shape = (*p.out_indices, *site.in_indices), shape[::-1]
        if not p.w_scales:
            return self._array(p.w, order).reshape(shape).astype(site.dtype)
        arguments: list[Any] = []
        for o in (p.w, *p.w_scales):
            value = self._array(o, o.indices).astype(o.dtype)
            arguments += [value, list(o.indices)]
        product = jnp.einsum(*arguments, order, preferred_element_type=jnp.float32)
        return product.reshape(shape).astype(site.dtype)

    def _bias(self, p: SiteProjection) -> jax.Array | None:
        if p.bias is None:
            return None
        return self._array(p.bias, p.out_indices).reshape(-1).astype(p.bias.dtype)

    def _root(self, p: SiteProjection, y: jax.Array) -> jax.Array:
        """Lays the kernels' result out as the traced function's."""
        site = self.site
        aval: Any = p.root.aval
        y = self.rows.restore(y)
        order = (*site.adapter_indices, *site.row_indices, *p.out_indices)
        y = y.reshape(self._shape(order))
        wanted = [i for dim in p.root_dims for i in dim]
        held = [i for i in wanted if i in order]
        y = y.transpose([order.index(i) for i in held])
        if len(held) < len(wanted):
            y = y.reshape([site.sizes[i] if i in held else 1 for i in wanted])
            y = jnp.broadcast_to(y, self._shape(wanted))
        if p.scales or p.rest:
            y = y.astype(jnp.float32)
        for scale in p.scales:
            factor = self._spread(scale, wanted).astype(scale.dtype)
            y = y * factor.astype(jnp.float32)
        for number, operand in p.rest:
            added = self._spread(operand, wanted).astype(operand.dtype)
            y = y + _times(added.astype(jnp.float32), number)
        return y.astype(aval.dtype).reshape(aval.shape)


def linear_outputs(
    site: Site,
    x: jax.Array,
    projections: Sequence[Projection],
    block_adapter: jax.Array,
    *,
    w_transposed: bool,
    s: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Returns the kernels' results, with gradients of w and bias if they are asked for.

    Args:
        site: The site.
        x: The input, in token blocks.
        projections: The linears.
        block_adapter: The slot of each token block.
        w_transposed: Whether the weights are stored N K.
        s: What was computed beside x; None: nothing.
    """
    ys = multi_lora_linears(
        x,
        projections,
        block_adapter,
        w_transposed=w_transposed,
        s=s,
        s_names=site.names.of_s,
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
