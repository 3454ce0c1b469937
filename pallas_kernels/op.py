"""Public ops: frozen linears with one LoRA for each token block.

They check their arguments and call the back end that `implementation` names; see
`backends.py`.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.backends import Backend, get_backend
from jaxlora.pallas_kernels.checks import (
    check_alike,
    check_mesh,
    check_quantized,
    checked,
)
from jaxlora.pallas_kernels.dequantize import backward_weights, forward_weights
from jaxlora.pallas_kernels.dora import apply_gain, dropped
from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.projection import Projection
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight
from jaxlora.pallas_kernels.varying import vary, varying_axes

# This names the output of a linear, and what it keeps for its backward pass beside x. A
# policy of `jax.checkpoint` that saves the name recomputes x, and no product.
LINEAR_RESULTS = "linear_results"


@typing.no_type_check  # `checks.py` has better messages
def multi_lora_linear(
    x: Float[Array, "T K"],
    w: Float[Array, "K N"] | Float[Array, "L K N"] | QuantizedWeight,
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    block_adapter: Int[Array, " NB"],
    *,
    rank: Int[Array, " G"] | None = None,
    bias: Float[Array, " N"] | None = None,
    dropout: Dropout | GivenMask | None = None,
    layer: Int[Array, ""] | int | None = None,
    w_transposed: bool = False,
    implementation: str = "xla",
) -> Float[Array, "T N"]:
    """`y = x W + bias + scaling[g] * dropout(x) A[g] B[g]`, g by token block.

    Accumulates in float32 and returns x's dtype. W and bias are frozen: their
    gradient is zero by definition. The gradients of A and B are float32.

    Under `jax.vmap` the kernels run once per element; lay the batch out as rows for
    one launch.

    Args:
        x: Token rows; the T / NB rows of a token block share one adapter.
        w: Frozen base weight, in x's dtype; or a stack of L of them, see `layer`; or
            a quantized weight, for which see docs/quantized_base.md.
        a: Shrink matrices of the slots; ranks below R are zero-padded.
        b: Expand matrices of the slots; ranks below R are zero-padded.
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        block_adapter: The slot of each token block; -1 for padding, whose rows of y
            and of x's gradient are zero, and whose rows of x are not read.
        rank: Rank of each slot; None: R. Kernels skip chunks of padding.
        bias: Frozen bias.
        dropout: Mask of the LoRA path, computed from a key or given by the caller; None
            drops nothing.
        layer: Index of the weight in the stack; None: w is not a stack.
        w_transposed: Whether w is stored N K. Quantized weights always are, and need
            no mention.
        implementation: Name of the kernel back end in `BACKENDS`.

    Raises:
        ValueError: The shapes do not match, T is not a multiple of NB, the dtypes of x
            and w differ, or the implementation is unknown or cannot run such a layer on
            this device.

    References:
        LoRAFusion, arXiv 2510.00206, section 5.1.
    """
    projection = Projection(
        w=w, a=a, b=b, scaling=scaling, rank=rank, bias=bias, dropout=dropout
    )
    (y,) = multi_lora_linears(
        x,
        [projection],
        block_adapter,
        layer=layer,
        w_transposed=w_transposed,
        implementation=implementation,
    )
    return y


@typing.no_type_check  # `checks.py` has better messages
def multi_lora_linears(
    x: Float[Array, "T K"],
    projections: Sequence[Projection],
    block_adapter: Int[Array, " NB"],
    *,
    layer: Int[Array, ""] | int | None = None,
    w_transposed: bool = False,
    s_names: tuple[str, ...] = (),
    implementation: str = "xla",
) -> tuple[Float[Array, "T _"], ...]:
    """`multi_lora_linear` for linears that share x, as q, k and v do.

    Fused kernels read x once for all of them, and sum its gradient in one accumulator.
    If the slots' ranks are too large for one launch, several rounded gradients are
    added. Under `jax.vmap` the kernels run once per element; lay the batch out as rows
    for one launch.

    Args:
        x: Token rows; the T / NB rows of a token block share one adapter.
        projections: The linears; all of them have a `Dropout`, or all have a
            `GivenMask`, or none has either.
        block_adapter: The slot of each token block; -1 for padding.
        layer: Index of the weights in their stacks; None: they are not stacks.
        w_transposed: Whether the weights are stored N K.
        s_names: Names that s, which the backward pass reads, has for policies of
            `jax.checkpoint`, beside `LINEAR_RESULTS`.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        y of each projection.

    Raises:
        ValueError: As for `multi_lora_linear`; or the projections have different kinds
            of dropout, or differ in the number of slots.

    References:
        LoRAFusion, arXiv 2510.00206, section 5.1.
    """
    backend = get_backend(implementation)
    check_alike(projections)
    is_stack = layer is not None
    for p in projections:
        if isinstance(p.w, QuantizedWeight):
            check_quantized(p.w, x, is_stack=is_stack, w_transposed=w_transposed)
    made = tuple(
        checked(
            backend, x, p, block_adapter, is_stack=is_stack, w_transposed=w_transposed
        )
        for p in projections
    )
    check_mesh(backend)
    index = jnp.asarray(layer if is_stack else 0, jnp.int32).reshape(1)
    op = _with_gradient(backend, jax.config.jax_default_matmul_precision, s_names)
    arrays = x, made, index, jnp.asarray(block_adapter)
    x, made, index, blocks = vary(arrays, varying_axes(arrays))
    plain = tuple(dataclasses.replace(p, dora=None) for p in made)
    outputs = op(x, plain, index, blocks, w_transposed)
    run = functools.partial(op, layer=index, w_transposed=w_transposed)
    return tuple(
        y if p.dora is None else _with_dora(run, x, p, y, blocks)
        for p, y in zip(made, outputs, strict=True)
    )


def _with_dora(run, x, projection: Projection, y, block_adapter):
    """Applies the gains of DoRA to the output of LoRA.

    Args:
        run: The op of the same layer.
        x: Token rows.
        projection: The linear.
        y: Its output with LoRA.
        block_adapter: The slot of each token block; -1 for padding.
    """
    p, z = projection, None
    assert p.dora is not None
    if p.dora.drops is not None:
        slot = jnp.maximum(block_adapter, 0)
        again = (block_adapter >= 0) & p.dora.drops[slot]
        second = dataclasses.replace(
            p, bias=None, dropout=None, dora=None, settings=None
        )
        (z,) = run(
            dropped(x, p.dropout, slot),
            (second,),
            block_adapter=jnp.where(again, block_adapter, -1),
        )
    return apply_gain(y, z, p.bias, p.dora, block_adapter)


def _trained(projection: Projection, gradients: dict[str, Array]) -> Projection:
    """Puts the gradients in a projection's fields; the other fields are frozen."""
    fields: dict[str, Any] = dict.fromkeys(
        field.name for field in dataclasses.fields(Projection)
    )
    for name in ("a", "b"):
        fields[name] = gradients[name].astype(getattr(projection, name).dtype)
    fields["extra"] = {
        name: gradients[name].astype(table.dtype)
        for name, table in projection.extra.items()
    }
    return dataclasses.replace(projection, **fields)


