"""The gated delta rule over packed samples, as Triton kernels.

For one value head and one chunk, up to 64 rows of one sample, with queries q, keys k,
values v, corrections beta and the cumulative sums G of the logarithms of the decays:

    D_ij = exp(G_i - G_j)
    A = the part below the diagonal of beta_i (k_i . k_j) D_ij
    P = the part on and below the diagonal of SCALE (q_i . k_j) D_ij
    X = (1 + A)^-1
    r = beta (v - exp(G) k S)            S: the state that enters the chunk
    n = X r                              the corrections of the rows
    o = SCALE exp(G) q S + P n
    S' = exp(G_last) S + (exp(G_last - G) k)^T n

Chunks are counted from the first row of their sample. So the bits of a row depend on
its own sample alone, and NaN stays in its sample. A program finds its chunks by the
bounds of the samples: it does those that begin in its stretch of rows, which is one and
sometimes two. So there is no list of chunks, and nothing to sort.

Five kernels:

- `delta_prepare` computes X, P and G, for all chunks at once. A program does all value
  heads of a key head, as they share the products of keys and queries.
- `delta_forward` goes through the chunks of a sample, for one head and a part of the
  value columns, and writes o; for the backward pass also n and S.
- `delta_backward` goes through them in reverse, and writes dS and dv = beta dr. The
  gradient of r is dr = X^T (P^T do + exp(G_last - G) k dS').
- `delta_products` computes the gradients of q k^T and of k k^T from dv and n, for all
  chunks at once, and adds up the value heads of a key head. The gradient of A is
  -dr n^T, so neither A nor the gradient of X is needed. The gradient of beta is
  dr n / beta, as beta is a factor of all of n = r - A n.
- `delta_gradients` computes those of q and k from these, S and dS', and adds up the
  value heads of a key head, too. Both write a part of dg: what D and the exponentials
  give, summed over the later rows of the chunk, and the product of S' with dS'.

The scans, `delta_forward` and `delta_backward`, hold the state in float32, transposed:
[value columns, K]. So the left operand of their products is an accumulator, which stays
in registers, and the right one is what was loaded. The chain through a chunk is three
products long. X r stands for products with X beta v and X beta exp(G) k, which would
take four times the memory of X. P is kept, since computing it would lengthen both
scans. Nothing else of a chunk is kept but n and S, from which the gradients follow; if
the whole is recomputed, not even those.

**Bytes and operations.** With 32 value heads and 16 key heads of 128 x 128 in bfloat16,
a row takes 8 KiB of each of v, o, n and the gradients of v and o, 4 KiB of each of q,
k, X, P and the gradients of q and k, 2 KiB of those of q k^T and k k^T, and 16 KiB of S
and of dS'. The five kernels move 16, 56, 48, 36 and 76 KiB: 1.9 GB for 8,192 rows,
0.5 ms at 4 TB/s. The products of a chunk and head take 29 MFLOP, 0.24 ms at
500 TFLOP/s, which is what the instructions of Ampere reach on an H200. The kernels are
limited by neither, but by the time that loads and the chains of products take, as few
programs fit a multiprocessor.

**The inverse** must not be computed by powers of A, which grow without bounds where
keys are alike, while X remains small. Here the inverses of blocks on the diagonal, of
size 1, 2, 4 and so on, are joined in pairs: the block below them is -X_22 A_21 X_11.
All pairs of a size are one batched product, in three terms of bfloat16 (of tf32 where
the arrays are of float32), as the rounding of one would be magnified.

**States in memory.** Only a chunk that is not its sample's first needs the state that
enters it. No two of these begin in the same 64 rows, so `row // 64` is a slot of its
own. One more slot holds zeros: all chunks that begin a sample, and all that end one,
write zeros there and read them.

Arguments of all kernels, beside the arrays of rows, heads and features:
    start_ptr, end_ptr: First row of each row's segment, and the row after its last one.
    segment_ptr: Segment of each row, negative for padding, whose results are zeros.
    rows_ptr: Number of rows. It is no constant, so that all numbers share a program.
    H, HK: Number of value heads, and of key heads.
    K, KP: Features of a key, and the power of two that holds them.
    E: Features of a value.
    SCALE: Factor of the queries.
    PRECISION: How float32 operands are multiplied.
"""

import typing

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
SPAN = tl.constexpr(256)  # a scan's program does the samples that begin in so many rows
_BLOCK = tl.constexpr(16)
# dbeta is dv n / beta^2, which must not be 0 / 0.
_LEAST_BETA = tl.constexpr(2.0**-50)


# ---- chunks --------------------------------------------------------------------------


