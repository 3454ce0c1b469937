"""Rows of experts: where each token's copies go, and the ways there and back.

A token has one copy for each of its k experts. The copies are grouped by expert and
then by adapter. Each group fills whole blocks of rows, so that a block has one slot,
`expert * num_adapters + adapter`, and a tile of 128 rows one expert. A copy's place
in its group is the number of the group's copies before it, which is counted: there is
no sort, and the order in a group is that of the tokens.

Both directions and both gradients are gathers. XLA's transpose of a gather would add up
rows with atomics on a GPU, in an order that differs from run to run.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxlora.pallas_kernels.dropout import TILE_TOKENS

TILE_ROWS = 128  # rows of a tile of the kernels, which have one expert
SMALL_BLOCK = 16  # rows of the smallest block, of which tensor cores sum the products


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBlocks:
    """Blocks of 64 rows with the slots that share them: an entry for each two.

    A slot's rows in a block are consecutive, and whole blocks of 16.

    Attributes:
        block: Block of 64 rows of each entry, in order of slot.
        slot: Slot of each entry; -1 for padding.
        rows: The slot's first row in the block, and the row after its last, of each
            entry, as `first << 8 | after`.
        starts: Number of entries before each slot's, and of all.
        first: First block of 16 rows of each slot.
        color: Number of each slot from 0 to 3, in which those of a block differ.
        small: Slot of each block of 16 rows; -1 for padding.
        small_starts: Number of these before each slot's, and of all but padding.
    """

    block: Int[Array, " NE"]
    slot: Int[Array, " NE"]
    rows: Int[Array, " NE"]
    starts: Int[Array, " XG1"]
    first: Int[Array, " XG"]
    color: Int[Array, " XG"]
    small: Int[Array, " NB"]
    small_starts: Int[Array, " XG1"]


@typing.no_type_check  # JAX also builds it from leaves that are not arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Where the copies of T tokens for k experts each are; see `route_rows`.

    Rows come in NB blocks of 64 or 16. Padding is at the end of groups and of tiles,
    and after the last tile that has a group.

    Attributes:
        row: Row of the copy of each token for its j-th expert. Tokens of padding have
            none: theirs are beyond the last row.
        copy: `token * k + j` of each row; T k in rows of padding.
        slot: Slot of each block, `expert * num_adapters + adapter`; -1 for padding.
        expert: Expert of each tile of 128 rows; 0 for padding.
        order: The blocks that are no padding in order, and then anything.
        starts: Index in `order` of each slot's first block, and the number of blocks
            that are no padding.
        num_tiles: Number of tiles up to the last that is no padding.
        fits: Whether all copies have a row. If not, `combine_rows` returns NaN.
        first_expert: Number in the layer of the first of these experts, which keys
            dropout masks.
        shared: If blocks have 16 rows, those of 64 with their slots; else None.
        num_adapters: G.
        usual_rows: About how many rows are in such tiles, as launches are planned.
    """

    row: Int[Array, "T k"]
    copy: Int[Array, " S"]
    slot: Int[Array, " NB"]
    expert: Int[Array, " NT"]
    order: Int[Array, " NB"]
    starts: Int[Array, " XG1"]
    num_tiles: Int[Array, " 1"]
    fits: Bool[Array, ""]
    first_expert: Int[Array, ""]
    shared: SharedBlocks | None
    num_adapters: int = dataclasses.field(metadata={"static": True})
    usual_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Number of rows, with those of padding."""
        return self.copy.shape[0]

    @property
    def block_rows(self) -> int:
        """Number of rows of a block."""
        return self.num_rows // self.slot.shape[0]

    @property
    def num_experts(self) -> int:
        """X."""
        return (self.starts.shape[0] - 1) // self.num_adapters

    @property
    def token(self) -> Int[Array, " S"]:
        """Token of each row; T in rows of padding."""
        return self.copy // self.row.shape[1]


def num_blocks(
    num_copies: int, num_experts: int, num_adapters: int, block_rows: int = TILE_TOKENS
) -> int:
    """Returns the most blocks that the copies of tokens can take, in whole tiles."""
    num_groups = min(num_experts * num_adapters, num_copies)
    full = (num_copies + (block_rows - 1) * num_groups) // block_rows
    of_tile = TILE_ROWS // block_rows
    blocks = full + (of_tile - 1) * min(num_experts, num_groups)
    return -(-blocks // of_tile) * of_tile


def _usual_rows(num_copies: int, experts: int, adapters: int, block_rows: int) -> int:
    """Returns about how many rows are used if routes are random."""
    half_filled = adapters * block_rows // 2 + (TILE_ROWS - block_rows) // 2
    most = num_blocks(num_copies, experts, adapters, block_rows) * block_rows
    return min(num_copies + experts * half_filled, most)


def _before(counts: Int[Array, "N ..."]) -> Int[Array, "N ..."]:
    """Returns the sums of the entries before each one, along the first axis."""
    return jnp.cumsum(counts, 0, dtype=jnp.int32) - counts


def route_rows(
    expert_ids: Int[Array, "T k"],
    block_adapter: Int[Array, " TB"],
    num_experts: int,
    num_adapters: int,
    *,
    most_adapters: int | None = None,
    block_rows: int = TILE_TOKENS,
    num_parts: int = 1,
    first_expert: Int[Array, ""] | int = 0,
) -> RowPlan:
    """Groups the copies of tokens by expert and adapter.

    The number of rows is the most that any routes can take. All copies are kept, so a
    token's routes depend on nothing but its own experts.

    Args:
        expert_ids: The experts of each token, all different, from 0 to X - 1. A token
            has no copy for others.
        block_adapter: Adapter of each token block; the T / TB tokens of a block share
            one; -1 for padding.
        num_experts: X.
        num_adapters: G.
        most_adapters: The most adapters that have tokens here, by which the number of
            rows goes; None: G. If more of them need more rows, the results are NaN.
        block_rows: Rows of a block, 64 or 16. With 16, there is less padding, which
            `block_rows_for` says when kernels can use.
        num_parts: Number of devices that have X experts of the tokens each.
        first_expert: Number in the layer of the first of these experts.

    Raises:
        ValueError: T is not a multiple of TB.
    """
    (t, k), num_token_blocks = expert_ids.shape, block_adapter.shape[0]
    if num_token_blocks == 0 or t % num_token_blocks:
        raise ValueError(
            f"expert_ids has T={t} tokens, not a multiple of the {num_token_blocks} "
            "entries of block_adapter. Pad each adapter's tokens to whole blocks first."
        )
    ids = expert_ids.reshape(num_token_blocks, -1, k)
    rank, counts = _count(ids, num_experts)
    mine = block_adapter[:, None] == jnp.arange(num_adapters)  # [TB, G]
    of_adapter = jnp.where(mine[:, :, None], counts[:, None], 0)  # [TB, G, X]
    earlier = jnp.where(mine[:, :, None], _before(of_adapter), 0).sum(1)  # [TB, X]
    of_tile = TILE_ROWS // block_rows
    group = -(-of_adapter.sum(0).T // block_rows)  # blocks of each [X, G]
    tiles = -(-group.sum(1) // of_tile)  # of each expert
    first_tile = _before(tiles)
    within = jnp.cumsum(group, 1, dtype=jnp.int32) - group
    first = first_tile[:, None] * of_tile + within
    base = first.T[jnp.maximum(block_adapter, 0)] * block_rows + earlier  # [TB, X]
    is_here = (block_adapter >= 0)[:, None, None] & (ids >= 0) & (ids < num_experts)
    here = jnp.where(is_here, ids, 0)
    row = jnp.take_along_axis(base[:, None] + rank, here, axis=2)
    most_adapters = num_adapters if most_adapters is None else most_adapters
    sizes = num_experts, most_adapters, block_rows
    blocks = num_blocks(t * min(k, num_experts), *sizes)
    copy = jnp.arange(t * k, dtype=jnp.int32)
    beyond = blocks * block_rows + copy.reshape(row.shape)
    row = jnp.where(is_here, row, beyond)
    # A row has at most one copy, so this adds nothing up.
    copies = jnp.full(blocks * block_rows, t * k, jnp.int32)
    copies = copies.at[row.reshape(-1)].set(copy, mode="drop", unique_indices=True)
    slot, order, starts = _blocks_of(first.reshape(-1), group.reshape(-1), blocks)
    last_tile = first_tile + tiles
    tile = jnp.arange(blocks // of_tile, dtype=jnp.int32)
    expert = (last_tile <= tile[:, None]).sum(1, dtype=jnp.int32)
    return RowPlan(
        row=row.reshape(t, k),
        copy=copies,
        slot=slot,
        expert=jnp.where(expert < num_experts, expert, 0),
        order=order,
        starts=starts,
        num_tiles=jnp.minimum(last_tile[-1:], blocks // of_tile),
        fits=last_tile[-1] * of_tile <= blocks,
        first_expert=jnp.asarray(first_expert, jnp.int32),
        shared=None
        if block_rows == TILE_TOKENS
        else _shared(first, group, slot, starts),
        num_adapters=num_adapters,
        usual_rows=_usual_rows(t * k // num_parts, *sizes),
    )


def _count(
    ids: Int[Array, "TB BT k"], num_experts: int
) -> tuple[Int[Array, "TB BT X"], Int[Array, "TB X"]]:
    """Counts the tokens of each expert in a token block: those before each, and all.

    Counts are products with zeros and ones, which are exact as long as a block has at
    most 2**24 tokens.
    """
    chosen = (ids[..., None] == jnp.arange(num_experts)).any(2)
    is_before = jnp.tril(jnp.ones((ids.shape[1],) * 2, jnp.bfloat16), -1)
    before = jnp.einsum(
        "ij,bje->bie",
        is_before,
        chosen.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    return before.astype(jnp.int32), chosen.sum(1, dtype=jnp.int32)


def _blocks_of(
    first: Int[Array, " XG"], group: Int[Array, " XG"], blocks: int
) -> tuple[Int[Array, " NB"], Int[Array, " NB"], Int[Array, " XG1"]]:
    """Returns `slot`, `order` and `starts` of a plan.

    Args:
        first: First block of each group, in ascending order.
        group: Number of blocks of each group.
        blocks: NB.
    """
    index, most = jnp.arange(blocks, dtype=jnp.int32), first.shape[0] - 1

    def group_at(ends: Array) -> Array:
        """Returns the group in which each index is; that after the last one: most."""
        found = (ends <= index[:, None]).sum(1, dtype=jnp.int32)
        return jnp.minimum(found, most)

    slot = group_at(first + group)
    is_live = (first[slot] <= index) & (index < (first + group)[slot])
    after = jnp.cumsum(group, dtype=jnp.int32)
    of_rank = group_at(after)
    order = first[of_rank] + index - (after - group)[of_rank]
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), after])
    return jnp.where(is_live, slot, -1), jnp.clip(order, 0, blocks - 1), starts


def _shared(
    first: Int[Array, "X G"],
    group: Int[Array, "X G"],
    small: Int[Array, " NB"],
    small_starts: Int[Array, " XG1"],
) -> SharedBlocks:
    """Returns the blocks of 64 rows with the slots that share them.

    Args:
        first: First block of 16 rows of each slot.
        group: Number of them.
        small: See `SharedBlocks`.
        small_starts: See `SharedBlocks`.
    """
    of_block, has_rows = TILE_TOKENS // SMALL_BLOCK, (group > 0).astype(jnp.int32)
    color = (jnp.cumsum(has_rows, 1, dtype=jnp.int32) - has_rows) % of_block
    first, group = first.reshape(-1), group.reshape(-1)
    after = first + group
    number = jnp.where(group > 0, (after - 1) // of_block - first // of_block + 1, 0)
    ends = jnp.cumsum(number, dtype=jnp.int32)
    most = small.shape[0] // of_block + first.shape[0]
    index = jnp.arange(most, dtype=jnp.int32)
    slot = (ends <= index[:, None]).sum(1, dtype=jnp.int32)
    is_entry = slot < first.shape[0]
    own = jnp.minimum(slot, first.shape[0] - 1)
    block = first[own] // of_block + index - (ends - number)[own]
    begin, end = (
        jnp.clip(one[own] - block * of_block, 0, of_block) * SMALL_BLOCK
        for one in (first, after)
    )
    return SharedBlocks(
        block=jnp.where(is_entry, block, 0),
        slot=jnp.where(is_entry, own, -1),
        rows=jnp.where(is_entry, begin << 8 | end, 0),
        starts=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        first=first,
        color=color.reshape(-1),
        small=small,
        small_starts=small_starts,
    )


def rows_at(
    table: Shaped[Array, "N ..."], index: Int[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns the rows at indices, and zeros where an index is beyond the last row."""
    return table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def gather_rows(x: Float[Array, "T D"], plan: RowPlan) -> Float[Array, "S D"]:
    """Copies each token to its rows; rows of padding are zero.

    The gradient of a token is the sum of its copies' in the order of its experts, in
    float32, rounded once.
    """
    if jnp.dtype(x.dtype).itemsize != 2 or x.shape[1] % 2:
        return rows_at(x, plan.token)
    # XLA copies words of four bytes in two thirds of the time.
    pairs = x.reshape(x.shape[0], -1, 2)
    words = rows_at(jax.lax.bitcast_convert_type(pairs, jnp.uint32), plan.token)
    return jax.lax.bitcast_convert_type(words, x.dtype).reshape(-1, x.shape[1])


