"""Parts of the Triton kernels of attention: tiles of rows of a packed segment.

A tile is a number of rows of one segment, counted from the segment's start, for one
head. So a row's result does not depend on where its segment is packed, nor on its
neighbours: rows beyond the segment are never read. Padding rows have tiles, too, which
see no keys and so store zeros.

A kernel runs a fixed number of programs, each of which processes several tiles in turn:
the number of tiles depends on the lengths of the segments, known only on the device.

Arguments of all kernels, beside the arrays of rows, heads and features:
    tiles_ptr: First row of each tile, ascending.
    count_ptr: Number of tiles.
    start_ptr, end_ptr: First row of each row's segment, and the row after its last one.
    segment_ptr: Segment of each row, negative for padding.
    sound_ptr: Nonzero where a row's own output and its gradient count.
    H, HK: Number of heads of queries, and of keys and values.
    E, EP: Features of a head, and the power of two that holds them.
    WINDOW: How many rows back a row sees, itself included; 0: all.
    SCALE: Factor of the products of queries and keys.
    CAP: Bound of the scaled scores; 0: there is none.
    QUERIES, KEYS: Rows of a tile of queries, and of keys; one divides the other.
    PART: Features of a head that are multiplied at once, see `wide_products`; EP: all.
"""

import typing

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@typing.no_type_check
def _inside(rows, length, E: tl.constexpr, EP: tl.constexpr):
    """Tells which features of which rows exist."""
    inside = (rows < length)[:, None]
    if E != EP:  # otherwise loads would be split up
        inside = inside & (tl.arange(0, EP) < E)[None, :]
    return inside


@triton.jit
@typing.no_type_check
def load_rows(
    ptr,
    rows,
    length,
    ROW: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Loads features of some rows of a head, with zeros beyond `length` and E.

    Args:
        ptr: The head's features in the first row of the segment.
        rows: Rows, counted from there.
        length: Number of rows of the segment.
        ROW: Elements of a row, all heads together.
        E: Features of a head.
        EP: The power of two that holds them.
        WHOLE: Whether all rows are known to be inside.
    """
    features = tl.arange(0, EP)
    at = ptr + rows[:, None] * ROW + features[None, :]
    if WHOLE and E == EP:
        return tl.load(at)
    if WHOLE:
        return tl.load(at, mask=(features < E)[None, :], other=0.0)
    return tl.load(at, mask=_inside(rows, length, E, EP), other=0.0)


@triton.jit
@typing.no_type_check
def wide_products(
    x_ptr,
    x_rows,
    y_ptr,
    y_rows,
    length,
    step,
    X_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Returns the products of all pairs of rows of x and y, for wide heads.

    Whole tiles would fill the registers, so parts of both are loaded in each step, also
    of the one that the caller's loop does not change.

    Args:
        x_ptr, y_ptr: The heads' features in the first row of the segment.
        x_rows, y_rows: Rows, counted from there.
        length: Number of rows of the segment.
        step: Number of the step of the caller's loop.
        X_ROW, Y_ROW: Elements of a row, all heads together.
        E, PART: Features of a head, and of a part.
        WHOLE: Whether all rows of y are known to be inside.
    """
    # Otherwise the compiler would load all of x before the loop, which has fewer steps.
    # It adds whole rows, so that the loads are still known to be aligned.
    x_ptr = x_ptr + (step >> 30) * X_ROW
    total = tl.zeros((x_rows.shape[0], y_rows.shape[0]), tl.float32)
    for part in tl.static_range(E // PART):
        at = part * PART
        x = load_rows(x_ptr + at, x_rows, length, X_ROW, PART, PART, False)
        y = load_rows(y_ptr + at, y_rows, length, Y_ROW, PART, PART, WHOLE)
        total = tl.dot(x, tl.trans(y), total)
    return total


@triton.jit
@typing.no_type_check
def store_rows(
    ptr, rows, length, x, ROW: tl.constexpr, E: tl.constexpr, EP: tl.constexpr
):
    """Stores what `load_rows` would load."""
    features = tl.arange(0, EP)
    at = ptr + rows[:, None] * ROW + features[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=_inside(rows, length, E, EP))


@triton.jit
@typing.no_type_check
def capped(scores, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Returns the scores whose exponential has base 2 and `_factor` as its factor."""
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which neither overflows nor gives NaN.
        exponential = tl.exp2(scores * (2 * LOG2_E * SCALE / CAP))
        scores = CAP * (1 - 2 / (exponential + 1))
    return scores


@triton.jit
@typing.no_type_check
def is_seen(queries, keys, WINDOW: tl.constexpr):
    """Tells which queries see which keys, of the same segment; arguments broadcast."""
    seen = keys <= queries
    if WINDOW > 0:
        seen = seen & (keys > queries - WINDOW)
    return seen


@triton.jit
@typing.no_type_check
def spans_of_keys(
    first,
    length,
    segment,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Returns the tiles of keys that a tile of queries sees, in rows of the segment.

    A span is (first key, number of tiles before a jump, number of tiles, first key
    after the jump).

    Returns:
        The span of tiles that all queries see, and of those that need a mask.
    """
    begin, whole = first * 0, first * 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
        whole = tl.cdiv(tl.maximum(first + QUERIES - WINDOW, 0), KEYS) * KEYS
        whole = tl.minimum(whole, first)
    middle = (first - whole) // KEYS
    before = (whole - begin) // KEYS
    masked = before + tl.cdiv(tl.minimum(QUERIES, length - first), KEYS)
    if segment < 0:  # padding sees nothing
        middle, masked = 0, 0
    return (whole, middle, middle, first), (begin, before, masked, first)
