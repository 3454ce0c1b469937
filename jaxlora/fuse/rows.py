"""Lays the rows of a site out in token blocks that have one adapter each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Int

from jaxlora.fuse.normal_forms.forms import Atom
from jaxlora.fuse.site import Index, Selection, Site


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


def is_sorted(rows_per_choice: int) -> bool:
    """Returns whether the rows of a selection are sorted by adapter.

    They are if few consecutive rows are known to have the same adapter.
    """
    return rows_per_choice < 16


def sorted_blocks(num_tokens: int, num_adapters: int) -> tuple[int, ...]:
    """Returns the sizes of token blocks for sorted rows, the best first.

    Each adapter's rows are padded to whole blocks, which at most doubles the rows.
    """
    most = max(num_tokens // num_adapters, 1)
    size = 1 << min(most.bit_length() - 1, 6)
    return (size,)


def is_in_blocks(site: Site) -> bool:
    """Returns whether the rows of a site are token blocks as they are."""
    num_rows = site.size_of(site.row_indices)
    if site.selection is not None and is_sorted(num_rows):
        return False
    return site.block_tokens == num_rows


def make_rows(site: Site, values: dict[Any, jax.Array]) -> Rows:
    """Returns how the rows of a site are stored.

    Args:
        site: The site.
        values: The arrays of the traced function that it reads.
    """
    num_rows = site.size_of(site.row_indices)
    selection = site.selection
    if selection is None:
        slots = jnp.arange(site.num_adapters, dtype=jnp.int32)
        return _in_order(slots, site.num_adapters, site.block_tokens - num_rows)
    adapters, num_slots = _adapters(site, selection, values)
    if not is_sorted(num_rows):
        return _in_order(adapters, num_slots, site.block_tokens - num_rows)
    return _sort(jnp.repeat(adapters, num_rows), num_slots, site.block_tokens)


def _in_order(slots: jax.Array, num_slots: int, padding: int) -> Rows:
    return Rows(
        block_adapter=slots,
        num_slots=num_slots,
        source=None,
        target=None,
        padding=padding,
    )


def _adapters(
    site: Site, selection: Selection, values: dict[Any, jax.Array]
) -> tuple[jax.Array, int]:
    """Returns the slot of each choice, in the order of the rows, and their number."""
    given, count = value_of(selection.var, values), site.num_adapters
    if selection.is_ragged:
        ends = jnp.cumsum(given.astype(jnp.int32))
        place = jnp.arange(site.size_of(site.adapter_indices), dtype=ends.dtype)
        given = jnp.searchsorted(ends, place, side="right")
    else:
        given = _in_row_order(site, selection, _in_int32(given, count))
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


def _in_row_order(site: Site, selection: Selection, given: jax.Array) -> jax.Array:
    held: list[Index] = [i for dim in selection.row_dims for i in dim]
    given = given.reshape([site.sizes[i] for i in held])
    return given.transpose([held.index(i) for i in site.adapter_indices]).reshape(-1)


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