@triton.jit
@typing.no_type_check
def _first_chunk(row, start_ptr, end_ptr):
    """Returns the first row, from `row` on, that begins a chunk."""
    inside = (row - tl.load(start_ptr + row)) % CHUNK
    following = tl.minimum(row - inside + CHUNK, tl.load(end_ptr + row))
    return tl.where(inside == 0, row, following)


@triton.jit
@typing.no_type_check
def _is_padding(row, segment_ptr):
    return tl.load(segment_ptr + row) < 0


@triton.jit
@typing.no_type_check
def _sizes(row, end, is_padding):
    """Returns the number of rows of a chunk, and of those that are not padding."""
    size = tl.minimum(end - row, CHUNK)
    return size, tl.where(is_padding, 0, size)


@triton.jit
@typing.no_type_check
def _load(
    ptr,
    count,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Loads columns of a chunk's rows, [64, WIDTH]; zeros from a row or column on.

    Args:
        ptr: The chunk's first row.
        count: Number of rows.
        STRIDE: Elements from a row to the next.
        WIDTH: Number of columns.
        FIRST: The first column.
        LAST: The column after the last one that exists.
    """
    rows = tl.arange(0, CHUNK)
    columns = FIRST + tl.arange(0, WIDTH)
    inside = (rows < count)[:, None]
    if FIRST + WIDTH > LAST:
        inside = inside & (columns < LAST)[None, :]
    at = ptr + rows[:, None] * STRIDE + columns[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@typing.no_type_check
def _load_transposed(ptr, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the first columns of a chunk's rows, [WIDTH, 64]; zeros from a row on."""
    rows = tl.arange(0, CHUNK)
    at = ptr + rows[None, :] * STRIDE + tl.arange(0, WIDTH)[:, None]
    return tl.load(at, mask=(rows < count)[None, :], other=0.0)


@triton.jit
@typing.no_type_check
def _store_transposed(ptr, x, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Stores [WIDTH, 64] into the first columns of a chunk's rows."""
    rows = tl.arange(0, CHUNK)
    at = ptr + rows[None, :] * STRIDE + tl.arange(0, WIDTH)[:, None]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(rows < count)[None, :])


@triton.jit
@typing.no_type_check
def _load_gates(ptr, count, H: tl.constexpr):
    """Loads one number of each of a chunk's rows; zeros from a row on."""
    rows = tl.arange(0, CHUNK)
    return tl.load(ptr + rows * H, mask=rows < count, other=0.0)


@triton.jit
@typing.no_type_check
def _load_betas(ptr, count, H: tl.constexpr):
    """Loads beta of a chunk's rows; at least `_LEAST_BETA`."""
    return tl.maximum(_load_gates(ptr, count, H), _LEAST_BETA)


# ---- blocks of a chunk's square matrices ---------------------------------------------


@triton.jit
@typing.no_type_check
def _batch(
    ptr, rows, count, STRIDE: tl.constexpr, W: tl.constexpr, first, K: tl.constexpr
):
    """Loads features of batches of rows, [B, 16, W]; zeros from a row or feature on."""
    features = first + tl.arange(0, W)
    inside = (rows < count)[:, :, None]
    if K % W != 0:
        inside = inside & (features < K)[None, None, :]
    at = ptr + rows[:, :, None] * STRIDE + features[None, None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@typing.no_type_check
def _half(
    ptr, begin, count, STRIDE: tl.constexpr, W: tl.constexpr, first, K: tl.constexpr
):
    """Loads features of 32 rows, [32, W]; zeros from a row or feature on."""
    rows = begin + tl.arange(0, 2 * _BLOCK)
    features = first + tl.arange(0, W)
    inside = (rows < count)[:, None]
    if K % W != 0:
        inside = inside & (features < K)[None, :]
    at = ptr + rows[:, None] * STRIDE + features[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@typing.no_type_check
def _products(a, b, total, PRECISION: tl.constexpr):
    """Adds the products of the rows of each batch with each other."""
    return tl.dot(a, tl.permute(b, (0, 2, 1)), total, input_precision=PRECISION)


@triton.jit
@typing.no_type_check
def _decays(to, since):
    """Returns exp(to - since) of each batch; 1 at most, for what is masked later."""
    return tl.exp(tl.minimum(to[:, :, None] - since[:, None, :], 0.0))


@triton.jit
@typing.no_type_check
def _pairs(x):
    """Returns the first and the second 16 of each 32 rows, [2, 16] each."""
    return tl.split(tl.permute(tl.reshape(x, (2, 2, _BLOCK)), (0, 2, 1)))


@triton.jit
@typing.no_type_check
def _halves(x):
    """Returns the first and the second 32 rows, [1, 32] each."""
    return tl.split(tl.permute(tl.reshape(x, (2, 2 * _BLOCK)), (1, 0)))


@triton.jit
@typing.no_type_check
def _joined(first, below, second):
    """Returns the matrices of three blocks each, and zeros above the diagonal.

    Args:
        first, second: Blocks on the diagonal, [B, N, N].
        below: Blocks below it.
    """
    B: tl.constexpr = first.shape[0]
    N: tl.constexpr = first.shape[1]
    top = tl.permute(tl.join(first, tl.zeros_like(first)), (0, 1, 3, 2))
    bottom = tl.permute(tl.join(below, second), (0, 1, 3, 2))
    top = tl.reshape(top, (B, N, 2 * N))
    bottom = tl.reshape(bottom, (B, N, 2 * N))
    return tl.reshape(tl.permute(tl.join(top, bottom), (0, 3, 1, 2)), (B, 2 * N, 2 * N))


@triton.jit
@typing.no_type_check
def _split_pairs(x):
    """Returns the blocks of even, and of odd number, of [2 B, N, N]."""
    B: tl.constexpr = x.shape[0] // 2
    N: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (B, 2, N, N)), (0, 2, 3, 1)))


