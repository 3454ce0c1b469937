"""Lays the rows of a site out in token blocks that have one adapter each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Int

from jaxlora.fuse.normal_forms.forms import Atom
from jaxlora.fuse.site import Linear, Selection, Site
from jaxlora.pallas_kernels.dropout import TILE_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The storage of rows [T, ...] in token blocks.

    Attributes:
        block_adapter: The slot of each token block; -1: it has no rows.
        num_slots: Slots of the kernels: the adapters, and one for rows without one.
        source: For each stored row the row that it holds, or T if it is padding; None:
            the blocks hold the rows in their order, and `padding` rows each.
        target: Where each row is stored; None as for `source`.
        padding: Rows of zeros at the end of each token block.
    """

    block_adapter: Int[Array, " NB"]
    num_slots: int
    source: Int[Array, " S"] | None
    target: Int[Array, " T"] | None
    padding: int

    def store(self, value: jax.Array) -> jax.Array:
        """Returns rows [T, K] in token blocks [S, K]."""
        if self.source is not None:
            return value.at[self.source].get(mode="fill", fill_value=0)
        if not self.padding:
            return value
        blocks = value.reshape(self.block_adapter.shape[0], -1, value.shape[1])
        blocks = jnp.pad(blocks, [(0, 0), (0, self.padding), (0, 0)])
        return blocks.reshape(-1, value.shape[1])

    def restore(self, value: jax.Array) -> jax.Array:
        """Returns the rows [T, N] of token blocks [S, N]."""
        if self.target is not None:
            return value.at[self.target].get(unique_indices=True, mode="clip")
        if not self.padding:
            return value
        blocks = value.reshape(self.block_adapter.shape[0], -1, value.shape[1])
        return blocks[:, : -self.padding].reshape(-1, value.shape[1])


def value_of(atom: Atom, values: dict[Any, jax.Array]) -> jax.Array:
    """Returns the value of a variable or a literal."""
    if isinstance(atom, core.Literal):
        aval: Any = atom.aval
        return jnp.asarray(atom.val, aval.dtype)
    return values[atom]


def _is_sorted(linear: Linear) -> bool:
    """Returns whether the rows of a linear are sorted by adapter.

    They are if few consecutive rows are known to choose the same adapter.
    """
    return linear.selection is not None and linear.size_of(linear.row_indices) < 16


def block_sizes(linear: Linear) -> tuple[int, ...]:
    """Returns the sizes of token blocks that suit a linear, the best first.

    Where rows are sorted, each adapter's are padded to whole blocks, which at most
    doubles them.
    """
    if _is_sorted(linear):
        most = max(linear.num_tokens // linear.num_adapters, 1)
        return (1 << min(most.bit_length() - 1, 6),)
    rows = linear.size_of(linear.row_indices)
    return rows, -(-rows // TILE_TOKENS) * TILE_TOKENS


def is_in_blocks(site: Site) -> bool:
    """Returns whether the rows of a site are token blocks as they are."""
    rows = site.first.size_of(site.first.row_indices)
    return site.block_tokens == rows and not _is_sorted(site.first)


def make_rows(linear: Linear, block_tokens: int, values: dict[Any, jax.Array]) -> Rows:
    """Returns how the rows of a linear are stored.

    Args:
        linear: The linear.
        block_tokens: Rows of a token block.
        values: The arrays of the traced function that it reads.
    """
    num_rows, num_slots = linear.size_of(linear.row_indices), linear.num_adapters
    selection = linear.selection
    if selection is None:
        slots = jnp.arange(num_slots, dtype=jnp.int32)
    else:
        slots, num_slots = _adapters(linear, selection, values)
    if _is_sorted(linear):
        return _sort(jnp.repeat(slots, num_rows), num_slots, block_tokens)
    return Rows(
        block_adapter=slots,
        num_slots=num_slots,
        source=None,
        target=None,
        padding=block_tokens - num_rows,
    )


def _adapters(
    linear: Linear, selection: Selection, values: dict[Any, jax.Array]
) -> tuple[jax.Array, int]:
    """Returns the slot of each choice, in the order of the rows, and their number."""
    given, count = value_of(selection.var, values), linear.num_adapters
    if selection.is_ragged:
        ends = jnp.cumsum(given.astype(jnp.int32))
        place = jnp.arange(linear.size_of(linear.adapter_indices), dtype=ends.dtype)
        given = jnp.searchsorted(ends, place, side="right")
    else:
        held = [i for dim in selection.row_dims for i in dim]
        given = _in_int32(given, count).reshape([linear.size_of([i]) for i in held])
        order = [held.index(i) for i in linear.adapter_indices]
        given = given.transpose(order).reshape(-1)
    if selection.outside == "clip":
        return jnp.clip(given, 0, count - 1).astype(jnp.int32), count
    is_inside = (given >= 0) & (given < count)
    return jnp.where(is_inside, given, count).astype(jnp.int32), count + 1


def _in_int32(entries: jax.Array, count: int) -> jax.Array:
    """Returns entries in a type that holds `count`; those beyond it become `count`."""
    info = jnp.iinfo(entries.dtype)
    if info.max > count:
        entries = jnp.minimum(entries, jnp.asarray(count, entries.dtype))
    if info.min < -1:
        entries = jnp.maximum(entries, jnp.asarray(-1, entries.dtype))
    return entries.astype(jnp.int32)


def _sort(slot: Int[Array, " T"], num_slots: int, block: int) -> Rows:
    """Sorts rows by slot, and pads those of each slot to whole blocks."""
    num_tokens = slot.shape[0]
    num_blocks = -(-num_tokens // block) + num_slots
    counts = jnp.zeros((num_slots,), jnp.int32).at[slot].add(1)
    blocks = (counts + block - 1) // block
    ends = jnp.cumsum(blocks)
    order = jnp.argsort(slot, stable=True)
    in_order = slot[order]
    first_row = jnp.cumsum(counts) - counts
    place = jnp.arange(num_tokens, dtype=jnp.int32) - first_row[in_order]
    stored = (ends - blocks)[in_order] * block + place
    block_slot = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right")
    return Rows(
        block_adapter=jnp.where(block_slot < num_slots, block_slot, -1).astype(
            jnp.int32
        ),
        num_slots=num_slots,
        source=jnp.full((num_blocks * block,), num_tokens, jnp.int32)
        .at[stored]
        .set(order.astype(jnp.int32)),
        target=jnp.zeros((num_tokens,), jnp.int32).at[order].set(stored),
        padding=0,
    )
