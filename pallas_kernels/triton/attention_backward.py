"""The backward pass of packed attention, as Triton kernels.

The algorithm is FlashAttention-2 (Dao, arXiv 2307.08691, section 3.1): it recomputes
the weights from the logarithm of the softmax's sum. Here the gradient of queries has a
kernel of its own, so no sum needs atomics. `attention_rows` explains tiles and
arguments.
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
def _weights_and_gradient(
    raw, lse, dp, delta, seen, SCALE: tl.constexpr, CAP: tl.constexpr
):
    """Returns the weights, and the gradient of the scores before their scale.

    Args:
        raw: Products of queries and keys.
        lse: log2 of the softmax's sum, by query.
        dp: Gradient of the weights.
        delta: Sum of weights times their gradient, by query.
        seen: Which keys each query sees; None: all.
        SCALE: Factor of the products.
        CAP: Bound of the scaled scores; 0: there is none.
    """
    FACTOR: tl.constexpr = LOG2_E if CAP > 0 else LOG2_E * SCALE
    scores = capped(raw, SCALE, CAP)
    weights = tl.exp2(scores * FACTOR - lse)
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    ds = weights * (dp - delta)
    if CAP > 0:
        ds = ds * (1 - (scores / CAP) * (scores / CAP))
    return weights, ds


@triton.jit
@typing.no_type_check
def _query_steps(
    dq,
    q,
    dout,
    lse,
    delta,
    q_ptr,
    dout_ptr,
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
    """Adds tiles of keys to the gradient of queries.

    `span`, and when q and dout are unused, as in `_forward_steps`.
    """
    begin, before, count, later = span
    for i in range(0, count):
        first = tl.where(i < before, begin, later - before * KEYS) + i * KEYS
        keys = first + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, length, HK * E, E, EP, not MASKED)
        if PART == EP:
            v = load_rows(v_ptr, keys, length, HK * E, E, EP, not MASKED)
        seen = None
        if MASKED:
            seen = is_seen(queries[:, None], keys[None, :], WINDOW)
        if PART < EP:
            raw = wide_products(
                q_ptr, queries, k_ptr, keys, length, i, H * E, HK * E, E, PART,
                not MASKED,
            )  # fmt: skip
            dp = wide_products(
                dout_ptr, queries, v_ptr, keys, length, i, H * E, HK * E, E, PART,
                not MASKED,
            )  # fmt: skip
        else:
            raw = tl.dot(q, tl.trans(k))
            dp = tl.dot(dout, tl.trans(v))
        _, ds = _weights_and_gradient(
            raw, lse[:, None], dp, delta[:, None], seen, SCALE, CAP
        )
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
@typing.no_type_check
def attention_query_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    tiles_ptr,
    count_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    sound_ptr,
    dq_ptr,
    delta_ptr,
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
    """Computes the gradient of queries, T H E, and the sums of out * dout, H T.

    Grid: heads of queries, programs.
    """
    tl.static_assert(QUERIES % KEYS == 0)
    head = tl.program_id(0)
    count = tl.load(count_ptr)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        row = tl.load(tiles_ptr + count - 1 - tile)
        start = tl.load(start_ptr + row)
        length = tl.load(end_ptr + row) - start
        first = row - start
        queries = first + tl.arange(0, QUERIES)
        inside = queries < length
        sound = tl.load(sound_ptr + start + queries, mask=inside, other=0) != 0
        base = start.to(tl.int64)
        q_at = (base * H + head) * E
        kv_at = (base * HK + head // (H // HK)) * E
        lse = tl.load(lse_ptr + head * T + start + queries, mask=inside, other=0.0)
        out = load_rows(out_ptr + q_at, queries, length, H * E, E, EP, False)
        dout = load_rows(dout_ptr + q_at, queries, length, H * E, E, EP, False)
        # The output of a row that is not sound is NaN.
        out = tl.where(sound[:, None], out.to(tl.float32), 0.0)
        delta = tl.sum(out * dout.to(tl.float32), 1)
        tl.store(delta_ptr + head * T + start + queries, delta, mask=inside)
        q = 0
        if PART == EP:
            q = load_rows(q_ptr + q_at, queries, length, H * E, E, EP, False)
        dq = tl.zeros((QUERIES, EP), tl.float32)
        segment = tl.load(segment_ptr + row)
        whole, part = spans_of_keys(first, length, segment, WINDOW, QUERIES, KEYS)
        dq = _query_steps(
            dq, q, dout, lse, delta, q_ptr + q_at, dout_ptr + q_at, k_ptr + kv_at,
            v_ptr + kv_at, queries, length, whole,
            H, HK, E, EP, WINDOW, SCALE, CAP, KEYS, PART, False,
        )  # fmt: skip
        dq = _query_steps(
            dq, q, dout, lse, delta, q_ptr + q_at, dout_ptr + q_at, k_ptr + kv_at,
            v_ptr + kv_at, queries, length, part,
            H, HK, E, EP, WINDOW, SCALE, CAP, KEYS, PART, True,
        )  # fmt: skip
        store_rows(dq_ptr + q_at, queries, length, dq * SCALE, H * E, E, EP)


@triton.jit
@typing.no_type_check
def _key_steps(
    state,
    k,
    v,
    k_ptr,
    v_ptr,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    keys,
    length,
    span,
    H: tl.constexpr,
    HK: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds tiles of queries to the gradients of keys and values.

    Queries beyond the segment are zero, and so add nothing. `span`, for queries, and
    when k and v are unused, as in `_forward_steps`.
    """
    dk, dv = state
    begin, before, count, later = span
    for i in range(0, count):
        offset = tl.where(i < before, begin, later - before * QUERIES)
        first = offset + i * QUERIES
        queries = first + tl.arange(0, QUERIES)
        inside = queries < length
        lse = tl.load(lse_ptr + queries, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + queries, mask=inside, other=0.0)
        q = load_rows(q_ptr, queries, length, H * E, E, EP, False)
        dout = load_rows(dout_ptr, queries, length, H * E, E, EP, False)
        seen = None
        if MASKED:
            seen = is_seen(queries[None, :], keys[:, None], WINDOW)
        if PART < EP:
            raw = wide_products(
                k_ptr, keys, q_ptr, queries, length, i, HK * E, H * E, E, PART, False
            )
            dp = wide_products(
                v_ptr, keys, dout_ptr, queries, length, i, HK * E, H * E, E, PART, False
            )
        else:
            raw = tl.dot(k, tl.trans(q))
            dp = tl.dot(v, tl.trans(dout))
        weights, ds = _weights_and_gradient(
            raw, lse[None, :], dp, delta[None, :], seen, SCALE, CAP
        )
        dv = tl.dot(weights.to(dout.dtype), dout, dv)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
