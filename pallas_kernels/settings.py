"""Per-slot numbers that the fused kernels read, computed once for all linears."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxlora.pallas_kernels.dropout import inverse_keep, threshold

RANK_STEP = 64  # ranks of one step of the kernels' LoRA products
ROWS = ("factor", "chunks", "threshold")


@typing.no_type_check  # JAX rebuilds it around things that are no arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelSettings:
    """The slots' settings of P projections, as the kernels read them.

    A model computes them once and hands every layer the same arrays. Computed by each
    layer, they become one XLA kernel with three outputs for every linear of the model,
    and XLA takes longer to compile that one than all the other kernels together.

    Attributes:
        factor: Multiplies s: `scaling`, over the probability of keeping a feature.
        chunks: Steps of 64 ranks that each slot fills; 0 where it is switched off.
        threshold: A feature is dropped where its random word is below.
        place: Index of this projection among the P, an array of one element.
    """

    factor: Float[Array, "P G"] | None
    chunks: Int[Array, "P G"] | None
    threshold: UInt[Array, "P G"] | None
    place: Int[Array, " 1"] | None

    def only(self, *names: str) -> "KernelSettings":
        """The same with None for rows that a kernel does not read.

        XLA's compile time grows with the number of a kernel's operands.
        """
        unread = {name: None for name in ROWS if name not in names}
        return dataclasses.replace(self, **unread)

    def here(self) -> "KernelSettings":
        """Selects this projection's rows, G each. Only for use in a kernel."""
        refs: Any = self
        place = refs.place[0]
        given = {name: getattr(refs, name) for name in ROWS}
        rows = {k: None if ref is None else ref.at[place] for k, ref in given.items()}
        return KernelSettings(**rows, place=None)


def kernel_settings(
    scaling: Float[Array, "P G"],
    rank: Int[Array, "P G"],
    rate: Float[Array, "P G"] | None,
) -> list[KernelSettings]:
    """Computes the settings of P projections; returns one object for each.

    Args:
        scaling: `lora_alpha / rank` of each slot; 0 switches a slot off.
        rank: Rank of each slot.
        rate: Dropout rate of each slot; None: nothing is dropped.
    """
    rate = jnp.zeros_like(scaling) if rate is None else rate
    live = jnp.where(scaling == 0, 0, rank)
    shared = (
        (scaling * inverse_keep(rate)).astype(jnp.float32),
        jax.lax.div(live + (RANK_STEP - 1), jnp.int32(RANK_STEP)),
        threshold(rate),
    )
    places = np.arange(scaling.shape[0], dtype=np.int32)[:, None]
    return [KernelSettings(*shared, jnp.asarray(place)) for place in places]
