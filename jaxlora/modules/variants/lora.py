"""LoRA: two matrices A and B in each linear (arXiv 2106.09685)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlora.config import LoraJob
from jaxlora.modules.variants.variant import (
    Pair,
    TrainedTensor,
    Variant,
    lora_plus,
)

_PART = 8192  # numbers that are drawn at once


def _kaiming_uniform(
    job: LoraJob, rng: np.random.Generator, kernel: Any, rank: int
) -> np.ndarray:
    """Draws from +-1/sqrt(K), which is PEFT's kaiming_uniform(a = sqrt 5)."""
    in_features = kernel.shape[0]
    bound = in_features**-0.5
    drawn = np.empty((in_features, rank), np.float32)
    # In parts that stay in the cache, as NumPy draws in float64.
    for part in np.split(drawn.reshape(-1), range(_PART, drawn.size, _PART)):
        part[:] = rng.uniform(-bound, bound, part.size)
    return drawn


def _zeros(
    job: LoraJob, rng: np.random.Generator, kernel: Any, rank: int
) -> np.ndarray:
    return np.broadcast_to(np.float32(0), (rank, kernel.shape[1]))  # uses no memory


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
