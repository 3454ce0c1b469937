"""Computes a part with the kernels, from the arrays of the traced function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from jaxlora.fuse.kernel_call import SiteCall, linear_outputs, with_frozen_gradients
from jaxlora.fuse.makers import Maker
from jaxlora.fuse.producers import Gate, Part
from jaxlora.fuse.row_program import RowExpression
from jaxlora.fuse.site import Site
from jaxlora.pallas_kernels import Gate as KernelGate
from jaxlora.pallas_kernels import RowArguments, multi_lora_gate, produce
from jaxlora.pallas_kernels.varying import vary, varying_axes


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
        return [*site.roots(site.outputs(x, s)), *made]
    following = SiteCall(part.gate.following, values)
    h, s = _gated(part.gate, site, following, x, s)
    made.append(_as_var(h, part.gate.maker.x))
    return [*following.roots(following.outputs(h, s)), *made]


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
    outputs = linear_outputs(site, x, given, block_adapter, w_transposed=False)
    return function(*outputs)[0]
