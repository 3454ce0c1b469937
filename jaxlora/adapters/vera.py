"""The frozen matrices of VeRA, drawn from a seed as PEFT draws them.

VeRA (arXiv 2310.11454) adds `(d * (x A)) B * b` to the output of a linear. A and B are
random and shared by all linears of an adapter, which take the first of their rows and
columns. The vectors d and b are trained, in each linear.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VeraMatrices:
    """The matrices that all linears of an adapter share.

    Attributes:
        a: Shrink matrix A for the largest number of input features, K r, float32.
        b: Expand matrix B for the largest number of output features, r N, float32.
        key: The seed that they were drawn from (`projection_prng_key`).
        is_saved: Whether a PEFT folder holds them beside the seed.
    """

    a: Float[np.ndarray, "K R"]
    b: Float[np.ndarray, "R N"]
    key: int
    is_saved: bool = True


@functools.lru_cache(maxsize=8)
def draw_matrices(
    key: int, rank: int, in_features: int, out_features: int
) -> VeraMatrices:
    """Draws the matrices of PEFT's `VeraModel`, to the bit.

    PEFT draws A, r K, and then B, N r, from `torch.Generator("cpu")`: a Mersenne
    Twister, of which each number takes the low 24 bits of one output. Both are uniform,
    with bounds of +-sqrt(6 / columns).

    Args:
        key: Seed, of which torch takes the low 32 bits.
        rank: Rank r.
        in_features: Largest number of input features of the adapter's linears, K.
        out_features: Largest number of output features, N.
    """
    stream = np.random.RandomState(key & 0xFFFFFFFF)

    def draw(rows: int, columns: int) -> np.ndarray:
        bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))
        low, high = np.float32(-bound), np.float32(bound)
        drawn = stream.randint(0, 2**32, (rows, columns), dtype=np.uint32)
        unit = (drawn & 0xFFFFFF).astype(np.float64) * 2.0**-24
        # It is rounded once, as the result of a fused multiply-add.
        return (unit * np.float64(high - low) + np.float64(low)).astype(np.float32)

    a, b = draw(rank, in_features).T, draw(out_features, rank).T
    return VeraMatrices(a=a, b=b, key=key)
