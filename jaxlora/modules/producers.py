"""Inputs of linears whose s is computed beside them, where kernels can.

A norm is followed by linears that share its result, and a gate by one linear. If the
back end has producers, the kernel of the norm or gate computes s of these linears too,
and that of the gate's gradient ds of the linears before it.
"""

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from jaxlora.modules.multi_lora_linear import MultiLoraLinear
from jaxlora.modules.norm import RmsNorm, residual_norm_gradient
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rowwise import sum_of_squares
from jaxlora.modules.shared_input import lora_projection
from jaxlora.pallas_kernels import (
    Gate,
    Projection,
    RowArguments,
    multi_lora_gate,
    produce,
    unsupported_producer,
)
from jaxlora.sharding.rules import TENSOR


def normed_input(
    norm: RmsNorm,
    h: Float[Array, "T D"],
    linears: Sequence[MultiLoraLinear],
    routing: Routing,
) -> tuple[Float[Array, "T D"], LinearInput]:
    """Returns h, and its normalized rows with s of the linears where it can.

    Args:
        norm: The norm.
        h: Rows to normalize. What is returned takes their place; see
            `RmsNorm.of_residual`.
        linears: The linears that take them; those without slots have no s.
        routing: Slot of each row, and the keys of dropout masks.
    """
    adapted = [linear for linear in linears if linear.slots is not None]
    if _can_serve(adapted):
        given = _projections(adapted, routing)
        name, scale = adapted[0].implementation, norm.scale[...]
        arguments = _arguments(h, scale)
        reason = unsupported_producer(norm.rows, arguments, given, implementation=name)
        if reason is None:
            blocks = routing.block_adapter
            h, x, s = _normed(norm.rows, name, h, scale, given, blocks)
            places = [linear.place for linear in adapted]
            return h, LinearInput(x, dict(zip(places, s, strict=True)))
    h, x = norm.of_residual(h, linears[0].implementation, linears[0].weight)
    return h, LinearInput.of(x)


def gated_input(
    linears: Sequence[MultiLoraLinear],
    gate: Gate,
    following: MultiLoraLinear,
    x: Float[Array, "T D"] | LinearInput,
    routing: Routing,
) -> LinearInput | None:
    """Returns the gated outputs of linears, and s of the linear that takes them.

    Args:
        linears: The linears that share x.
        gate: Makes the rows of their outputs.
        following: The linear that takes the rows.
        x: Rows.
        routing: Slot of each row, and the keys of dropout masks.

    Returns:
        The rows; None if the kernels cannot compute s and ds beside them.
    """
    if not _can_serve([*linears, following]):
        return None
    before, after = _projections(linears, routing), _projections([following], routing)
    rows, name = LinearInput.of(x), following.implementation
    y = jax.ShapeDtypeStruct((len(rows.x), following.in_features), rows.x.dtype)
    tests = (
        (gate.function, RowArguments([y, y]), after, False),
        (gate.gradient, RowArguments([y] * 3), before, True),
    )
    for *given, is_gradient in tests:
        if unsupported_producer(*given, is_gradient=is_gradient, implementation=name):
            return None
    h, s = multi_lora_gate(
        rows.x,
        before,
        gate,
        after,
        routing.block_adapter,
        s=[rows.s[linear.place] for linear in linears] if rows.s else None,
        implementation=name,
    )
    return LinearInput(h, {following.place: s[0]})


def _can_serve(linears: Sequence[MultiLoraLinear]) -> bool:
    """Whether the kernels have been tested with such linears.

    They are alike, are not divided over devices, and add LoRA and no more.
    """
    kinds = {linear.implementation for linear in linears}
    formats = {jax.tree.structure(linear.weight) for linear in linears}
    is_alike = len(kinds) == len(formats) == 1
    adds_lora_only = all(x.slots is not None and not x.slots.settings for x in linears)
    is_whole = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1) == 1
    return is_alike and is_whole and adds_lora_only


def _projections(
    linears: Sequence[MultiLoraLinear], routing: Routing
) -> list[Projection]:
    return [lora_projection(linear, routing) for linear in linears]


def _arguments(h: Float[Array, "T D"], scale: Float[Array, " D"]) -> RowArguments:
    """Returns the arguments of a norm.

    XLA sums the squares in the kernel that computes h, so h need not be read twice.
    """
    return RowArguments([h], [sum_of_squares(h)[:, 0]], [scale])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(rows, implementation, h, scale, projections, block_adapter):
    x, s = produce(
        rows,
        _arguments(h, scale),
        projections,
        block_adapter,
        implementation=implementation,
    )
    return h, x, s


def _forward(rows, implementation, h, scale, projections, block_adapter):
    given = projections, block_adapter
    return _normed(rows, implementation, h, scale, *given), (h, scale)


def _backward(rows, implementation, residuals, gradients):
    dh, dx, _ = gradients  # the linears compute the gradient of A
    own = residual_norm_gradient(rows, implementation, residuals, (dh, dx))
    return *own, None, None


_normed.defvjp(_forward, _backward)
