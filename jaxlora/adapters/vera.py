"""The frozen matrices of VeRA, drawn from a seed as PEFT draws them.

VeRA (arXiv 2310.11454) adds `((x A) * d) B * b` to the output of a linear. A and B are
random and shared by all linears of an adapter, which take the first of their rows and
columns. The vectors d and b are trained, in each linear.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True, slots=True)
class VeraMatrices:
    """The matrices that all linears of an adapter share.

    Attributes:
        key: The seed that they are drawn from (`projection_prng_key`), of which torch
            takes the low 32 bits.
        rank: Rank r.
        in_features: Largest number of input features of the adapter's linears, K.
        out_features: Largest number of output features, N.
        is_saved: Whether a PEFT folder holds them beside the seed.
    """

    key: int
    rank: int
    in_features: int
    out_features: int
    is_saved: bool = True

    @property
    def a(self) -> Float[np.ndarray, "K R"]:
        """Shrink matrix A, float32."""
        return _drawn(self.key, self.rank, self.in_features, self.out_features)[0]

    @property
    def b(self) -> Float[np.ndarray, "R N"]:
        """Expand matrix B, float32."""
        return _drawn(self.key, self.rank, self.in_features, self.out_features)[1]


@functools.lru_cache(maxsize=8)
def _drawn(
    key: int, rank: int, in_features: int, out_features: int
) -> tuple[Float[np.ndarray, "K R"], Float[np.ndarray, "R N"]]:
    """Draws the matrices of PEFT's `VeraModel`, to the bit.

    PEFT draws A, r K, and then B, N r, from `torch.Generator("cpu")`: a Mersenne
    Twister, of which each number takes the low 24 bits of one output. Both are uniform,
    with bounds of +-sqrt(6 / columns).
    """
    stream = np.random.RandomState(key & 0xFFFFFFFF)

    def draw(rows: int, columns: int) -> np.ndarray:
        bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns))
        low, high = np.float32(-bound), np.float32(bound)
        drawn = stream.randint(0, 2**32, (rows, columns), dtype=np.uint32)
        unit = (drawn & 0xFFFFFF).astype(np.float64) * 2.0**-24
        # It is rounded once, as the result of a fused multiply-add.
        return (unit * np.float64(high - low) + np.float64(low)).astype(np.float32)

    return draw(rank, in_features).T, draw(out_features, rank).T