@contextlib.contextmanager
def _own_settings(precision: str | None) -> Iterator[None]:
    """Settings of JAX for the kernels: the caller's own are for the caller's code."""
    with (
        jax.default_matmul_precision(precision),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


@functools.cache
def _with_gradient(backend: Backend, precision: str | None, s_names: tuple[str, ...]):
    """Makes the op whose forward and backward pass are those of a back end.

    Args:
        backend: The back end.
        precision: JAX's default precision of products when the op is called, which its
            backward pass keeps, as the products of JAX do.
        s_names: Names of s beside `LINEAR_RESULTS`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def op(x, projections, layer, block_adapter, w_transposed):
        return forward(x, projections, layer, block_adapter, w_transposed)[0]

    def forward(x, projections, layer, block_adapter, w_transposed):
        readable, tied, is_n_k = forward_weights(projections, x, w_transposed)
        with _own_settings(precision):
            results = backend.forward(
                tied, readable, layer, block_adapter, w_transposed=is_n_k
            )
        y, s = vary(results, varying_axes(x))
        y, s = checkpoint_name((y, s), LINEAR_RESULTS)
        for name in s_names:
            s = checkpoint_name(s, name)
        # The residuals hold w itself, so that a caller which has it need not keep it.
        return y, (x, projections, s, layer, block_adapter)

    def backward(w_transposed, residuals, dy):
        x, projections, *rest = residuals
        readable, dy, is_n_k = backward_weights(projections, dy, x.dtype, w_transposed)
        with _own_settings(precision):
            results = backend.backward(dy, x, readable, *rest, w_transposed=is_n_k)
        dx, gradients = vary(results, varying_axes(x))
        trained = tuple(map(_trained, projections, gradients))
        return dx, trained, None, None

    op.defvjp(forward, backward)
    return op
