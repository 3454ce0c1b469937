"""Linears of a mixture of experts, with a LoRA for each expert and adapter.

A slot is an expert with an adapter. Rows come in blocks that have one slot, so back
ends compute these linears as others, but that the weight of a row is that of its
expert. The rows are made by `route_rows` and `gather_rows`; see expert_rows.py.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlora.pallas_kernels.backends import Backend, get_backend
from jaxlora.pallas_kernels.checks import check_experts, unshared
from jaxlora.pallas_kernels.dropout import TILE_TOKENS, Dropout, expert_mask_words
from jaxlora.pallas_kernels.expert_rows import (
    SMALL_BLOCK,
    RowPlan,
    combine_rows,
    gather_rows,
    rows_at,
    sum_of_copies,
)
from jaxlora.pallas_kernels.given_mask import GivenMask
from jaxlora.pallas_kernels.op import (
    Passes,
    own_settings,
    passes_of,
    with_gradient,
)
from jaxlora.pallas_kernels.projection import ROWS, KernelSettings, Projection
from jaxlora.pallas_kernels.varying import vary, varying_axes

_SHARED_SLOT_ROWS = 256  # rows of a slot up to which shared blocks are faster


def block_rows_for(
    implementation: str,
    projections: Sequence[Projection],
    num_adapters: int,
    slot_rows: float,
) -> int:
    """Returns `block_rows` for `route_rows`, with which linears of experts are fastest.

    Args:
        implementation: Name of the kernel back end in `BACKENDS`.
        projections: The linears of the experts, as `expert_linears` takes them.
        num_adapters: G.
        slot_rows: Mean number of copies of tokens in a slot that has any. With many of
            them, there is little padding to save.
    """
    backend, gains = get_backend(implementation), slot_rows <= _SHARED_SLOT_ROWS
    gains = gains and num_adapters > 1 and not backend.is_plain
    if gains and unshared(backend, projections) is None:
        return SMALL_BLOCK
    return TILE_TOKENS


@typing.no_type_check  # `checks.py` has better messages
def expert_linears(
    x: Float[Array, "S K"],
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    w_transposed: bool = False,
    s: Sequence[Float[Array, "S _"]] | None = None,
    implementation: str = "xla",
) -> tuple[Float[Array, "S _"], ...]:
    """`y = x W[e] + bias[e] + scaling[g] * dropout(x) A[e, g] B[e, g]`, by row.

    The expert e and the adapter g of a row are those of its block. Several projections
    share x, as gate and up do. The gradients of y must be zero in rows of padding whose
    block also has others, and x must be finite there, unless a value of the block's own
    adapter is not. `gather_rows`, `combine_rows` and functions of each row see to both.
    Blocks of padding may hold anything, also in the results.

    Args:
        x: The rows of `gather_rows`, or what is computed of each.
        projections: The linears. The fields of a projection have these shapes here:
            w [X, K, N], in x's dtype, or a quantized weight whose arrays have a first
            axis of X; a [X G, K, R] and b [X G, R, N] by slot, `expert * G + adapter`;
            scaling, rank and settings by adapter; bias [X, N]. dropout is that of the
            tokens, with a key: by adapter and token, as in `multi_lora_linear`. Its
            mask also depends on the expert.
        plan: Where the rows are.
        w_transposed: Whether weights that are not quantized are stored [X, N, K].
        s: What `expert_input` computed beside x; None: it is computed here.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        y of each projection. A quantized stack is dequantized in x's dtype before each
        product, into memory that all its experts need at once.

    Raises:
        ValueError: The arguments do not match, or the implementation is unknown or
            cannot run such linears on this device.
    """
    backend = get_backend(implementation)
    check_experts(backend, x, projections, plan, w_transposed=w_transposed)
    made = tuple(_by_slot(p, plan, x.shape[1]) for p in projections)
    arrays = x, made, plan, s
    x, made, plan, s = vary(arrays, varying_axes(arrays))
    op = with_gradient(passes_of(backend, ()))
    return tuple(op(x, made, plan.expert, plan, s, w_transposed))


@typing.no_type_check  # `checks.py` has better messages
def expert_input(
    x: Float[Array, "T K"],
    projections: Sequence[Projection],
    plan: RowPlan,
    *,
    implementation: str = "xla",
) -> tuple[Float[Array, "S K"], list[Float[Array, "S _"]] | None]:
    """`gather_rows`, with s of the linears that take the rows where a kernel can.

    Args:
        x: Token rows.
        projections: The linears; see `expert_linears`. They get no gradient here.
        plan: Where the rows are.
        implementation: Name of the kernel back end in `BACKENDS`.

    Returns:
        The rows, and s for `expert_linears`, or None. With s, blocks of padding of the
        rows may hold anything.

    Raises:
        ValueError: As for `expert_linears`.
    """
    backend = get_backend(implementation)
    if _cannot_gather(backend, projections, is_gradient=False):
        return gather_rows(x, plan), None
    rows = jax.ShapeDtypeStruct((plan.num_rows, x.shape[1]), x.dtype)
    check_experts(backend, rows, projections, plan)
    made = tuple(_by_slot(p, plan, x.shape[1]) for p in projections)
    arrays = x, made, plan
    arrays = vary(arrays, varying_axes(arrays))
    return _input_with_gradient(passes_of(backend, ()))(*arrays)


def _cannot_gather(backend: Backend, projections, *, is_gradient: bool) -> bool:
    if backend.gather is None:
        return True
    reason = backend.unsupported_gather(projections, is_gradient=is_gradient)
    return reason is not None


@functools.cache
def _input_with_gradient(passes: Passes):
    """Makes the op that gathers rows with s of linears."""

    @jax.custom_vjp
    def op(x, projections, plan):
        return _gather(passes, x, projections, plan, is_gradient=False)

    def forward(x, projections, plan):
        return op(x, projections, plan), plan

    def backward(plan, gradients):
        dx, _ = gradients
        return sum_of_copies(dx, plan), None, None

    op.defvjp(forward, backward)
    return op


def _gather(passes: Passes, x, projections, plan: RowPlan, *, is_gradient: bool):
    """Gathers rows with s or ds of linears."""
    gather = passes.backend.gather
    assert gather is not None
    with own_settings(passes.precision):
        results = gather(x, projections, plan, is_gradient=is_gradient)
    return vary(results, varying_axes((x, plan)))


@typing.no_type_check  # `checks.py` has better messages
def expert_output(
    h: Float[Array, "S F"],
    projection: Projection,
    weights: Float[Array, "T k"],
    plan: RowPlan,
    *,
    w_transposed: bool = False,
    implementation: str = "xla",
) -> Float[Array, "T D"]:
    """Combines the rows of the last linear of experts: `sum_j weights[t, j] y[t, j]`.

    It is `combine_rows` of `expert_linears`. But the backward pass does not read y: the
    gradient of a weight is the product of h and its gradient before it is weighted. So
    a policy of `jax.checkpoint` that recomputes the layer need not compute y again.

    Args:
        h: The rows of experts.
        projection: The linear; see `expert_linears`.
        weights: Weight of each token's copy for its j-th expert.
        plan: Where the rows are.
        w_transposed: Whether a weight that is not quantized is stored [X, N, K].
        implementation: Name of the kernel back end in `BACKENDS`.

    Raises:
        ValueError: As for `expert_linears`.

    References:
        SonicMoE, arXiv 2512.14080 (the gradient of a weight).
    """
    backend = get_backend(implementation)
    check_experts(backend, h, [projection], plan, w_transposed=w_transposed)
    if weights.shape != plan.row.shape:
        raise ValueError(
            f"weights have shape {weights.shape}, wanted {plan.row.shape}: one for "
            "each of the plan's copies of tokens."
        )
    made = _by_slot(projection, plan, h.shape[1])
    arrays = h, made, weights, plan
    arrays = vary(arrays, varying_axes(arrays))
    return _output_with_gradient(passes_of(backend, ()))(*arrays, w_transposed)


@functools.cache
def _output_with_gradient(passes: Passes):
    """Makes the op of a linear of experts whose rows are combined."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def op(h, projection, weights, plan, w_transposed):
        return forward(h, projection, weights, plan, w_transposed)[0]

    def forward(h, projection, weights, plan, w_transposed):
        given = h, (projection,), plan.expert, plan, None, w_transposed
        (y,), kept = passes.forward(*given)
        return combine_rows(y, weights, plan), (kept, weights)

    def backward(w_transposed, residuals, dy):
        kept, weights = residuals
        h, (projection,), _, _, plan = kept
        of_row = rows_at(weights.reshape(-1), plan.copy).astype(jnp.float32)
        if _cannot_gather(passes.backend, [projection], is_gradient=True):
            rows, ds = gather_rows(dy, plan), None
        else:
            rows, ds = _gather(passes, dy, [projection], plan, is_gradient=True)
        dh, (gradients,) = passes.backward(
            w_transposed, kept, [rows], ds, row_weights=of_row
        )
        dh = dh.astype(jnp.float32)
        # Without the barrier, XLA keeps h from before it was rounded, in float32.
        wide = jax.lax.optimization_barrier(h).astype(jnp.float32)
        dweights = rows_at((wide * dh).sum(1), plan.row)
        if projection.bias is not None:
            dweights += _of_bias(dy, projection.bias, plan)
        dh = (dh * of_row[:, None]).astype(h.dtype)
        return dh, gradients, dweights.astype(weights.dtype), None

    op.defvjp(forward, backward)
    return op


