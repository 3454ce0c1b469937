"""VeRA's tables of the slots: random matrices that all linears share.

VeRA (arXiv 2310.11454) adds `((x A) * d) B * b` to the output of a linear, where A and
B are frozen, and the vectors d and b are trained. That is LoRA with the matrices A d
and B b, so every back end runs it. Those are made in each pass and not kept: they are
as large as LoRA's, while an adapter trains and saves R + N numbers in a linear.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Pair = tuple[Float[Array, "G K R"], Float[Array, "G R N"]]


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


def vera_pair(
    a: Float[Array, "G KMAX R"],
    b: Float[Array, "G R NMAX"],
    vector_d: Float[Array, "G R"],
    vector_b: Float[Array, "G N"],
    in_features: int,
) -> Pair:
    """Returns the matrices A and B of LoRA that a linear's VeRA is equal to.

    Args:
        a: Shrink matrices of the slots.
        b: Expand matrices of the slots.
        vector_d: Trained factors of the ranks.
        vector_b: Trained factors of the output features.
        in_features: K of the linear.
    """
    of_a = a[:, :in_features] * vector_d[:, None]
    return of_a, b[:, :, : vector_b.shape[1]] * vector_b[:, None]


def chosen_pair(is_used: Bool[Array, " G"], vera: Pair, lora: Pair) -> Pair:
    """Returns VeRA's matrices in the slots that have VeRA, and LoRA's in the others."""
    chosen = is_used[:, None, None]
    return jnp.where(chosen, vera[0], lora[0]), jnp.where(chosen, vera[1], lora[1])
