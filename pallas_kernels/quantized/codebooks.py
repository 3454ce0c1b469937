"""The codebooks of nf4: its 16 values, and the 256 of its nested absmax."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
# QLoRA, arXiv 2305.14314, appendix E.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def _dynamic_values() -> np.ndarray:
    """Returns the signed 8-bit dynamic map in ascending order.

    Decade i of seven, `10**(i-7)` to `10**(i-6)`, holds the centers of `2**i` equal
    intervals, with both signs. 0 and 1 complete the 256 values.

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
        2110.02861, section 2.2.
    """
    positive = [
        10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i) for i in range(7)
    ]
    flat = np.concatenate(positive)
    return np.sort(np.concatenate([-flat, flat, [0.0, 1.0]])).astype(np.float32)


DYNAMIC = _dynamic_values()


def nearest(codebook: np.ndarray, x: Float[Array, "*B"]) -> UInt8[Array, "*B"]:
    """Returns the index of the value nearest to each x; a tie goes to the lower one.

    Args:
        codebook: Values in ascending order.
        x: Numbers to quantize.
    """
    middle = (codebook[:-1] + codebook[1:]) / 2
    # XLA fuses this, whereas a binary search would hold positions for all of x.
    return jnp.sum(x[..., None] > middle, axis=-1, dtype=jnp.uint8)


def look_up(codebook: np.ndarray, index: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns the value at each index. Indices must be below the codebook's length."""
    return jnp.asarray(codebook).at[index].get(mode="promise_in_bounds")
