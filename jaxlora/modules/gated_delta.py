"""The gated delta rule, and what surrounds it in a layer, over packed rows.

Each head has a matrix S that a row decays, corrects by its key and value, and reads
with its query:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S

S is zero before the first row of a sample. Rows run in chunks: with the decays inside a
chunk, the corrections of its rows are the solution of a triangular system, and only S
is passed from chunk to chunk.

References:
    Gated Delta Networks, arXiv 2412.06464.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxlora.models.config import DeltaShape
from jaxlora.modules.rowwise import inverse_rms, sum_of_squares
from jaxlora.modules.scoring import ATTENTION_RESULTS
from jaxlora.modules.triton_gated_delta import (
    DeltaImplementation,
    triton_gated_delta_rule,
)
from jaxlora.pallas_kernels.varying import vary, varying_axes

CHUNK_TOKENS = 64  # at most
_L2_EPS = 1e-6
_NO_SEGMENT = -2  # differs from all samples, and from padding

# Rounding to tf32 would be magnified by the inverse.
_product = functools.partial(
    jnp.einsum, precision="highest", preferred_element_type=jnp.float32
)


class DeltaWeights(NamedTuple):
    """Frozen weights of a layer beside its linears.

    Attributes:
        conv: Taps of the convolution for each feature, the own row's last.
        a_log: Logarithm of each head's decay at a gate of 1.
        dt_bias: Bias of each head's gate.
    """

    conv: Float[Array, "C W"]
    a_log: Float[Array, " H"]
    dt_bias: Float[Array, " H"]


class DeltaInputs(NamedTuple):
    """The outputs of a layer's linears, from which the rule computes.

    Attributes:
        mixed: Queries, keys and values before the convolution, in this order.
        a: Gates of the decays, before their bias.
        b: Gates of the corrections, before the sigmoid.
    """

    mixed: Float[Array, "T C"]
    a: Float[Array, "T H"]
    b: Float[Array, "T H"]


class DeltaCache(NamedTuple):
    """The state of B sequences in a layer with the gated delta rule, in generation.

    Attributes:
        mixed: The last P = W - 1 rows before the convolution.
        state: S of each head, after the last row.
    """

    mixed: Float[Array, "B P C"]
    state: Float[Array, "B HK R K E"]


def empty_delta_cache(
    shape: DeltaShape, num_sequences: int, dtype: jnp.dtype
) -> DeltaCache:
    """Returns the cache of sequences before their first rows."""
    rows = num_sequences, shape.conv_width - 1, shape.mixed_features
    grouped = shape.num_key_heads, shape.num_value_heads // shape.num_key_heads
    state = num_sequences, *grouped, shape.key_dim, shape.value_dim
    return DeltaCache(jnp.zeros(rows, dtype), jnp.zeros(state, jnp.float32))


def packed_gated_delta(
    given: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    segment_ids: Int[Array, " T"],
    *,
    block_tokens: int,
    implementation: DeltaImplementation = "xla",
) -> Float[Array, "T H E"]:
    """Convolves rows, and runs the gated delta rule on them; for training.

    The backward pass keeps the inputs and no more.

    Args:
        given: The rows.
        weights: Frozen weights.
        shape: Sizes.
        segment_ids: Segment of each row; negative for padding.
        block_tokens: Rows of a token block, in which all rows are of one job. A chunk
            lies in one block, so that nothing of a job reaches the rows of another.
        implementation: What runs the rule; `triton` runs where
            `triton_delta_unsupported` names no reason.
    """

    @jax.checkpoint
    def run(given: DeltaInputs, weights: DeltaWeights) -> Float[Array, "T H E"]:
        mixed = short_convolution(given.mixed, weights.conv, segment_ids)
        rule = _rule_inputs(mixed, given, weights, shape)
        if implementation == "triton":
            return triton_gated_delta_rule(*rule, segment_ids)
        return gated_delta_rule(
            *rule, segment_ids, chunk_tokens=math.gcd(CHUNK_TOKENS, block_tokens)
        )

    return checkpoint_name(run(given, weights), ATTENTION_RESULTS)


def cached_gated_delta(
    given: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: DeltaCache,
    num_new: Int[Array, " B"],
) -> tuple[Float[Array, "T H E"], DeltaCache]:
    """Runs S further rows of each sequence; for generation.

    Args:
        given: The rows, one sequence after the other.
        weights: Frozen weights.
        shape: Sizes.
        cache: What was kept of the rows before.
        num_new: Number of rows of each sequence, after which padding comes.

    Returns:
        The output of each row, and the cache with the new rows.
    """
    num_sequences = len(num_new)
    num_rows = len(given.mixed) // num_sequences

    def run(given, cache, num_new):
        rows = jnp.concatenate([cache.mixed, given.mixed])
        kept = len(cache.mixed)
        segment_ids = jnp.zeros(len(rows), jnp.int32)
        mixed = short_convolution(rows, weights.conv, segment_ids)
        rule = _rule_inputs(mixed[kept:], given, weights, shape)
        # Padding is of the same segment, as S must pass through it.
        is_padding = jnp.arange(num_rows) >= num_new
        rule = _without_padding(rule, jnp.where(is_padding, -1, 0))
        size = min(CHUNK_TOKENS, num_rows)
        out, state = _run_chunks(rule, segment_ids[kept:], cache.state, size, before=0)
        last = jax.lax.dynamic_slice_in_dim(rows, num_new, kept)
        return out, DeltaCache(last, state)

    by_sequence = jax.tree.map(
        lambda x: x.reshape(num_sequences, num_rows, *x.shape[1:]), given
    )
    out, cache = jax.vmap(run)(by_sequence, cache, num_new)
    return out.reshape(-1, *out.shape[2:]), cache


def short_convolution(
    x: Float[Array, "T C"], taps: Float[Array, "C W"], segment_ids: Int[Array, " T"]
) -> Float[Array, "T C"]:
    """`silu` of a causal convolution of each feature, in float32, rounded once.

    A row sees the rows before it in its own segment.

    Args:
        x: Rows.
        taps: Factors of the rows, the own one's last.
        segment_ids: Segment of each row.
    """
    wide, width = x.astype(jnp.float32), taps.shape[1]
    taps = taps.astype(jnp.float32)
    total = wide * taps[:, -1]
    for back in range(1, min(width, len(x))):
        shifted = jnp.pad(wide[:-back], ((back, 0), (0, 0)))
        other = jnp.pad(segment_ids[:-back], (back, 0), constant_values=_NO_SEGMENT)
        own = (other == segment_ids)[:, None]
        total += jnp.where(own, shifted, 0) * taps[:, width - 1 - back]
    return jax.nn.silu(total).astype(x.dtype)


class RuleInputs(NamedTuple):
    """Inputs of the gated delta rule.

    Attributes:
        q: Queries.
        k: Keys. Key head j serves the value heads from j R on, R = H / HK.
        v: Values.
        g: Logarithm of the decay before each row, in float32; not above 0.
        beta: Share of the error that a row corrects, in float32.
    """

    q: Float[Array, "T HK K"]
    k: Float[Array, "T HK K"]
    v: Float[Array, "T H E"]
    g: Float[Array, "T H"]
    beta: Float[Array, "T H"]


def _rule_inputs(
    mixed: Float[Array, "T C"],
    given: DeltaInputs,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> RuleInputs:
    """Returns the inputs of the rule from the convolved rows."""
    ends = shape.key_features, 2 * shape.key_features
    q, k, v = jnp.split(mixed, ends, axis=-1)
    q, k = (x.reshape(len(x), -1, shape.key_dim) for x in (q, k))
    gate = given.a.astype(jnp.float32) + weights.dt_bias.astype(jnp.float32)
    return RuleInputs(
        q=_unit(q),
        k=_unit(k),
        v=v.reshape(len(v), -1, shape.value_dim),
        g=-jnp.exp(weights.a_log.astype(jnp.float32)) * jax.nn.softplus(gate),
        beta=jax.nn.sigmoid(given.b.astype(jnp.float32)),
    )


def _unit(x: Float[Array, "T HK K"]) -> Float[Array, "T HK K"]:
    """Divides each head by its length."""
    inverse = jax.lax.rsqrt(sum_of_squares(x) + _L2_EPS)
    return (x.astype(jnp.float32) * inverse).astype(x.dtype)


def gated_delta_rule(
    q: Float[Array, "T HK K"],
    k: Float[Array, "T HK K"],
    v: Float[Array, "T H E"],
    g: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    segment_ids: Int[Array, " T"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Float[Array, "T H E"]:
    """Runs the gated delta rule over packed samples, in float32.

    Args:
        q, k, v, g, beta: See `RuleInputs`. Queries are divided by the root of K here.
        segment_ids: Segment of each row; negative for padding, whose output is zero.
        chunk_tokens: Rows of a chunk.
    """
    given = _without_padding(RuleInputs(q, k, v, g, beta), segment_ids)
    (_, heads, size), (_, values, width) = q.shape, v.shape
    state = jnp.zeros((heads, values // heads, size, width), jnp.float32)
    state = vary(state, varying_axes((given, segment_ids)))
    out, _ = _run_chunks(given, segment_ids, state, chunk_tokens, before=_NO_SEGMENT)
    return out


def _without_padding(given: RuleInputs, segment_ids: Int[Array, " T"]) -> RuleInputs:
    """Returns the inputs in float32, with zeros for rows of padding.

    With these a row leaves S as it is.
    """

    def clean(x: Array) -> Array:
        is_row = (segment_ids >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(is_row, x, 0)

    return RuleInputs(*map(clean, given))


def _run_chunks(
    given: RuleInputs,
    segment_ids: Int[Array, " T"],
    state: Float[Array, "HK R K E"],
    size: int,
    *,
    before: int,
) -> tuple[Float[Array, "T H E"], Float[Array, "HK R K E"]]:
    """Runs the rule in chunks.

    Args:
        given: The rows; zeros in padding.
        segment_ids: Segment of each row; negative for padding.
        state: S before the first row.
        size: Rows of a chunk.
        before: Segment of the row before the first one, whose S `state` is.

    Returns:
        The output, and S after the last row.
    """
    num_rows, dtype = len(segment_ids), given.v.dtype
    heads, ratio = state.shape[:2]
    missing = -num_rows % size
    segments = jnp.pad(segment_ids, (0, missing), mode="edge").reshape(-1, size)

    def chunks(x: Float[Array, "T ..."], *heads: int) -> Float[Array, "N C ..."]:
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, size, *heads, *x.shape[2:]).astype(jnp.float32)

    q, k = (chunks(x, heads) for x in (given.q, given.k))
    v, g, beta = (chunks(x, heads, ratio) for x in (given.v, given.g, given.beta))
    q *= given.q.shape[-1] ** -0.5

    last = segments[:, -1]
    entered = jnp.concatenate([jnp.full_like(last[:1], before), last[:-1]])
    order = jnp.arange(size)
    sees = (segments[:, :, None] == segments[:, None]) & (order[:, None] >= order)
    # Decays from the start of the chunk, or of the sample, to each row.
    total = _product("ncd,ndhr->nchr", sees.astype(jnp.float32), g)
    end = total[:, -1]

    def decay(mask: Bool[Array, "N ..."], exponent: Float[Array, "N ..."]) -> Array:
        # Where the mask is false, the exponential could be infinite.
        mask = mask.reshape(*mask.shape, *[1] * (exponent.ndim - mask.ndim))
        return jnp.exp(jnp.where(mask, exponent, -jnp.inf))

    between = decay(sees, total[:, :, None] - total[:, None])
    products = _product("nchk,ndhk->ncdh", k, k)[..., None] * between
    below = (order[:, None] > order)[:, :, None, None]
    system = jnp.where(below, products * beta[:, :, None], 0)
    chunked = _Chunk(
        q=q,
        k=k,
        v=v,
        beta=beta,
        inverse=_inverse(system),
        scores=_product("nchk,ndhk->ncdh", q, k)[..., None] * between,
        from_start=decay(segments == entered[:, None], total),
        to_end=decay(segments == last[:, None], end[:, None] - total),
        through=decay(last == entered, end),
    )
    out, state = _pass_on(state, chunked, segments[:, 0] == entered)
    out = out.reshape(-1, *given.v.shape[1:])[:num_rows]
    return out.astype(dtype), state


class _Chunk(NamedTuple):
    """The values of a chunk, or of a stack of N, that do not depend on S.

    Attributes:
        q, k, v, beta: Rows.
        inverse: Makes corrections of what they would be without each other.
        scores: Products of queries and keys, with the decays between the rows.
        from_start: Decay from S before the chunk to a row; 0 in later samples.
        to_end: Decay from a row to S after the chunk; 0 in earlier samples.
        through: Decay of S from the start to the end; 0 if a sample begins between.
    """

    q: Float[Array, "*N C HK K"]
    k: Float[Array, "*N C HK K"]
    v: Float[Array, "*N C HK R E"]
    beta: Float[Array, "*N C HK R"]
    inverse: Float[Array, "*N HK R C C"]
    scores: Float[Array, "*N C C HK R"]
    from_start: Float[Array, "*N C HK R"]
    to_end: Float[Array, "*N C HK R"]
    through: Float[Array, "*N HK R"]

    def chunk(self, number: Int[Array, ""]) -> "_Chunk":
        """Returns one of a stack of chunks."""
        return jax.tree.map(lambda x: x[number], self)


@jax.custom_vjp
def _pass_on(
    state: Float[Array, "HK R K E"], chunks: _Chunk, continues: Bool[Array, " N"]
) -> tuple[Float[Array, "N C HK R E"], Float[Array, "HK R K E"]]:
    """Runs the chunks one after the other; returns their output, and S after them.

    Its backward pass computes S before each chunk again. It is no `jax.lax.scan`,
    because that begins with zeros for its results: XLA makes those of all layers at
    the start of a program, where they take as much memory as what layers keep. Here
    loops begin with data that they overwrite.

    Args:
        state: S before the first chunk.
        chunks: The chunks.
        continues: Whether the first row of each is of the sample of the row before.
    """

    def run(number, carry):
        out, state = carry
        new, state = _run_chunk(state, chunks.chunk(number), continues[number])
        return out.at[number].set(new), state

    return jax.lax.fori_loop(0, len(continues), run, (chunks.v, state))


def _pass_on_forward(state, chunks, continues):
    return _pass_on(state, chunks, continues), (state, chunks, continues)


def _pass_on_backward(residuals, gradients):
    state, chunks, continues = residuals
    dout, dstate = gradients
    num = len(continues)

    def run(number, carry):
        before, state = carry
        _, state = _run_chunk(state, chunks.chunk(number), continues[number])
        return before.at[number + 1].set(state, mode="drop"), state

    room = chunks.through[..., None, None]
    before = jnp.broadcast_to(room, (num, *state.shape)).at[0].set(state)
    before, _ = jax.lax.fori_loop(0, num, run, (before, state))

    def run_back(count, carry):
        dchunks, dstate = carry
        number = num - 1 - count

        def chunk(state, chunk):
            return _run_chunk(state, chunk, continues[number])

        _, pull = jax.vjp(chunk, before[number], chunks.chunk(number))
        dstate, dchunk = pull((dout[number], dstate))
        dchunks = jax.tree.map(lambda x, y: x.at[number].set(y), dchunks, dchunk)
        return dchunks, dstate

    dchunks, dstate = jax.lax.fori_loop(0, num, run_back, (chunks, dstate))
    return dstate, dchunks, None


_pass_on.defvjp(_pass_on_forward, _pass_on_backward)


def _run_chunk(
    state: Float[Array, "HK R K E"], chunk: _Chunk, continues: Bool[Array, ""]
) -> tuple[Float[Array, "C HK R E"], Float[Array, "HK R K E"]]:
    """Returns the output of a chunk, and S after it."""
    # No product with zero: S of another job may be NaN.
    state = jnp.where(continues, state, 0)
    start = chunk.from_start[..., None]
    known = start * _product("chk,hrke->chre", chunk.k, state)
    error = chunk.beta[..., None] * (chunk.v - known)
    new = _product("hrcd,dhre->chre", chunk.inverse, error)
    out = start * _product("chk,hrke->chre", chunk.q, state)
    out += _product("cdhr,dhre->chre", chunk.scores, new)
    state = chunk.through[..., None, None] * state
    state += _product("chk,chre->hrke", chunk.k, chunk.to_end[..., None] * new)
    return out, state


def _inverse(below: Float[Array, "N C C HK R"]) -> Float[Array, "N HK R C C"]:
    """Returns the inverse of 1 + `below`, whose entries lie below the diagonal.

    It is substituted row by row. Powers of the matrix, which would be faster, grow
    without bounds where keys are alike.
    """
    matrix = below.transpose(0, 3, 4, 1, 2)
    one = jnp.broadcast_to(jnp.eye(matrix.shape[-1]), matrix.shape)
    if matrix.shape[-1] == 1:
        return one
    one = vary(one, varying_axes(matrix))
    return jax.lax.linalg.triangular_solve(
        matrix + one, one, left_side=True, lower=True, unit_diagonal=True
    )


def gated_norm(
    x: Float[Array, "T H E"],
    gate: Float[Array, "T H E"],
    scale: Float[Array, " E"],
    eps: float,
) -> Float[Array, "T H E"]:
    """RMS norm of each head, times `silu(gate)`; the backward pass keeps the inputs.

    Args:
        x: Heads.
        gate: Gates.
        scale: Factor of each feature.
        eps: Added to the mean square.
    """

    @jax.checkpoint
    def run(x, gate, scale):
        inverse = inverse_rms(sum_of_squares(x), x.shape[-1], eps)
        # It is rounded where transformers rounds it.
        normed = scale * (x.astype(jnp.float32) * inverse).astype(x.dtype)
        gate = jax.nn.silu(gate.astype(jnp.float32))
        return (normed.astype(jnp.float32) * gate).astype(x.dtype)

    return run(x, gate, scale)
