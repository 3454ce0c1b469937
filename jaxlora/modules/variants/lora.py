"""LoRA: two matrices A and B in each linear (arXiv 2106.09685)."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlora.config import LoraJob
from jaxlora.modules.variants.variant import (
    NewModule,
    Pair,
    TrainedTensor,
    Variant,
    lora_plus,
)

# Random numbers that are drawn before they are scaled. The cache of a core has them.
_AT_ONCE = 1 << 18


def _kaiming_uniform(job: LoraJob, new: Sequence[NewModule]) -> list[np.ndarray]:
    """Draws from +-1/sqrt(K), which is PEFT's kaiming_uniform(a = sqrt 5).

    Modules of equal K are scaled together: each call of NumPy gives the interpreter's
    lock back and waits for it again, which takes threads longer than a small module.
    """
    drawn: list[np.ndarray] = []
    for in_features, group in itertools.groupby(new, lambda one: one.kernel.shape[0]):
        modules = list(group)
        most = max(1, _AT_ONCE // (in_features * max(one.rank for one in modules)))
        for first in range(0, len(modules), most):
            drawn += _uniform(modules[first : first + most], in_features)
    return drawn


def _uniform(new: Sequence[NewModule], in_features: int) -> list[np.ndarray]:
    """Draws the arrays of modules with the same number of input features."""
    ends = np.cumsum([in_features * one.rank for one in new])
    numbers = np.empty(ends[-1])  # in float64, as NumPy draws them
    for one, part in zip(new, np.split(numbers, ends[:-1]), strict=True):
        one.rng.random(out=part)
    bound = in_features**-0.5
    numbers *= 2 * bound
    scaled = np.empty(ends[-1], np.float32)
    np.add(numbers, -bound, out=scaled, casting="same_kind")
    parts = zip(new, np.split(scaled, ends[:-1]), strict=True)
    return [part.reshape(in_features, one.rank) for one, part in parts]


def _zeros(job: LoraJob, new: Sequence[NewModule]) -> list[np.ndarray]:
    zero = np.float32(0)  # which is repeated without memory
    return [np.broadcast_to(zero, (one.rank, one.kernel.shape[1])) for one in new]


# `jaxlora.adapters.initial` has other starts of both.
LORA_A = TrainedTensor(
    name="lora_a",
    peft_name="lora_A.weight",
    dimensions=("K", "R"),
    start=_kaiming_uniform,
)
LORA_B = TrainedTensor(
    name="lora_b",
    peft_name="lora_B.weight",
    dimensions=("R", "N"),
    start=_zeros,
    rate_ratio=lora_plus,
)


class Lora(Variant):
    """The adapter's A and B are those of the kernels."""

    tensors = (LORA_A, LORA_B)

    def settings(
        self, slots: Any, in_features: int, out_features: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The number of ranks that are trained, where some are fixed."""
        if not slots.keeps_start:
            return {}
        return {"trained_rank": jax.ShapeDtypeStruct((), jnp.int32)}

    def slot_settings(self, slots: Any, rank: int, **given: Any) -> dict[str, Any]:
        """All ranks are trained."""
        return {"trained_rank": rank} if slots.keeps_start else {}

    def matrices(self, linear: Any, made: Pair | None) -> Pair:
        """A and B as they are trained."""
        return _trainable(linear, LORA_A), _trainable(linear, LORA_B)


def _trainable(linear: Any, tensor: TrainedTensor) -> Float[Array, "G ..."]:
    """The table of A or B, without a gradient of the ranks that are fixed."""
    table = linear.table(tensor.name)
    if not linear.slots.keeps_start:
        return table
    axis = 1 + tensor.dimensions.index("R")
    rank = jax.lax.broadcasted_iota(jnp.int32, table.shape, axis)
    is_trained = rank < linear.table("trained_rank")[:, None, None]
    return jnp.where(is_trained, table, jax.lax.stop_gradient(table))


VARIANT = Lora()