def _gather_forward(x, plan):
    return gather_rows(x, plan), plan


def sum_of_copies(dx: Float[Array, "S D"], plan: RowPlan) -> Float[Array, "T D"]:
    """Returns the gradient of each token; see `gather_rows`."""
    copies = [rows_at(dx, row).astype(jnp.float32) for row in plan.row.T]
    return sum(copies[1:], copies[0]).astype(dx.dtype)


def _gather_backward(plan, dx):
    return sum_of_copies(dx, plan), None


gather_rows.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def combine_rows(
    y: Float[Array, "S D"], weights: Float[Array, "T k"], plan: RowPlan
) -> Float[Array, "T D"]:
    """Returns each token's sum of its copies times their weights.

    The sum is in the order of its experts, in float32, and is rounded once. Tokens of
    padding become zero. The gradient of a weight is the product of its copy and the
    gradient of the sum, so the backward pass reads y.

    Args:
        y: The copies of the tokens; see `gather_rows`.
        weights: Weight of each token's copy for its j-th expert.
        plan: Where the copies are.
    """
    total = jnp.where(plan.fits, jnp.float32(0), jnp.float32(jnp.nan))
    for row, weight in zip(plan.row.T, weights.T, strict=True):
        copy = rows_at(y, row).astype(jnp.float32)
        total = total + copy * weight[:, None].astype(jnp.float32)
    return total.astype(y.dtype)


def _combine_forward(y, weights, plan):
    return combine_rows(y, weights, plan), (y, weights, plan)


def _combine_backward(residuals, dy):
    y, weights, plan = residuals
    of_row = rows_at(weights.reshape(-1), plan.copy).astype(jnp.float32)
    rows = rows_at(dy, plan.token).astype(jnp.float32) * of_row[:, None]
    dweights = [
        (rows_at(y, row).astype(jnp.float32) * dy.astype(jnp.float32)).sum(1)
        for row in plan.row.T
    ]
    dweights = jnp.stack(dweights, axis=1).astype(weights.dtype)
    return rows.astype(y.dtype), dweights, None


combine_rows.defvjp(_combine_forward, _combine_backward)
