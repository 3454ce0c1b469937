"""The linears that fused back ends can run, and the inputs that their kernels share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxlora.pallas_kernels.dropout import TILE_TOKENS, Dropout, MaskWords, mask_words
from jaxlora.pallas_kernels.expert_rows import RowPlan, SharedBlocks
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.projection import (
    RANK_STEP,
    KernelSettings,
    LinearShape,
    Projection,
    kernel_settings,
)

MAX_RANK = 4 * RANK_STEP  # of the padded ranks for which kernels are made


def unsupported_dtype(dtype: DTypeLike) -> str | None:
    """Returns why fused kernels cannot compute in a dtype, or None if they can."""
    name = jnp.dtype(dtype).name
    if name not in ("bfloat16", "float16"):
        return f"dtype {name} is neither bfloat16 nor float16"
    return None


def unsupported_linear(
    shape: LinearShape, *, multiple: int, least: int = 0
) -> str | None:
    """Returns why fused kernels cannot run a linear, or None if they can.

    Args:
        shape: Sizes of the linear.
        multiple: K and N must be multiples of it.
        least: The smallest K and N; 0: there is none.
    """
    if (reason := unsupported_dtype(shape.dtype)) is not None:
        return reason
    k, n = shape.in_features, shape.out_features
    if k % multiple or n % multiple or min(k, n) < least:
        bound = f", at least {least}" if least else ""
        return f"the layer's {k} x {n} features are not multiples of {multiple}{bound}"
    if shape.rank > MAX_RANK:
        return f"rank {shape.rank} is larger than {MAX_RANK}"
    if shape.block_tokens % TILE_TOKENS:
        return (
            f"token blocks of {shape.block_tokens} rows are not a multiple of "
            f"{TILE_TOKENS}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of 64 token rows, each with one slot unless they are shared.

    Attributes:
        slot: Slot of each block, if it is shared the first; -1 for padding.
        order: Blocks sorted by slot, with padding last. Shared ones occur once for each
            of their slots.
        starts: Index in `order` of each slot's first block, and of the padding's.
        num_tiles: Number of pairs of blocks, [1]; the kernels neither read nor write
            the rows of those after them. None: all of them.
        usual_number: Number of blocks in these, as launches are planned; None: all.
        shared: The slots of shared blocks, or None.
    """

    slot: Int[Array, " NB"]
    order: Int[Array, " NE"]
    starts: Int[Array, " G1"]
    num_tiles: Int[Array, " 1"] | None = None
    usual_number: int | None = None
    shared: SharedBlocks | None = None

    @property
    def planned_number(self) -> int:
        """Number of blocks for which launches are planned."""
        return self.slot.shape[0] if self.usual_number is None else self.usual_number


