"""Sorts packed segments into classes of length, each a call of cuDNN of its own.

cuDNN takes a packed row as segments, each with a start and a length, and sizes its
scratch memory and its launch by the number of segments times the longest one, filled or
not. Of segments longer than n tokens, T rows hold fewer than T / n. So no class but the
shortest can overflow, and none is sized much larger than T. The class of a segment
depends on its own length alone, so its neighbours do not change the kernel it runs in.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

SHORTEST_CLASS = 128  # tokens
_ROOM = 1.5  # room for short segments, relative to the number that the mean gives


class SegmentLengths(NamedTuple):
    """Bounds of the lengths of packed segments that are known at compile time.

    Attributes:
        longest: Upper bound on the tokens of a segment.
        mean: Lower bound on the mean tokens of the segments.
    """

    longest: int
    mean: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClass:
    """The segments that one call of cuDNN takes.

    Attributes:
        above: Every segment is longer than this, in tokens.
        tokens: No segment is longer than this; a divisor of T.
        segments: Number of segments that fit; a multiple of T / tokens.
    """

    above: int
    tokens: int
    segments: int


def length_classes(
    rows: int, max_segment_tokens: int, mean_segment_tokens: int
) -> tuple[LengthClass, ...]:
    """Returns classes for every length up to `max_segment_tokens`, shortest first.

    Each class is for segments twice as long as those of the class before. The first has
    room for `_ROOM` times as many segments as the mean length gives for a microbatch.
    The others cannot overflow. The number of classes is the one that should take the
    least time and scratch memory.

    Args:
        rows: T.
        max_segment_tokens: Upper bound on the length of a segment.
        mean_segment_tokens: Lower bound on the mean length of the segments.
    """
    longest = rows
    while longest % 2 == 0 and longest // 2 >= max(max_segment_tokens, SHORTEST_CLASS):
        longest //= 2
    room = math.ceil(_ROOM * rows / mean_segment_tokens)
    options, sizes = [], [longest]
    while True:
        # cuDNN ignores the offsets where a sequence has room for one segment.
        times = max(2, math.ceil(room * sizes[0] / rows))
        options.append((_cost(sizes, times), times, tuple(sizes)))
        if sizes[0] % 2 or sizes[0] // 2 < SHORTEST_CLASS:
            break
        sizes.insert(0, sizes[0] // 2)
    _, times, sizes = min(options)
    return tuple(
        LengthClass(
            above=above,
            tokens=tokens,
            segments=rows // tokens * (2 if above else times),
        )
        for above, tokens in zip((0, *sizes), sizes, strict=False)
    )


def _cost(sizes: Sequence[int], times: int) -> float:
    """Returns the relative cost of a choice of classes.

    cuDNN takes time for all the room of a class, filled or not, and each class reads T
    rows. Scratch memory grows with the room of a class times its length. The factors
    are fitted to a forward and backward pass on an H200: 35 us for room of T tokens,
    and 90 us for a class.

    Args:
        sizes: Longest segment of each class.
        times: Room of the first class, in multiples of T tokens.
    """
    others = len(sizes) - 1
    scratch = max(times * sizes[0], 2 * sizes[-1] if others else 0) / sizes[-1]
    return times + 2 * others + 2.5 * len(sizes) + scratch


def shortest_class(
    rows: int, max_segment_tokens: int, mean_segment_tokens: int
) -> LengthClass:
    """Returns the class of the shortest segments, the only one that can overflow."""
    return length_classes(rows, max_segment_tokens, mean_segment_tokens)[0]


class Members(NamedTuple):
    """The segments of one class: S of them, empty ones at the end included.

    Attributes:
        is_member: T. Whether a row belongs to a segment of the class.
        overflows: T. Whether a row belongs to a segment for which the class has no
            room.
        index: T. Number of the row's segment in the class.
        offset: T. Distance of a row from the start of its segment.
        starts: S. First row of each segment; T for an empty one.
        lengths: S. Number of rows of each segment; 0 for an empty one.
    """

    is_member: Array
    overflows: Array
    index: Array
    offset: Array
    starts: Array
    lengths: Array


def segment_bounds(
    segment_ids: Int[Array, " T"],
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Returns the first row of each row's segment, and the row after its last one.

    Padding rows in a row count as one segment. It uses no scatter, which a
    deterministic program would run one row at a time.
    """
    t = segment_ids.shape[0]
    rows = jnp.arange(t, dtype=jnp.int32)
    changes = jnp.append(True, segment_ids[1:] != segment_ids[:-1])
    start = jax.lax.cummax(jnp.where(changes, rows, 0))
    later = jax.lax.cummin(jnp.where(changes, rows, t), reverse=True)
    return start, jnp.append(later[1:], t)


def members_of(
    segment_ids: Int[Array, " T"], classes: tuple[LengthClass, ...]
) -> tuple[Members, ...]:
    """Sorts the segments of packed rows into classes; padding rows are in none.

    It uses no scatter, for the same reason as `segment_bounds`.
    """
    t = segment_ids.shape[0]
    rows = jnp.arange(t, dtype=jnp.int32)
    start, end = segment_bounds(segment_ids)
    length = jnp.where(segment_ids >= 0, end - start, 0)

    def members(c: LengthClass) -> Members:
        is_member = (length > c.above) & (length <= c.tokens)
        begun = jnp.cumsum(is_member & (rows == start), dtype=jnp.int32)
        # The rows before the n-th start are those where fewer than n have begun.
        order = jnp.arange(c.segments, dtype=jnp.int32)
        starts = (begun <= order[:, None]).sum(1, dtype=jnp.int32)
        lengths = length.at[starts].get(mode="fill", fill_value=0)
        fits = begun <= c.segments
        index = jnp.clip(begun - 1, 0, c.segments - 1)
        offset = rows - start
        return Members(
            is_member & fits, is_member & ~fits, index, offset, starts, lengths
        )

    return tuple(map(members, classes))