@triton.jit
@typing.no_type_check
def _two(x):
    """Returns the two matrices of [2, N, N]."""
    return tl.split(tl.permute(x, (1, 2, 0)))


@triton.jit
@typing.no_type_check
def _sandwich(left, middle, right, PRECISION: tl.constexpr):
    """Returns the products of three batches of matrices of float32, in three terms."""
    EXACT: tl.constexpr = "bf16x3" if PRECISION == "tf32" else PRECISION
    inner = tl.dot(middle, right, input_precision=EXACT)
    return tl.dot(left, inner, input_precision=EXACT)


@triton.jit
@typing.no_type_check
def _inverses(a, PRECISION: tl.constexpr):
    """Returns the inverses of 1 + a, where a is zero but below the diagonal.

    Args:
        a: Matrices, [4, 16, 16].
        PRECISION: That of the kernel.
    """
    i = tl.arange(0, _BLOCK)[None, :, None]
    j = tl.arange(0, _BLOCK)[None, None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -a, 0.0))
    for level in tl.static_range(1, 4):
        # From blocks of 2**level on the diagonal to those of twice the size.
        siblings = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        x -= _sandwich(x, tl.where(siblings, a, 0.0), x, PRECISION)
    return x


@triton.jit
@typing.no_type_check
def _store_square(ptr, halves, below, count, STRIDE: tl.constexpr):
    """Stores a lower triangular matrix of 64 rows.

    Args:
        ptr: The chunk's first row.
        halves: Its blocks on the diagonal, [2, 32, 32].
        below: The block below them, [32, 32].
        count: Number of rows.
        STRIDE: Elements from a row to the next.
    """
    i = tl.arange(0, 32)
    side = 32 * tl.arange(0, 2)
    rows = side[:, None] + i[None, :]
    at = ptr + rows[:, :, None] * STRIDE + rows[:, None, :]
    dtype: tl.constexpr = ptr.dtype.element_ty
    tl.store(at, halves.to(dtype), mask=(rows < count)[:, :, None])
    at = ptr + i[:, None] * STRIDE + i[None, :]
    tl.store(at + 32, tl.zeros_like(below).to(dtype), mask=(i < count)[:, None])
    lower = (i + 32 < count)[:, None]
    tl.store(at + 32 * STRIDE, below.to(dtype), mask=lower)


