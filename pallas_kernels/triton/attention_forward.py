"""The forward pass of packed attention, as a Triton kernel.

The algorithm is FlashAttention-2 (Dao, arXiv 2307.08691, section 3.1): softmax by tiles
of keys, with a running maximum. `attention_rows` explains tiles and arguments.
"""

import typing

import triton
import triton.language as tl

from jaxlora.pallas_kernels.triton.attention_rows import (
    LOG2_E,
    capped,
    is_seen,
    load_rows,
    spans_of_keys,
    store_rows,
    wide_products,
)


@triton.jit
@typing.no_type_check
def _forward_steps(
    state,
    q,
    q_ptr,
    k_ptr,
    v_ptr,
    queries,
    length,
    span,
    H: tl.constexpr,
    HK: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds tiles of keys to (sum of weighted values, maximum, sum of weights).

    `span` is (first key, number of tiles before a jump, number of tiles, key to jump
    to). The maximum is that of the scores before their factor. `q` is the tile of
    queries, which is unused if only a PART of the features is multiplied at once.
    """
    FACTOR: tl.constexpr = LOG2_E if CAP > 0 else LOG2_E * SCALE
    acc, top, total = state
    begin, before, count, later = span
    for i in range(0, count):
        first = tl.where(i < before, begin, later - before * KEYS) + i * KEYS
        keys = first + tl.arange(0, KEYS)
        if PART < EP:
            raw = wide_products(
                q_ptr, queries, k_ptr, keys, length, i, H * E, HK * E, E, PART,
                not MASKED,
            )  # fmt: skip
        else:
            k = load_rows(k_ptr, keys, length, HK * E, E, EP, not MASKED)
            raw = tl.dot(q, tl.trans(k))
        scores = capped(raw, SCALE, CAP)
        if MASKED:
            seen = is_seen(queries[:, None], keys[None, :], WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf, and -inf - -inf is NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        # The factor comes after the difference, so that the largest weight is 1.
        weights = tl.exp2((scores - base[:, None]) * FACTOR)
        rescale = tl.exp2((top - base) * FACTOR)
        total = total * rescale + tl.sum(weights, 1)
        v = load_rows(v_ptr, keys, length, HK * E, E, EP, not MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        top = new_top
    return acc, top, total


@triton.jit
@typing.no_type_check
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    tiles_ptr,
    count_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    sound_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
):
    """Computes the output, T H E, and log2 of the softmax's sum, H T.

    Grid: heads of queries, programs.
    """
    tl.static_assert(QUERIES % KEYS == 0)
    FACTOR: tl.constexpr = LOG2_E if CAP > 0 else LOG2_E * SCALE
    head = tl.program_id(0)
    count = tl.load(count_ptr)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        # The last rows of a long segment see most keys, so they come first.
        row = tl.load(tiles_ptr + count - 1 - tile)
        start = tl.load(start_ptr + row)
        length = tl.load(end_ptr + row) - start
        first = row - start
        queries = first + tl.arange(0, QUERIES)
        base = start.to(tl.int64)
        q_at = (base * H + head) * E
        kv_at = (base * HK + head // (H // HK)) * E
        q = 0
        if PART == EP:
            q = load_rows(q_ptr + q_at, queries, length, H * E, E, EP, False)
        acc = tl.zeros((QUERIES, EP), tl.float32)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        segment = tl.load(segment_ptr + row)
        whole, part = spans_of_keys(first, length, segment, WINDOW, QUERIES, KEYS)
        state = acc, top, total
        state = _forward_steps(
            state, q, q_ptr + q_at, k_ptr + kv_at, v_ptr + kv_at, queries, length,
            whole, H, HK, E, EP, WINDOW, SCALE, CAP, KEYS, PART, False,
        )  # fmt: skip
        state = _forward_steps(
            state, q, q_ptr + q_at, k_ptr + kv_at, v_ptr + kv_at, queries, length,
            part, H, HK, E, EP, WINDOW, SCALE, CAP, KEYS, PART, True,
        )  # fmt: skip
        acc, top, total = state
        total = tl.where(total > 0, total, 1.0)  # padding sees nothing
        acc = acc / total[:, None]
        inside = queries < length
        sound = tl.load(sound_ptr + start + queries, mask=inside, other=0) != 0
        acc = tl.where(sound[:, None], acc, float("nan"))
        store_rows(out_ptr + q_at, queries, length, acc, H * E, E, EP)
        lse = top * FACTOR + tl.log2(total)
        tl.store(lse_ptr + head * T + start + queries, lse, mask=inside)
