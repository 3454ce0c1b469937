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
from jaxlora.pallas_kernels.checks import check_projections
from jaxlora.pallas_kernels.dequantize import readable_weights
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
    s: Sequence[Float[Array, "T _"]] | None = None,
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
        s: What `produce` computed beside x for these projections, and has no gradient
            of its own: that of A is computed here. None: it is computed here too.
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
    made = check_projections(
        backend, x, projections, block_adapter, layer=layer, w_transposed=w_transposed
    )
    index = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1)
    op = with_gradient(passes_of(backend, s_names))
    arrays = x, made, index, jnp.asarray(block_adapter), s
    x, made, index, blocks, s = vary(arrays, varying_axes(arrays))
    plain = tuple(dataclasses.replace(p, dora=None) for p in made)
    outputs = op(x, plain, index, blocks, s, w_transposed)
    run = functools.partial(op, layer=index, s=None, w_transposed=w_transposed)
    return tuple(
        y if p.dora is None else _with_dora(run, x, p, y, blocks)
        for p, y in zip(made, outputs, strict=True)
    )


@typing.no_type_check  # `multi_lora_linear` has better messages
def frozen_linear(
    x: Float[Array, "T K"],
    w: QuantizedWeight,
    bias: Float[Array, " N"] | None,
    block_adapter: Int[Array, " NB"],
    *,
    implementation: str = "xla",
) -> Float[Array, "T N"]:
    """`y = x W + bias` on a quantized weight, by the kernels of linears with adapters.

    It is `multi_lora_linear` with one slot that is switched off.

    Args:
        x: Token rows.
        w: Frozen quantized weight.
        bias: Frozen bias.
        block_adapter: The slot of each token block in linears that have adapters; -1
            for padding, whose rows of y and of x's gradient are zero.
        implementation: Name of the kernel back end in `BACKENDS`.

    Raises:
        ValueError: As for `multi_lora_linear`; or w is not quantized.
    """
    if not isinstance(w, QuantizedWeight):
        raise ValueError(
            f"w is {type(w).__name__}, wanted a quantized weight. Multiply by a weight "
            "that is not quantized with jnp.matmul."
        )
    k, n = w.shape
    return multi_lora_linear(
        x,
        w,
        jnp.zeros((1, k, 1), x.dtype),
        jnp.zeros((1, 1, n), x.dtype),
        jnp.zeros(1),
        jnp.minimum(block_adapter, 0),
        bias=bias,
        implementation=implementation,
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
    return dataclasses.replace(projection, **fields)


@contextlib.contextmanager
def own_settings(precision: str | None) -> Iterator[None]:
    """Settings of JAX for the kernels: the caller's own are for the caller's code."""
    with (
        jax.default_matmul_precision(precision),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward and backward pass of linears that share x.

    Attributes:
        backend: The back end.
        precision: JAX's default precision of products when the op is called, which its
            backward pass keeps, as the products of JAX do.
        s_names: Names of s beside `LINEAR_RESULTS`.
    """

    backend: Backend
    precision: str | None
    s_names: tuple[str, ...]

    def forward(self, x, projections, layer, block_adapter, s, w_transposed):
        """Returns y of each projection, and what the backward pass keeps.

        Args:
            x: Token rows.
            projections: The linears.
            layer: Index of the weights in their stacks.
            block_adapter: The slot of each token block; -1 for padding.
            s: What was computed beside x; None: it is computed here.
            w_transposed: Whether the weights are stored N K.
        """
        readable, (tied,), is_n_k = readable_weights(
            projections, [x], x.dtype, w_transposed
        )
        given = {} if s is None else {"s": list(s)}
        with own_settings(self.precision):
            results = self.backend.forward(
                tied, readable, layer, block_adapter, w_transposed=is_n_k, **given
            )
        y, s = vary(results, varying_axes(x))
        y, s = checkpoint_name((y, s), LINEAR_RESULTS)
        for name in self.s_names:
            s = checkpoint_name(s, name)
        # The residuals hold w itself, so that a caller which has it need not keep it.
        return y, (x, projections, s, layer, block_adapter)

    def backward(self, w_transposed, residuals, dy, ds=None, row_weights=None):
        """Returns the gradients of x and of the projections.

        Args:
            w_transposed: Whether the weights are stored N K.
            residuals: What the forward pass kept.
            dy: Gradient of each projection's y.
            ds: What was computed beside dy; None: it is computed here.
            row_weights: Weights of rows in the gradients of A and B; see `Backward`.
        """
        x, projections, *rest = residuals
        readable, dy, is_n_k = readable_weights(
            projections, dy, x.dtype, w_transposed, is_backward=True
        )
        given: dict[str, Any] = {} if ds is None else {"ds": list(ds)}
        if row_weights is not None:
            given["row_weights"] = row_weights
        with own_settings(self.precision):
            results = self.backend.backward(
                dy, x, readable, *rest, w_transposed=is_n_k, **given
            )
        dx, gradients = vary(results, varying_axes(x))
        return dx, tuple(map(_trained, projections, gradients))


def passes_of(backend: Backend, s_names: tuple[str, ...]) -> Passes:
    """Returns the passes of a back end, called now."""
    return Passes(backend, jax.config.jax_default_matmul_precision, s_names)


@functools.cache
def with_gradient(passes: Passes):
    """Makes the op of a forward and a backward pass."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
    def op(x, projections, layer, block_adapter, s, w_transposed):
        return passes.forward(x, projections, layer, block_adapter, s, w_transposed)[0]

    def backward(w_transposed, residuals, dy):
        return *passes.backward(w_transposed, residuals, dy), None, None, None

    op.defvjp(passes.forward, backward)
    return op