@triton.jit
@typing.no_type_check
def delta_prepare(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    rows_ptr,
    sum_ptr,
    x_ptr,
    p_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the sums G, T H, and X and P, T H 64.

    Grid: key heads, stretches of 64 rows. A program does the chunks that begin there.
    """
    key_head = tl.program_id(0)
    begin = tl.program_id(1) * CHUNK
    limit = tl.minimum(begin + CHUNK, tl.load(rows_ptr))
    row = _first_chunk(begin, start_ptr, end_ptr)
    i = tl.arange(0, _BLOCK)
    all_rows = _BLOCK * tl.arange(0, 4)[:, None] + i[None, :]
    even_rows = 2 * _BLOCK * tl.arange(0, 2)[:, None] + i[None, :]
    odd_rows = even_rows + _BLOCK
    diagonal = i[None, :, None] >= i[None, None, :]
    below = i[None, :, None] > i[None, None, :]
    QK: tl.constexpr = HK * K
    W: tl.constexpr = KP if KP < 64 else 64
    while row < limit:
        is_padding = _is_padding(row, segment_ptr)
        size, live = _sizes(row, tl.load(end_ptr + row), is_padding)
        base = row.to(tl.int64)
        q, k = q_ptr + base * QK + key_head * K, k_ptr + base * QK + key_head * K
        kk = tl.zeros((4, _BLOCK, _BLOCK), tl.float32)
        qk = tl.zeros((4, _BLOCK, _BLOCK), tl.float32)
        kk_pair = tl.zeros((2, _BLOCK, _BLOCK), tl.float32)
        qk_pair = tl.zeros((2, _BLOCK, _BLOCK), tl.float32)
        kk_half = tl.zeros((2 * _BLOCK, 2 * _BLOCK), tl.float32)
        qk_half = tl.zeros((2 * _BLOCK, 2 * _BLOCK), tl.float32)
        for feature in range(0, KP, W):
            keys = _batch(k, all_rows, live, QK, W, feature, K)
            queries = _batch(q, all_rows, live, QK, W, feature, K)
            even_keys = _batch(k, even_rows, live, QK, W, feature, K)
            odd_keys = _batch(k, odd_rows, live, QK, W, feature, K)
            odd_queries = _batch(q, odd_rows, live, QK, W, feature, K)
            first_keys = tl.trans(_half(k, 0, live, QK, W, feature, K))
            second_keys = _half(k, 2 * _BLOCK, live, QK, W, feature, K)
            second_queries = _half(q, 2 * _BLOCK, live, QK, W, feature, K)
            kk = _products(keys, keys, kk, PRECISION)
            qk = _products(queries, keys, qk, PRECISION)
            kk_pair = _products(odd_keys, even_keys, kk_pair, PRECISION)
            qk_pair = _products(odd_queries, even_keys, qk_pair, PRECISION)
            kk_half = tl.dot(
                second_keys, first_keys, kk_half, input_precision=PRECISION
            )
            qk_half = tl.dot(
                second_queries, first_keys, qk_half, input_precision=PRECISION
            )
        # Addresses hoisted out of the loop would take the products' registers.
        for member in tl.range(0, H // HK, disable_licm=True):
            at = base * H + key_head * (H // HK) + member
            beta = _load_betas(beta_ptr + at, live, H)
            total = tl.cumsum(_load_gates(g_ptr + at, live, H), 0)
            rows = tl.arange(0, CHUNK)
            tl.store(sum_ptr + at + rows * H, total, mask=rows < size)
            each = tl.reshape(total, (4, _BLOCK))
            decay = _decays(each, each)
            even, odd = _pairs(total)
            decay_pair = _decays(odd, even)
            first, second = _halves(total)
            decay_half = tl.exp(tl.minimum(second[:, None] - first[None, :], 0.0))

            p = tl.where(diagonal, qk * decay * SCALE, 0.0)
            p_even, p_odd = _split_pairs(p)
            p = _joined(p_even, qk_pair * decay_pair * SCALE, p_odd)
            p_below = qk_half * decay_half * SCALE
            _store_square(p_ptr + at * CHUNK, p, p_below, size, H * CHUNK)

            each = tl.reshape(beta, (4, _BLOCK))
            a = tl.where(below, kk * decay * each[:, :, None], 0.0)
            x = _inverses(a, PRECISION)
            x_even, x_odd = _split_pairs(x)
            _, odd = _pairs(beta)
            a = kk_pair * decay_pair * odd[:, :, None]
            x = _joined(x_even, -_sandwich(x_odd, a, x_even, PRECISION), x_odd)
            x_first, x_second = _two(x)
            _, second = _halves(beta)
            a = kk_half * decay_half * second[:, None]
            x_below = -_sandwich(x_second, a, x_first, PRECISION)
            _store_square(x_ptr + at * CHUNK, x, x_below, size, H * CHUNK)
        row += size


# ---- scans ---------------------------------------------------------------------------


@triton.jit
@typing.no_type_check
def _first_sample(order_ptr, start_ptr, end_ptr, num_rows):
    """Returns the first row of a program's samples, and the row where they end."""
    begin = tl.load(order_ptr + tl.program_id(2)) * SPAN
    is_start = tl.load(start_ptr + begin) == begin
    start = tl.where(is_start, begin, tl.load(end_ptr + begin))
    return start, tl.minimum(begin + SPAN, num_rows)


@triton.jit
@typing.no_type_check
def _load_features(ptr, count, STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Loads a chunk's rows in two parts of 64 features; up to 64 have but one part."""
    if KP > 64:
        first = _load(ptr, count, STRIDE, KP // 2, 0, K)
        second = _load(ptr, count, STRIDE, KP // 2, KP // 2, K)
    else:
        first = _load(ptr, count, STRIDE, KP, 0, K)
        second = first
    return first, second


@triton.jit
@typing.no_type_check
def _read_state(s, s_2, rows, rows_2, KP: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the products of a state with the rows of a chunk."""
    out = tl.dot(s, tl.trans(rows), input_precision=PRECISION)
    if KP > 64:
        out = tl.dot(s_2, tl.trans(rows_2), out, input_precision=PRECISION)
    return out


@triton.jit
@typing.no_type_check
def _add_to_state(
    state, state_2, left, rows, rows_2, KP: tl.constexpr, PRECISION: tl.constexpr
):
    """Adds the products of columns of values with the rows of a chunk to a state."""
    state = tl.dot(left, rows, state, input_precision=PRECISION)
    if KP > 64:
        state_2 = tl.dot(left, rows_2, state_2, input_precision=PRECISION)
    return state, state_2


@triton.jit
@typing.no_type_check
def _store_state(ptr, s, s_2, KP: tl.constexpr):
    """Stores a part of the value columns of a state, [columns, KP]."""
    W: tl.constexpr = s.shape[1]
    at = ptr + tl.arange(0, s.shape[0])[:, None] * KP + tl.arange(0, W)[None, :]
    tl.store(at, s)
    if KP > 64:
        tl.store(at + W, s_2)


@triton.jit
@typing.no_type_check
def delta_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    sum_ptr,
    x_ptr,
    p_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    rows_ptr,
    order_ptr,
    out_ptr,
    new_ptr,
    state_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    KEPT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes o and n, T H E, and the states that enter chunks, [slots, H, E, KP].

    KEPT says whether n and the states are stored. The state is in two parts of at most
    64 keys: an operand of 128 keys would take half the registers.

    Grid: parts of the value columns, heads, stretches of `SPAN` rows. A program does
    the samples that begin in a stretch. `order_ptr` has the stretches, the longest
    first.
    """
    part, head = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(rows_ptr)
    start, limit = _first_sample(order_ptr, start_ptr, end_ptr, num_rows)
    W: tl.constexpr = KP // 2 if KP > 64 else KP
    QK: tl.constexpr = HK * K
    EXTENT: tl.constexpr = H * E * KP
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    key_at = head // (H // HK) * K
    value_at = head * E + part * COLUMNS
    state_ptr += value_at * KP
    while start < limit:
        end = tl.load(end_ptr + start)
        # A load in the loop would be waited for before the loads that it masks.
        is_padding = _is_padding(start, segment_ptr)
        state = tl.zeros((COLUMNS, W), tl.float32)
        state_2 = tl.zeros((COLUMNS, W), tl.float32)
        for step in range(0, tl.cdiv(end - start, CHUNK)):
            row = start + step * CHUNK
            size, live = _sizes(row, end, is_padding)
            base = row.to(tl.int64)
            gates = base * H + head
            s, s_2 = state.to(dtype), state_2.to(dtype)
            if KEPT:
                slot = tl.where(step == 0, tl.cdiv(num_rows, CHUNK), row // CHUNK)
                _store_state(state_ptr + slot.to(tl.int64) * EXTENT, s, s_2, KP)
            k, k_2 = _load_features(k_ptr + base * QK + key_at, live, QK, K, KP)
            r = _read_state(s, s_2, k, k_2, KP, PRECISION)
            total = _load_gates(sum_ptr + gates, live, H)
            beta = _load_betas(beta_ptr + gates, live, H)
            last = tl.load(sum_ptr + gates + (size - 1) * H)
            fade = tl.exp(total)
            at = base * (H * E) + value_at
            v = _load_transposed(v_ptr + at, live, H * E, COLUMNS)
            r = (v - r * fade[None, :]) * beta[None, :]
            x = _load(x_ptr + gates * CHUNK, live, H * CHUNK, CHUNK, 0, CHUNK)
            new = tl.dot(r.to(dtype), tl.trans(x), input_precision=PRECISION)
            q, q_2 = _load_features(q_ptr + base * QK + key_at, live, QK, K, KP)
            out = _read_state(s, s_2, q, q_2, KP, PRECISION) * (fade * SCALE)[None, :]
            p = _load(p_ptr + gates * CHUNK, live, H * CHUNK, CHUNK, 0, CHUNK)
            rounded = new.to(dtype)
            out = tl.dot(rounded, tl.trans(p), out, input_precision=PRECISION)
            _store_transposed(out_ptr + at, out, size, H * E, COLUMNS)
            if KEPT:
                _store_transposed(new_ptr + at, rounded, size, H * E, COLUMNS)
            through = tl.exp(last)
            left = (new * tl.exp(last - total)[None, :]).to(dtype)
            state, state_2 = _add_to_state(
                state * through, state_2 * through, left, k, k_2, KP, PRECISION
            )
        start = end


@triton.jit
@typing.no_type_check
def delta_backward(
    q_ptr,
    k_ptr,
    dout_ptr,
    beta_ptr,
    sum_ptr,
    x_ptr,
    p_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    rows_ptr,
    order_ptr,
    dv_ptr,
    dstate_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes dv, T H E, and the gradients of the states, [slots, H, E, KP].

    Grid: as that of `delta_forward`.
    """
    part, head = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(rows_ptr)
    start, limit = _first_sample(order_ptr, start_ptr, end_ptr, num_rows)
    W: tl.constexpr = KP // 2 if KP > 64 else KP
    QK: tl.constexpr = HK * K
    EXTENT: tl.constexpr = H * E * KP
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    key_at = head // (H // HK) * K
    value_at = head * E + part * COLUMNS
    dstate_ptr += value_at * KP
    while start < limit:
        end = tl.load(end_ptr + start)
        # A load in the loop would be waited for before the loads that it masks.
        is_padding = _is_padding(start, segment_ptr)
        state = tl.zeros((COLUMNS, W), tl.float32)
        state_2 = tl.zeros((COLUMNS, W), tl.float32)
        num_chunks = tl.cdiv(end - start, CHUNK)
        for step in range(0, num_chunks):
            row = start + (num_chunks - 1 - step) * CHUNK
            size, live = _sizes(row, end, is_padding)
            base = row.to(tl.int64)
            gates = base * H + head
            s, s_2 = state.to(dtype), state_2.to(dtype)
            # The state that leaves this chunk enters the following one.
            slot = tl.where(step == 0, tl.cdiv(num_rows, CHUNK), row // CHUNK + 1)
            _store_state(dstate_ptr + slot.to(tl.int64) * EXTENT, s, s_2, KP)
            k, k_2 = _load_features(k_ptr + base * QK + key_at, live, QK, K, KP)
            dnew = _read_state(s, s_2, k, k_2, KP, PRECISION)
            total = _load_gates(sum_ptr + gates, live, H)
            beta = _load_betas(beta_ptr + gates, live, H)
            last = tl.load(sum_ptr + gates + (size - 1) * H)
            dnew *= tl.exp(last - total)[None, :]
            at = base * (H * E) + value_at
            dout = _load_transposed(dout_ptr + at, live, H * E, COLUMNS)
            p = _load(p_ptr + gates * CHUNK, live, H * CHUNK, CHUNK, 0, CHUNK)
            dnew = tl.dot(dout, p, dnew, input_precision=PRECISION)
            x = _load(x_ptr + gates * CHUNK, live, H * CHUNK, CHUNK, 0, CHUNK)
            dv = tl.dot(dnew.to(dtype), x, input_precision=PRECISION)
            dv *= beta[None, :]
            _store_transposed(dv_ptr + at, dv, size, H * E, COLUMNS)
            fade = tl.exp(total)
            through = tl.exp(last)
            up = (dout * (fade * SCALE)[None, :]).to(dtype)
            down = (dv * -fade[None, :]).to(dtype)
            q, q_2 = _load_features(q_ptr + base * QK + key_at, live, QK, K, KP)
            state, state_2 = _add_to_state(
                state * through, state_2 * through, up, q, q_2, KP, PRECISION
            )
            state, state_2 = _add_to_state(state, state_2, down, k, k_2, KP, PRECISION)
        start = end


# ---- gradients -----------------------------------------------------------------------


@triton.jit
@typing.no_type_check
def _store_rows(
    ptr, x, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, first, LAST: tl.constexpr
):
    """Stores columns of a chunk's rows, from `first` on; not those from LAST on."""
    rows = tl.arange(0, CHUNK)
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < count)[:, None]
    if LAST % WIDTH != 0:
        inside = inside & (columns < LAST)[None, :]
    at = ptr + rows[:, None] * STRIDE + columns[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
@typing.no_type_check
def _load_part(
    ptr, count, STRIDE: tl.constexpr, WIDTH: tl.constexpr, first, LAST: tl.constexpr
):
    """Loads columns of a chunk's rows, from `first` on, [64, WIDTH]."""
    rows = tl.arange(0, CHUNK)
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < count)[:, None]
    if LAST % WIDTH != 0:
        inside = inside & (columns < LAST)[None, :]
    at = ptr + rows[:, None] * STRIDE + columns[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@typing.no_type_check
def delta_products(
    q_ptr,
    k_ptr,
    dout_ptr,
    new_ptr,
    dv_ptr,
    beta_ptr,
    sum_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    rows_ptr,
    dp_ptr,
    da_ptr,
    dg_ptr,
    dbeta_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes dp and da, T HK 64, dbeta, T H, and their part of dg, T H.

    dp and da are the gradients of q k^T and of k k^T, of all value heads of a key head.

    Grid: key heads, stretches of 64 rows. A program does the chunks that begin there.
    """
    key_head = tl.program_id(0)
    begin = tl.program_id(1) * CHUNK
    limit = tl.minimum(begin + CHUNK, tl.load(rows_ptr))
    row = _first_chunk(begin, start_ptr, end_ptr)
    VALUES: tl.constexpr = H * E
    QK: tl.constexpr = HK * K
    W: tl.constexpr = KP if KP < 64 else 64
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    i = tl.arange(0, CHUNK)
    below = i[:, None] > i[None, :]
    while row < limit:
        is_padding = _is_padding(row, segment_ptr)
        size, live = _sizes(row, tl.load(end_ptr + row), is_padding)
        base = row.to(tl.int64)
        keys = base * QK + key_head * K
        qk = tl.zeros((CHUNK, CHUNK), tl.float32)
        kk = tl.zeros((CHUNK, CHUNK), tl.float32)
        for feature in range(0, KP, W):
            q = _load_part(q_ptr + keys, live, QK, W, feature, K)
            k = _load_part(k_ptr + keys, live, QK, W, feature, K)
            qk = tl.dot(q, tl.trans(k), qk, input_precision=PRECISION)
            kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        qk, kk = qk.to(dtype), kk.to(dtype)  # half the registers, in the loop
        all_dp = tl.zeros((CHUNK, CHUNK), tl.float32)
        all_da = tl.zeros((CHUNK, CHUNK), tl.float32)
        for member in tl.range(0, H // HK, num_stages=1, disable_licm=True):
            head = key_head * (H // HK) + member
            gates = base * H + head
            values = base * VALUES + head * E
            total = _load_gates(sum_ptr + gates, live, H)
            beta = _load_betas(beta_ptr + gates, live, H)
            dp = tl.zeros((CHUNK, CHUNK), tl.float32)
            da = tl.zeros((CHUNK, CHUNK), tl.float32)
            dbeta = tl.zeros((CHUNK,), tl.float32)
            for column in range(0, E, COLUMNS):
                dout = _load_part(dout_ptr + values, live, VALUES, COLUMNS, column, E)
                dv = _load_part(dv_ptr + values, live, VALUES, COLUMNS, column, E)
                new = _load_part(new_ptr + values, live, VALUES, COLUMNS, column, E)
                dp = tl.dot(dout, tl.trans(new), dp, input_precision=PRECISION)
                da = tl.dot(dv, tl.trans(new), da, input_precision=PRECISION)
                dbeta += tl.sum(dv.to(tl.float32) * new.to(tl.float32), 1)
            tl.store(dbeta_ptr + gates + i * H, dbeta / (beta * beta), mask=i < size)
            decay = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            dp *= decay * SCALE
            da *= -decay
            all_dp += dp
            all_da += da
            # The gradients of the differences of sums of which `decay` is.
            both = tl.where(below, dp * qk + da * kk, 0.0)
            dsum = tl.sum(both, 1) - tl.sum(both, 0)
            dg = tl.cumsum(dsum, 0, reverse=True)
            tl.store(dg_ptr + gates + i * H, dg, mask=i < size)
        all_dp = tl.where(i[:, None] >= i[None, :], all_dp, 0.0)
        all_da = tl.where(below, all_da, 0.0)
        squares = (base * HK + key_head) * CHUNK
        _store_rows(dp_ptr + squares, all_dp, size, HK * CHUNK, CHUNK, 0, CHUNK)
        _store_rows(da_ptr + squares, all_da, size, HK * CHUNK, CHUNK, 0, CHUNK)
        row += size


@triton.jit
@typing.no_type_check
def delta_gradients(
    q_ptr,
    k_ptr,
    dout_ptr,
    new_ptr,
    dv_ptr,
    sum_ptr,
    state_ptr,
    dstate_ptr,
    dp_ptr,
    da_ptr,
    start_ptr,
    end_ptr,
    segment_ptr,
    rows_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    E: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes dq and dk, T HK K, and the states' part of dg, [parts, T, H].

    The parts are those of the features of keys; what they give adds up.

    Grid: parts, key heads, stretches of 64 rows. A program does the chunks that begin
    in a stretch, and adds up the value heads of a key head.
    """
    part, key_head = tl.program_id(0), tl.program_id(1)
    first = part * KEYS
    num_rows = tl.load(rows_ptr)
    begin = tl.program_id(2) * CHUNK
    limit = tl.minimum(begin + CHUNK, num_rows)
    row = _first_chunk(begin, start_ptr, end_ptr)
    dg_ptr += part.to(tl.int64) * num_rows * H
    QK: tl.constexpr = HK * K
    VALUES: tl.constexpr = H * E
    EXTENT: tl.constexpr = H * E * KP
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    i = tl.arange(0, CHUNK)
    state_at = tl.arange(0, COLUMNS)[:, None] * KP + tl.arange(0, KEYS)[None, :] + first
    while row < limit:
        end = tl.load(end_ptr + row)
        size, live = _sizes(row, end, _is_padding(row, segment_ptr))
        base = row.to(tl.int64)
        zeros = tl.cdiv(num_rows, CHUNK)
        is_first = row == tl.load(start_ptr + row)
        slot = tl.where(is_first, zeros, row // CHUNK).to(tl.int64) * EXTENT
        is_last = row + CHUNK >= end
        after = tl.where(is_last, zeros, row // CHUNK + 1).to(tl.int64) * EXTENT
        keys = base * QK + key_head * K
        dq = tl.zeros((CHUNK, KEYS), tl.float32)
        # The gradients of k, from what the state knows of it and what it writes.
        known = tl.zeros((CHUNK, KEYS), tl.float32)
        written = tl.zeros((CHUNK, KEYS), tl.float32)
        # Their products with q and k, before a head is added.
        before = tl.zeros((CHUNK,), tl.float32)
        written_before = 0.0
        for member in tl.range(0, H // HK, num_stages=1, disable_licm=True):
            head = key_head * (H // HK) + member
            gates = base * H + head
            values = base * VALUES + head * E
            at = head * (E * KP) + state_at
            total = _load_gates(sum_ptr + gates, live, H)
            last = tl.load(sum_ptr + gates + (size - 1) * H)
            fade = tl.exp(total)[:, None]
            to_read = fade * SCALE
            to_end = tl.exp(last - total)[:, None]
            both = tl.zeros((COLUMNS,), tl.float32)
            for column in range(0, E, COLUMNS):
                state = tl.load(state_ptr + slot + column * KP + at)
                dstate = tl.load(dstate_ptr + after + column * KP + at)
                dout = _load_part(dout_ptr + values, live, VALUES, COLUMNS, column, E)
                dv = _load_part(dv_ptr + values, live, VALUES, COLUMNS, column, E)
                new = _load_part(new_ptr + values, live, VALUES, COLUMNS, column, E)
                dout = (dout * to_read).to(dtype)
                dq = tl.dot(dout, state, dq, input_precision=PRECISION)
                dv = (dv * -fade).to(dtype)
                known = tl.dot(dv, state, known, input_precision=PRECISION)
                new = (new * to_end).to(dtype)
                written = tl.dot(new, dstate, written, input_precision=PRECISION)
                both += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
            k = _load_part(k_ptr + keys, live, QK, KEYS, first, K)
            q = _load_part(q_ptr + keys, live, QK, KEYS, first, K)
            k_written = tl.sum(k * written, 1)
            now = tl.sum(q * dq + k * known, 1) - k_written
            written_now = tl.sum(k_written, 0)
            # The product of S' and dS'.
            through = tl.sum(both, 0) * tl.exp(last) + (written_now - written_before)
            dg = tl.cumsum(now - before, 0, reverse=True) + through
            tl.store(dg_ptr + gates + i * H, dg, mask=i < size)
            before, written_before = now, written_now
        squares = (base * HK + key_head) * CHUNK
        k = _load_part(k_ptr + keys, live, QK, KEYS, first, K)
        q = _load_part(q_ptr + keys, live, QK, KEYS, first, K)
        dp = _load(dp_ptr + squares, live, HK * CHUNK, CHUNK, 0, CHUNK)
        da = _load(da_ptr + squares, live, HK * CHUNK, CHUNK, 0, CHUNK)
        dq = tl.dot(dp, k, dq, input_precision=PRECISION)
        dk = tl.dot(da, k, known + written, input_precision=PRECISION)
        dk = tl.dot(tl.trans(da), k, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dp), q, dk, input_precision=PRECISION)
        _store_rows(dq_ptr + keys, dq, size, QK, KEYS, first, K)
        _store_rows(dk_ptr + keys, dk, size, QK, KEYS, first, K)
        row += size
