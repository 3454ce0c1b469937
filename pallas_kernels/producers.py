"""Public ops: row-wise functions that also compute s of linears, and norms' gradients.

A linear with LoRA reads its input x twice: for `x W`, and for `s = scaling * dropout(x)
A`. The kernel that computes x by a row-wise function, such as a norm, can compute s
while it has x in registers. Likewise, the kernel that computes dy for the backward pass
can compute `ds = scaling * dy B^T`. The input h of a decoder's norm is also added to
the hidden states behind, so its gradient is a sum, which one kernel computes.
See docs/kernels.md.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.backends import Backend, get_backend
from jaxlora.pallas_kernels.checks import check_projections
from jaxlora.pallas_kernels.op import Passes, own_settings, passes_of
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.row_function import RowArguments, RowFunction
from jaxlora.pallas_kernels.varying import vary, varying_axes


@typing.no_type_check  # arrays may be shapes
def unsupported_producer(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    *,
    is_gradient: bool = False,
    implementation: str,
) -> str | None:
    """Returns why a back end cannot compute s beside a row-wise function.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes.
        projections: The linears that take its result.
        is_gradient: Whether its results are the gradients of their outputs instead.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        The reason as a clause without a full stop; None if it can.
    """
    backend = get_backend(implementation)
    if backend.produce is None:
        return f"{implementation} has no such kernels"
    return backend.unsupported_producer(
        function, arguments, projections, is_gradient=is_gradient
    )


@typing.no_type_check  # `checks.py` has better messages
def produce(
    function: RowFunction,
    arguments: RowArguments,
    projections: Sequence[Projection],
    block_adapter: Int[Array, " NB"],
    *,
    implementation: str,
) -> tuple[Float[Array, "T K"], list[Float[Array, "T R"]]]:
    """Computes rows by a function, and s of the linears that take them.

    It has no gradient: those of x and A are computed by `multi_lora_linears`, which is
    given s, and the function's own by the caller. The function may be evaluated with
    errors of a few units in the last place of float32.

    Args:
        function: The function, with one result.
        arguments: Its arguments.
        projections: The linears, as `multi_lora_linears` takes them.
        block_adapter: The slot of each token block; -1 for padding, whose rows of x are
            computed as others are, and whose rows of s are undefined.
        implementation: Name of a kernel back end with `produce`.

    Returns:
        x, and s of each projection, with ranks padded as its kernels need them.

    Raises:
        ValueError: As for `multi_lora_linears`.
    """
    backend = get_backend(implementation)
    x = arguments.tiles[0]
    made = check_projections(backend, x, projections, block_adapter)
    arrays = arguments, made, jnp.asarray(block_adapter)
    arrays = vary(arrays, varying_axes(arrays))
    (x,), s = _run(backend, jax.config.jax_default_matmul_precision, function, *arrays)
    return x, s


def _run(backend: Backend, precision, function, *arrays, is_gradient: bool = False):
    assert backend.produce is not None
    with own_settings(precision):
        results = backend.produce(function, *arrays, is_gradient=is_gradient)
    return vary(results, varying_axes(arrays))


@dataclasses.dataclass(frozen=True)
class Gate:
    """A row-wise function of the outputs of linears that share their input.

    Attributes:
        function: Computes the next rows h from the outputs, all [T, F].
        gradient: Computes the gradients of the outputs from the outputs and that of h.
    """

    function: RowFunction
    gradient: RowFunction


@typing.no_type_check  # `checks.py` has better messages
def multi_lora_gate(
    x: Float[Array, "T K"],
    projections: Sequence[Projection],
    gate: Gate,
    following: Sequence[Projection],
    block_adapter: Int[Array, " NB"],
    *,
    s: Sequence[Float[Array, "T R"]] | None = None,
    implementation: str,
) -> tuple[Float[Array, "T F"], list[Float[Array, "T R"]]]:
    """Computes rows h of the outputs of linears, and s of the linears that take h.

    The kernel of the gate also computes s, and in the backward pass that of its
    gradient computes ds of the projections. See `multi_lora_linears` for the linears,
    and `produce` for the gate.

    Args:
        x: Token rows.
        projections: The linears that share x.
        gate: Makes h of their outputs.
        following: The linears that take h. They get no gradient here.
        block_adapter: The slot of each token block; -1 for padding.
        s: s of the projections, if it was computed beside x.
        implementation: Name of a kernel back end with `produce`.

    Returns:
        h, and s of each following linear.

    Raises:
        ValueError: As for `multi_lora_linears`.
    """
    backend = get_backend(implementation)
    made = check_projections(backend, x, projections, block_adapter)
    h = jax.ShapeDtypeStruct((x.shape[0], made[0].b.shape[2]), x.dtype)
    after = check_projections(backend, h, following, block_adapter)
    op = _gate_with_gradient(passes_of(backend, ()), gate)
    index = jnp.zeros(1, jnp.int32)
    arrays = x, made, after, index, jnp.asarray(block_adapter), s
    return op(*vary(arrays, varying_axes(arrays)))


@functools.cache
def _gate_with_gradient(passes: Passes, gate: Gate):
    """Makes the op of linears with a gate."""
    run = functools.partial(_run, passes.backend, passes.precision)

    @jax.custom_vjp
    def op(x, projections, following, layer, block_adapter, s):
        return forward(x, projections, following, layer, block_adapter, s)[0]

    def forward(x, projections, following, layer, block_adapter, s):
        y, kept = passes.forward(x, projections, layer, block_adapter, s, False)
        (h,), s = run(gate.function, RowArguments(y), following, block_adapter)
        return (h, s), (kept, y)

    def backward(residuals, gradients):
        (kept, y), (dh, _) = residuals, gradients
        _, projections, _, _, block_adapter = kept
        dy, ds = run(
            gate.gradient,
            RowArguments([*y, dh]),
            projections,
            block_adapter,
            is_gradient=True,
        )
        return *passes.backward(False, kept, dy, ds), None, None, None, None

    op.defvjp(forward, backward)
    return op


def unsupported_norm_gradient(
    h: jax.Array | jax.ShapeDtypeStruct, w: Any = None, *, implementation: str
) -> str | None:
    """Returns why a back end leaves the gradient of a norm of such rows to XLA.

    Args:
        h: The rows that are normalized, or their shape.
        w: The frozen weight of a linear behind the norm, or None.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        The reason as a clause without a full stop; None if it can.
    """
    backend = get_backend(implementation)
    if backend.norm_gradient is None:
        return f"{implementation} has no such kernel"
    return backend.unsupported_norm_gradient(h, w)


@typing.no_type_check  # the shapes are those of the norm
def norm_gradient(
    h: Float[Array, "T D"],
    scale: Float[Array, " D"],
    dx: Float[Array, "T D"],
    dh: Float[Array, "T D"],
    *,
    eps: float,
    offset: bool = False,
    implementation: str,
) -> Float[Array, "T D"]:
    """`dh + inverse * (dnormed - inverse^2 * mean(dnormed * h) * h)`, in one pass.

    Here `inverse = 1 / sqrt(mean(h^2) + eps)` and `dnormed = dx * scale`. Each array is
    read once. The sum is in float32 and rounded once. A row depends on its own rows of
    the arguments alone, and each call gives the same bits.

    Args:
        h: The rows that were normalized.
        scale: Factor of each feature, or the factor less 1.
        dx: Gradient of the normalized rows.
        dh: Gradient that h has from elsewhere.
        eps: Added to the mean square.
        offset: Whether the factor is `1 + scale`.
        implementation: Name of a kernel back end for which
            `unsupported_norm_gradient` returns None.
    """
    backend = get_backend(implementation)
    assert backend.norm_gradient is not None
    arrays = h, scale, dx, dh
    axes = varying_axes(arrays)
    with own_settings(jax.config.jax_default_matmul_precision):
        result = backend.norm_gradient(*vary(arrays, axes), eps=eps, offset=offset)
    return vary(result, axes)
