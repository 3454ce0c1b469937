"""Public op `multi_lora_linear`: one frozen linear, one LoRA for each token block."""

import typing
from typing import Literal, get_args

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import xla
from pallas_kernels.dropout import Dropout

Implementation = Literal["xla"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


@typing.no_type_check  # at run time: `_check` says it better
def multi_lora_linear(
    x: Float[Array, "T K"],
    w: Float[Array, "K N"],
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    block_adapter: Int[Array, " NB"],
    *,
    bias: Float[Array, " N"] | None = None,
    dropout: Dropout | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "T N"]:
    """`y = x W + bias + scaling[g] * dropout(x) A[g] B[g]`, g by token block.

    Accumulates in float32 and returns x's dtype. W and bias are frozen: their
    gradient is zero by definition. The gradients of A and B are float32.

    Args:
        x: Token rows; the T / NB rows of a token block share one adapter.
        w: Frozen base weight, in x's dtype.
        a: Shrink matrices of the slots; ranks below R are zero-padded.
        b: Expand matrices of the slots; ranks below R are zero-padded.
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        block_adapter: The slot of each token block; -1 belongs to nobody and gets
            the base layer's output.
        bias: Frozen bias.
        dropout: Mask of the LoRA path; None drops nothing.
        implementation: Which kernels run.

    Raises:
        ValueError: Shapes do not fit, T is not a multiple of NB, the dtypes of x and w
            differ, or the implementation is unknown.

    References:
        LoRAFusion, arXiv 2510.00206, section 5.1.
    """
    _check(x, w, a, b, block_adapter, implementation)
    return _multi_lora_linear(x, w, a, b, scaling, block_adapter, bias, dropout)


def _check(x, w, a, b, block_adapter, implementation) -> None:
    t, k = x.shape
    n, num_blocks = w.shape[1], block_adapter.shape[0]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; there is: "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if w.shape[0] != k or a.shape[1] != k or b.shape[2] != n:
        raise ValueError(
            f"shapes do not fit: x {x.shape}, w {w.shape}, a {a.shape}, b {b.shape}; "
            "wanted T K, K N, G K R, G R N."
        )
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} must share G and R.")
    if num_blocks == 0 or t % num_blocks:
        raise ValueError(
            f"x has T={t} rows, not a multiple of the NB={num_blocks} entries of "
            "block_adapter. Pad each adapter's rows to whole blocks first."
        )
    if x.dtype != w.dtype:
        raise ValueError(f"x and w must share a dtype, got {x.dtype} and {w.dtype}.")


@jax.custom_vjp
def _multi_lora_linear(x, w, a, b, scaling, block_adapter, bias, dropout):
    return xla.forward(x, w, a, b, scaling, block_adapter, bias, dropout)[0]


def _forward(x, w, a, b, scaling, block_adapter, bias, dropout):
    y, s = xla.forward(x, w, a, b, scaling, block_adapter, bias, dropout)
    return y, (x, w, s, a, b, scaling, block_adapter, dropout)


def _backward(residuals, dy):
    x, w, s, a, b, scaling, block_adapter, dropout = residuals
    dx, da, db = xla.backward(dy, x, w, s, a, b, scaling, block_adapter, dropout)
    da, db = da.astype(a.dtype), db.astype(b.dtype)
    return dx, None, da, db, None, None, None, None  # W and bias are frozen


_multi_lora_linear.defvjp(_forward, _backward)