def _of_bias(
    dy: Float[Array, "T D"], bias: Float[Array, "X D"], plan: RowPlan
) -> Float[Array, "T k"]:
    """Returns what the experts' biases add to the gradients of the weights."""
    of_expert = jnp.einsum("td,ed->te", dy, bias, preferred_element_type=jnp.float32)
    rows_of_tile = plan.num_rows // plan.expert.shape[0]
    is_copy = plan.row < plan.num_rows
    tile = jnp.where(is_copy, plan.row, 0) // rows_of_tile
    found = jnp.take_along_axis(of_expert, plan.expert[tile], axis=1)
    return jnp.where(is_copy, found, 0)


def _by_slot(projection: Projection, plan: RowPlan, num_features: int) -> Projection:
    """Returns the projection with its adapters' settings repeated for each expert."""
    p, num_experts = projection, plan.num_experts
    rank, dropout = p.rank, p.dropout
    assert not isinstance(dropout, GivenMask)
    if rank is None:
        rank = jnp.full(p.scaling.shape, p.a.shape[2], jnp.int32)
    return dataclasses.replace(
        p,
        scaling=jnp.tile(p.scaling, num_experts),
        rank=jnp.tile(rank, num_experts),
        settings=None if p.settings is None else _repeated(p.settings, num_experts),
        dropout=None if dropout is None else of_rows(dropout, plan, num_features),
    )


def _repeated(settings: KernelSettings, num_experts: int) -> KernelSettings:
    rows: Any = {name: getattr(settings, name) for name in ROWS}
    repeated = {name: jnp.tile(row, num_experts) for name, row in rows.items()}
    return dataclasses.replace(settings, **repeated)


def of_rows(dropout: Dropout, plan: RowPlan, num_features: int) -> Dropout:
    """Returns the dropout of rows and slots for one of tokens and adapters."""
    token_index = rows_at(dropout.token_index, plan.token)
    words = expert_mask_words(
        dropout.given_key(),
        plan.slot,
        token_index,
        plan.num_experts,
        num_features,
        plan.first_expert,
        0 if dropout.first_feature is None else dropout.first_feature,
    )
    rate = jnp.tile(dropout.rate, plan.num_experts)
    return Dropout(None, rate, token_index, words)