@typing.no_type_check
def attention_key_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    tiles_ptr,
    count_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    dk_ptr,
    dv_ptr,
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
    """Computes the gradients of keys and values, T HK E.

    Grid: heads of keys, programs. A program adds up the heads of queries in order.
    """
    tl.static_assert(KEYS % QUERIES == 0)
    kv_head = tl.program_id(0)
    count = tl.load(count_ptr)
    for tile in range(tl.program_id(1), count, tl.num_programs(1)):
        row = tl.load(tiles_ptr + tile)
        start = tl.load(start_ptr + row)
        length = tl.load(end_ptr + row) - start
        first = row - start
        keys = first + tl.arange(0, KEYS)
        base = start.to(tl.int64)
        kv_at = (base * HK + kv_head) * E
        k, v = 0, 0
        if PART == EP:
            k = load_rows(k_ptr + kv_at, keys, length, HK * E, E, EP, False)
            v = load_rows(v_ptr + kv_at, keys, length, HK * E, E, EP, False)
        dk = tl.zeros((KEYS, EP), tl.float32)
        dv = tl.zeros((KEYS, EP), tl.float32)
        # Queries in [first, after) and [whole, end) see the keys in part.
        after, whole, end = first + KEYS, length, length
        if WINDOW > 0:
            whole = tl.maximum((first + WINDOW) // QUERIES * QUERIES, after)
            end = tl.minimum(first + KEYS - 1 + WINDOW, length)
        middle = tl.cdiv(tl.maximum(tl.minimum(whole, length) - after, 0), QUERIES)
        before = tl.cdiv(tl.minimum(after, length) - first, QUERIES)
        masked = before + tl.cdiv(tl.maximum(end - whole, 0), QUERIES)
        heads = tl.where(tl.load(segment_ptr + row) >= 0, H // HK, 0)
        for member in range(0, heads):
            head = kv_head * (H // HK) + member
            q_at = (base * H + head) * E
            at = head * T + start
            dk, dv = _key_steps(
                (dk, dv), k, v, k_ptr + kv_at, v_ptr + kv_at, q_ptr + q_at,
                dout_ptr + q_at, lse_ptr + at, delta_ptr + at, keys, length,
                (after, middle, middle, after),
                H, HK, E, EP, WINDOW, SCALE, CAP, QUERIES, PART, False,
            )  # fmt: skip
            dk, dv = _key_steps(
                (dk, dv), k, v, k_ptr + kv_at, v_ptr + kv_at, q_ptr + q_at,
                dout_ptr + q_at, lse_ptr + at, delta_ptr + at, keys, length,
                (first, before, masked, whole),
                H, HK, E, EP, WINDOW, SCALE, CAP, QUERIES, PART, True,
            )  # fmt: skip
        store_rows(dk_ptr + kv_at, keys, length, dk * SCALE, HK * E, E, EP)
        store_rows(dv_ptr + kv_at, keys, length, dv, HK * E, E, EP)
