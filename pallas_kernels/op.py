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
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.backends import (
    BACKENDS,
    Backend,
    get_backend,
    is_partitioned,
)
from jaxlora.pallas_kernels.dequantize import backward_weights, forward_weights
from jaxlora.pallas_kernels.dropout import TILE_TOKENS, Dropout, MaskWords
from jaxlora.pallas_kernels.given_mask import GivenMask, num_words
from jaxlora.pallas_kernels.projection import LinearShape, Projection
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight
from jaxlora.pallas_kernels.settings import ROWS, KernelSettings
from jaxlora.pallas_kernels.varying import vary, varying_axes

# This names the output of a linear, and what it keeps for its backward pass beside x. A
# policy of `jax.checkpoint` that saves the name recomputes x, and no product.
LINEAR_RESULTS = "linear_results"


@typing.no_type_check  # `_check_shapes` has better messages
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


@typing.no_type_check  # `_check_shapes` has better messages
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
    _check_alike(projections)
    is_stack = layer is not None
    for p in projections:
        if isinstance(p.w, QuantizedWeight):
            _check_quantized(p.w, x, is_stack=is_stack, w_transposed=w_transposed)
    made = tuple(
        _checked(
            backend, x, p, block_adapter, is_stack=is_stack, w_transposed=w_transposed
        )
        for p in projections
    )
    _check_mesh(backend)
    index = jnp.asarray(layer if is_stack else 0, jnp.int32).reshape(1)
    op = _with_gradient(backend, jax.config.jax_default_matmul_precision, s_names)
    arrays = x, made, index, jnp.asarray(block_adapter)
    return tuple(op(*vary(arrays, varying_axes(arrays)), w_transposed))


def _check_alike(projections: Sequence[Projection]) -> None:
    kinds = sorted({type(p.dropout).__name__ for p in projections})
    if len(kinds) != 1:
        raise ValueError(
            "projections must have the same kind of dropout or none, got "
            f"{' and '.join(kinds)}. Give those without one a Dropout of rate 0, or a "
            "GivenMask that keeps everything."
        )
    if len({p.a.shape[0] for p in projections}) != 1:
        raise ValueError(
            "projections must have the same number of slots, got "
            f"{[p.a.shape[0] for p in projections]}."
        )
    formats = [_weight_format(p) for p in projections]
    if len(set(formats)) != 1:
        raise ValueError(
            "projections must have base weights of one format, got "
            f"{' and '.join(map(str, formats))}. Call multi_lora_linears once for each "
            "format."
        )
    constants = [p.w.constants for p in projections if isinstance(p.w, QuantizedWeight)]
    for name in constants[0] if constants else ():
        values = [found[name] for found in constants]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"projections must have the same {name}, got {values}. Change it with "
                f"dataclasses.replace(w, {name}=...)."
            )


def _weight_format(projection: Projection) -> str | None:
    w = projection.w
    return w.format if isinstance(w, QuantizedWeight) else None


def _check_quantized(w: QuantizedWeight, x, *, is_stack, w_transposed) -> None:
    w.check()
    if is_stack or w_transposed:
        given = "layer" if is_stack else "w_transposed=True"
        raise ValueError(
            f"{given} was given with a quantized weight ({w.format}), which is always "
            "one weight stored N K. Leave it out, and give each layer's own weight."
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"x is {x.dtype}, but linears on a quantized weight ({w.format}) compute "
            "in bfloat16, float16 or float32. Cast x."
        )


def _checked(
    backend: Backend,
    x,
    projection: Projection,
    block_adapter,
    *,
    is_stack,
    w_transposed,
) -> Projection:
    """Checks a projection; returns it with every slot's rank."""
    p = projection
    num_slots, _, rank = p.a.shape
    _check_shapes(x, p, block_adapter, is_stack, w_transposed)
    _check_supported(
        backend,
        LinearShape(
            dtype=x.dtype,
            in_features=x.shape[1],
            out_features=p.b.shape[2],
            rank=rank,
            block_tokens=x.shape[0] // block_adapter.shape[0],
            extra=tuple(p.extra),
            weight_format=_weight_format(p),
        ),
    )
    if p.settings is not None:
        _check_settings(p.settings, num_slots)
    if isinstance(p.dropout, GivenMask):
        _check_given_mask(p, x)
    elif p.dropout is not None and p.dropout.words is not None:
        _check_words(p.dropout.words, x, num_slots)
    ranks = jnp.full((num_slots,), rank, jnp.int32) if p.rank is None else p.rank
    return dataclasses.replace(p, rank=ranks)


