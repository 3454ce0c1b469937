"""VeRA's tables of the slots: random matrices that all linears share."""

import dataclasses
import typing

import jax
import numpy as np
from jaxtyping import Array, Bool, Float


@typing.no_type_check  # JAX rebuilds it around things that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class VeraTables:
    """The matrices of each slot. All linears have the same, in a first axis of one.

    Attributes:
        a: Shrink matrices for the largest number of input features.
        b: Expand matrices for the largest number of output features.
        is_used: Whether the slot has VeRA.
    """

    a: Float[Array | np.ndarray, "1 G K R"]
    b: Float[Array | np.ndarray, "1 G R N"]
    is_used: Bool[Array | np.ndarray, "1 G"]
