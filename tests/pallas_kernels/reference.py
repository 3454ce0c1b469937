"""The definition of the multi-adapter LoRA linear: float32, slow and simple."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import Dropout
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.pallas_kernels.quantized.weight import QuantizedWeight


def multi_lora_linear_reference(
    x: Float[Array, "T K"],
    w: Float[Array, "K N"] | QuantizedWeight,
    a: Float[Array, "G K R"],
    b: Float[Array, "G R N"],
    scaling: Float[Array, " G"],
    block_adapter: Int[Array, " NB"],
    bias: Float[Array, " N"] | None = None,
    dropout: Dropout | GivenMask | None = None,
) -> Float[Array, "T N"]:
    """Computes `multi_lora_linear` one token block at a time; an oracle for tests."""
    (y,) = multi_lora_linears_reference(
        x, [w], [a], [b], [scaling], block_adapter, [bias], [dropout]
    )
    return y


def multi_lora_linears_reference(
    x: Float[Array, "T K"],
    w: list,
    a: list[Float[Array, "G K R"]],
    b: list,
    scaling: list[Float[Array, " G"]],
    block_adapter: Int[Array, " NB"],
    bias: list,
    dropout: list,
) -> list[Array]:
    """Computes `multi_lora_linears`; each list has one entry per projection."""
    x = x.astype(jnp.float32)
    bases = base_products_reference(x, w)
    return [
        _with_lora(x, *one, block_adapter=block_adapter)
        for one in zip(bases, a, b, scaling, bias, dropout, strict=True)
    ]


def base_products_reference(x: Float[Array, "T K"], w: list) -> list[Array]:
    """Computes x W of each base weight in float32, and defines its gradient."""
    if isinstance(w[0], Fp8Weight):
        return _fp8_products(w, x)
    return [x @ _dense(one) for one in w]


def _dense(w: Array | QuantizedWeight) -> Array:
    if isinstance(w, QuantizedWeight):
        return w.dequantize(jnp.float32).T
    return w.astype(jnp.float32)


def _with_lora(x, base, a, b, scaling, bias, dropout, *, block_adapter):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    block_t = x.shape[0] // block_adapter.shape[0]
    base = base + (0 if bias is None else bias.astype(jnp.float32))
    slot = jnp.maximum(block_adapter, 0)
    mask = None if dropout is None else dropout.keep(slot, x.shape)
    out = []
    for i, g in enumerate(block_adapter.tolist()):
        rows = slice(i * block_t, (i + 1) * block_t)
        if g < 0:  # padding
            out.append(jnp.zeros_like(base[rows]))
            continue
        kept = x[rows]
        if dropout is not None and mask is not None:
            kept = jnp.where(mask[i], kept, 0) * dropout.inverse_keep[g]
        out.append(base[rows] + scaling[g] * (kept @ a[g]) @ b[g])
    return jnp.concatenate(out)


@jax.custom_vjp
def _fp8_products(w: list[Fp8Weight], x: Array) -> list[Array]:
    rounded = _round_rows(x, _largest(x))
    return [rounded @ _dense(one) for one in w]


def _fp8_forward(w, x):
    return _fp8_products(w, x), w


def _fp8_backward(w, dy):
    if not w[0].fp8_backward:
        return None, sum(d @ _dense(one).T for d, one in zip(dy, w, strict=True))
    # The scales of the output features are part of what is quantized, not of W.
    scaled = [d * one.scale for d, one in zip(dy, w, strict=True)]
    largest = functools.reduce(jnp.maximum, map(_largest, scaled))
    parts = [
        _round_rows(d, largest) @ one.values.astype(jnp.float32)
        for d, one in zip(scaled, w, strict=True)
    ]
    return None, sum(parts)


_fp8_products.defvjp(_fp8_forward, _fp8_backward)


def _largest(x: Array) -> Array:
    return jnp.max(jnp.abs(x), axis=1, keepdims=True)


def _round_rows(x: Array, largest: Array) -> Array:
    """Rounds to what e4m3 with one scale per row can hold; `largest` becomes 448."""
    scale = jnp.maximum(largest * (1 / 448), jnp.finfo(jnp.float32).tiny)
    rounded = jnp.clip(x * (1 / scale), -448, 448).astype(jnp.float8_e4m3fn)
    # Without the barrier, XLA would leave out this rounding on GPUs.
    return jax.lax.optimization_barrier(rounded).astype(jnp.float32) * scale