def _check_shapes(
    x, projection: Projection, block_adapter, is_stack, w_transposed
) -> None:
    (t, k), num_blocks = x.shape, block_adapter.shape[0]
    w, a, b = projection.w, projection.a, projection.b
    w_shape = w.shape[1:] if is_stack else w.shape
    k_n = w_shape[::-1] if w_transposed else w_shape
    if k_n != (k, b.shape[2]) or a.shape[1] != k:
        raise ValueError(
            f"shapes do not match: x {x.shape}, w {w_shape}, a {a.shape}, "
            f"b {b.shape}; wanted T K, {'N K' if w_transposed else 'K N'}, G K R, "
            "G R N."
        )
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} must share G and R.")
    if num_blocks == 0 or t % num_blocks:
        raise ValueError(
            f"x has T={t} rows, not a multiple of the NB={num_blocks} entries of "
            "block_adapter. Pad each adapter's rows to whole blocks first."
        )
    if not isinstance(w, QuantizedWeight) and x.dtype != w.dtype:
        raise ValueError(f"x and w must share a dtype, got {x.dtype} and {w.dtype}.")


def _check_words(words: MaskWords, x, num_slots: int) -> None:
    t, k = x.shape
    blocks, slots, features = (*words.token.shape[1:2], *words.feature.shape[1:])
    num_blocks = -(-t // TILE_TOKENS)
    if (blocks, slots) != (num_blocks, num_slots) or features < k:
        raise ValueError(
            f"dropout's words are for {blocks * TILE_TOKENS} tokens, {slots} slots and "
            f"{features} features, wanted {t}, {num_slots} and {k} or more. Make them "
            "with mask_words for this layer."
        )


def _check_given_mask(projection: Projection, x) -> None:
    mask: Any = projection.dropout
    wanted = (num_words(x.shape[0]), x.shape[1])
    if mask.bits.shape != wanted or mask.bits.dtype != jnp.uint32:
        raise ValueError(
            f"a given mask has bits of shape {mask.bits.shape} and dtype "
            f"{mask.bits.dtype}, wanted {wanted} and uint32 for x {x.shape}. Make them "
            "with pack_mask from a mask of x's shape."
        )
    slots = (projection.a.shape[0],)
    if jnp.shape(mask.inverse_keep) != slots:
        raise ValueError(
            "a given mask has inverse_keep of shape "
            f"{jnp.shape(mask.inverse_keep)}, wanted {slots}: one factor per slot."
        )
    if projection.settings is not None:
        raise ValueError(
            "a projection has a given mask and settings, but settings hold the factors "
            "of a Dropout. Leave settings out: the kernels compute them from "
            "inverse_keep."
        )


def _check_settings(settings: KernelSettings, num_slots: int) -> None:
    shapes = {name: np.shape(getattr(settings, name)) for name in ROWS}
    if any(shape[1:] != (num_slots,) for shape in shapes.values()):
        raise ValueError(
            f"settings has rows of shapes {shapes}, wanted (P, {num_slots}), as the "
            f"layer has {num_slots} slots. Make settings with kernel_settings for "
            "these slots."
        )


def _check_supported(backend: Backend, shape: LinearShape) -> None:
    if (reason := backend.unsupported(shape)) is not None:
        able = [b.name for b in BACKENDS.values() if b.unsupported(shape) is None]
        raise ValueError(
            f"implementation={backend.name!r} cannot run this layer: {reason}. "
            f"Use one of: {', '.join(able)}."
        )


def _check_mesh(backend: Backend) -> None:
    mesh = jax.sharding.get_abstract_mesh()
    if is_partitioned(mesh) and not backend.partitionable:
        raise ValueError(
            f"implementation={backend.name!r} under the mesh {mesh}: its kernels "
            "cannot be partitioned and would run on the whole array on every device. "
            "Call it inside jax.shard_map(check_vma=False)."
        )


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