def make_blocks(
    block_adapter: Int[Array, " NB"], num_slots: int, num_rows: int
) -> Blocks:
    """Splits token blocks into blocks of 64 rows and sorts them by slot.

    The order is found by counting NB x NB comparisons. XLA compiles these into one
    small kernel, whereas a sort takes several.

    Args:
        block_adapter: Slot of each token block; -1 for padding.
        num_slots: G.
        num_rows: T, a multiple of 64 NB.
    """
    slot = jnp.repeat(block_adapter, num_rows // TILE_TOKENS // block_adapter.shape[0])
    key = jnp.where(slot < 0, num_slots, slot)
    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    is_before = (key[None] < key[:, None]) | (
        (key[None] == key[:, None]) & (index[None] < index[:, None])
    )
    rank = is_before.sum(axis=1, dtype=jnp.int32)
    order = jnp.where(rank[None] == index[:, None], index[None], 0).sum(
        axis=1, dtype=jnp.int32
    )
    bound = jnp.arange(num_slots + 1, dtype=jnp.int32)
    starts = (key[None] < bound[:, None]).sum(axis=1, dtype=jnp.int32)
    return Blocks(slot, order, starts)


def blocks_of(plan: RowPlan) -> Blocks:
    """Returns the blocks of experts' rows."""
    usual, num_tiles = plan.usual_rows // TILE_TOKENS, plan.num_tiles
    if (shared := plan.shared) is None:
        return Blocks(plan.slot, plan.order, plan.starts, num_tiles, usual)
    slot = plan.slot.reshape(-1, TILE_TOKENS // plan.block_rows)[:, 0]
    return Blocks(slot, shared.block, shared.starts, num_tiles, usual, shared)


@dataclasses.dataclass(frozen=True)
class Term:
    """The operands of one projection's term in an expand product.

    Attributes:
        x: [T, K].
        w: [L, K, N]; [L, N, K] if the product is `transposed`.
        s: [T, R].
        b: [G, R, N] or [G, N, R]; the product says which.
        settings: Settings of the slots.
        mask: Mask of s B, as the product takes it; None without dropout.
    """

    x: Array
    w: Array
    s: Array
    b: Array
    settings: KernelSettings
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Operands:
    """The inputs that both passes of P projections with the same x read.

    Attributes:
        a: A of each projection in x's dtype, [G, K, R], with R a tile size.
        b: B of each projection in x's dtype, [G, R, N], with R a tile size.
        settings: Settings of each projection.
        masks: Words or bits of each projection's dropout mask; empty without dropout.
        blocks: Slots of the rows.
    """

    a: list[jax.Array]
    b: list[jax.Array]
    settings: list[KernelSettings]
    masks: list[MaskWords | GivenMask]
    blocks: Blocks


def make_operands(
    x: jax.Array, projections: Sequence[Projection], rows: jax.Array | RowPlan
) -> Operands:
    """Casts A and B, pads their ranks, and makes what the projections were not given.

    Args:
        x: Token rows, [T, K]; those of a token block are a multiple of 64.
        projections: The linears, all with dropout or all without.
        rows: The slot of each token block, [NB], -1 for padding; or experts' rows.
    """
    largest = max(p.a.shape[2] for p in projections)
    rank = padded_rank(largest)
    if isinstance(rows, RowPlan):
        blocks = blocks_of(rows)
    else:
        blocks = make_blocks(rows, projections[0].a.shape[0], x.shape[0])
    return Operands(
        a=[_pad_rank(p.a.astype(x.dtype), 2, rank) for p in projections],
        b=[_pad_rank(p.b.astype(x.dtype), 1, rank) for p in projections],
        settings=[p.settings or _own_settings(p) for p in projections],
        masks=[
            _mask_source(p.dropout, blocks, x.shape[1])
            for p in projections
            if p.dropout
        ],
        blocks=blocks,
    )


def padded_rank(rank: int) -> int:
    """Rounds a rank up to a supported tile size: 16, 32 or a multiple of 64."""
    small = (r for r in (16, 32) if rank <= r)
    return next(small, -(-rank // RANK_STEP) * RANK_STEP)


def _pad_rank(x: jax.Array, axis: int, rank: int) -> jax.Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, rank - x.shape[axis])
    return jnp.pad(x, pad)


def _own_settings(p: Projection) -> KernelSettings:
    assert p.rank is not None
    if isinstance(p.dropout, Dropout):
        rate = p.dropout.rate[None]
        return kernel_settings(p.scaling[None], p.rank[None], rate)[0]
    return kernel_settings(p.factor[None], p.rank[None], None)[0]


def finite(table: Float[Array, "G _ _"]) -> Float[Array, "G _ _"]:
    """Replaces values that are not finite by zeros.

    Where slots share blocks of rows, they multiply other slots' zeros. The slot's own
    rows do not depend on them: s or its gradient is NaN there.
    """
    return jnp.where(jnp.isfinite(table), table, 0)


def marked(
    settings: Sequence[KernelSettings], projections: Sequence[Projection]
) -> list[KernelSettings]:
    """Makes s NaN in slots whose B is not finite.

    Where slots share blocks, expand does not see such values of B.
    """
    return [_marked(*one) for one in zip(settings, projections, strict=True)]


def _marked(settings: KernelSettings, projection: Projection) -> KernelSettings:
    assert settings.factor is not None and settings.index is not None
    is_finite = jnp.isfinite(projection.b).all((1, 2))
    factor = jnp.where(is_finite, settings.factor[settings.index[0]], jnp.nan)
    own = settings.only("factor")
    return dataclasses.replace(own, factor=factor[None], index=jnp.zeros(1, jnp.int32))


def _mask_source(
    dropout: Dropout | GivenMask, blocks: Blocks, num_features: int
) -> MaskWords | GivenMask:
    """Returns the given bits or words, or makes words."""
    if isinstance(dropout, GivenMask):
        return dropout
    if dropout.words is not None:
        return dropout.words
    own = dropout.given_key()[None], blocks.slot, dropout.token_index
    return mask_words(*own, num_features)[0]


def weigh(
    rows: Float[Array, "T R"], row_weights: Float[Array, " T"] | None
) -> Float[Array, "T R"]:
    """Multiplies rows by weights, if there are any; keeps the dtype."""
    if row_weights is None:
        return rows
    return (rows * row_weights[:, None]).astype(rows.dtype)
