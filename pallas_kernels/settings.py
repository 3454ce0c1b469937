"""Per-slot numbers that fused kernels read, computed once for all linears."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxlora.pallas_kernels.dropout import inverse_keep, threshold

RANK_STEP = 64  # ranks of one step of the kernels' LoRA products
ROWS = ("factor", "num_chunks", "threshold")


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelSettings:
    """The slots' settings of P projections, as the kernels read them.

    A model computes them once and gives every layer the same arrays. If each layer
    computed its own, they would become one XLA kernel with three outputs for every
    linear of the model, and XLA would take longer to compile that one than all the
    other kernels together.

    Attributes:
        factor: Multiplies s: `scaling / (1 - rate)`.
        num_chunks: Number of chunks of 64 ranks of each slot; 0 if it is switched off.
        threshold: A feature is dropped if its random word is below.
        index: Index of this projection among the P.
    """

    factor: Float[Array, "P G"] | None
    num_chunks: Int[Array, "P G"] | None
    threshold: UInt[Array, "P G"] | None
    index: Int[Array, " 1"] | None

    def only(self, *names: str) -> "KernelSettings":
        """Returns the settings with None for all rows but `names`.

        XLA's compile time grows with the number of a kernel's operands, so a kernel is
        given only the rows that it reads.
        """
        unread = {name: None for name in ROWS if name not in names}
        return dataclasses.replace(self, **unread)

    def select(self) -> "KernelSettings":
        """Returns this projection's rows, G each. Only for use in a kernel."""
        refs: Any = self
        index = refs.index[0]
        given = {name: getattr(refs, name) for name in ROWS}
        rows = {k: None if ref is None else ref.at[index] for k, ref in given.items()}
        return KernelSettings(**rows, index=None)


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
    live_rank = jnp.where(scaling == 0, 0, rank)
    shared = (
        (scaling * inverse_keep(rate)).astype(jnp.float32),
        jax.lax.div(live_rank + (RANK_STEP - 1), jnp.int32(RANK_STEP)),
        threshold(rate),
    )
    indices = np.arange(scaling.shape[0], dtype=np.int32)[:, None]
    return [KernelSettings(*shared, jnp.asarray(index)) for index in indices]
