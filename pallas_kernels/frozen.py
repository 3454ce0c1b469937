"""Linears on a quantized base that have no adapters."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.op import multi_lora_linear
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight


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
