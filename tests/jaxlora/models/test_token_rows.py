"""Trained rows of tokens in a microbatch of several slots, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora.models.token_rows import TokenRows
from jaxlora.modules.loss import target_nll
from tests.drawn import Draws, normal
from tests.oracle import relative_error

D, V, BLOCK = 16, 50, 8
BLOCKS = np.array([1, 0, -1, 1, 2])
IDS = np.array([[3, 7, -1], [7, 0, 49], [-1, -1, -1]], np.int32)
T = len(BLOCKS) * BLOCK


def gradients(f, argnums=0):
    """Compiles the gradients and the value of a function with a further result."""
    return jax.jit(jax.grad(f, argnums, has_aux=True))


def make() -> tuple[TokenRows, jax.Array, jax.Array]:
    """The rows of three slots, of which the last has none; embedding and tokens."""
    rng, draws = np.random.default_rng(0), Draws(0)
    rows = TokenRows(3, 3, D)
    rows.ids[...] = jnp.asarray(IDS)
    drawn = np.asarray(draws.normal(3, 3, D))
    rows.rows[...] = jnp.asarray(np.where(IDS[:, :, None] >= 0, drawn, 0))
    tokens = rng.integers(0, V, T).astype(np.int32)
    tokens[:BLOCK] = 7
    tokens[[9, 10, 35]] = 3, 49, 7
    return rows, draws.normal(V, D), jnp.asarray(tokens)


def with_table(layer: TokenRows, rows: jax.Array) -> TokenRows:
    """The layer with other rows, which may be traced."""
    graph, tables, rest = nnx.split(layer, nnx.LoRAParam, ...)
    tables["rows"] = tables["rows"].replace(rows)
    return nnx.merge(graph, tables, rest)


def embedding_of(rows, table, slot: int):
    """The embedding of a slot with its own rows."""
    for row, token in enumerate(IDS[slot] if slot >= 0 else []):
        table = table if token < 0 else table.at[token].set(rows[slot, row])
    return table


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_has_the_rows_of_each_slot(is_tied):
    """A tied head is stored V D, another one D V."""
    layer, table, labels = make()
    hidden, weight = normal(5, (T, D)), normal(6, (T,))
    is_target = jnp.asarray(np.random.default_rng(7).random(T) < 0.6)
    hidden = jnp.asarray(np.where(is_target[:, None], hidden, np.float32(np.nan)))
    cap = 5.0

    def ours(rows, hidden):
        nll = target_nll(
            hidden,
            table if is_tied else table.T,
            labels,
            is_target,
            head_transposed=is_tied,
            logit_softcap=cap,
            own=with_table(layer, rows).of_head(jnp.asarray(BLOCKS)),
        )
        return (nll * weight).sum(), nll

    def wanted(rows, hidden):
        parts = []
        for i, slot in enumerate(BLOCKS):
            here = slice(i * BLOCK, (i + 1) * BLOCK)
            x = jnp.where(is_target[here, None], hidden[here], 0)
            logits = x @ embedding_of(rows, table, slot).T
            logp = jax.nn.log_softmax(cap * jnp.tanh(logits / cap))
            nll = -jnp.take_along_axis(logp, labels[here, None], axis=1)[:, 0]
            parts.append(jnp.where(is_target[here], nll, 0))
        nll = jnp.concatenate(parts)
        return (nll * weight).sum(), nll

    arguments = layer.rows[...], hidden
    found, nll = gradients(ours, (0, 1))(*arguments)
    exact, nll_wanted = gradients(wanted, (0, 1))(*arguments)
    assert relative_error(nll, nll_wanted) < 1e-6
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) < 1e-5
    # Rows that have diverged stay those of their slot.
    rows, hidden = np.array(arguments[0]), np.nan_to_num(hidden)
    rows[0, 1] = np.nan
    found, nll = jax.tree.map(np.asarray, gradients(ours, (0, 1))(rows, hidden))
    mine = np.repeat(BLOCKS == 0, BLOCK)
    assert np.isnan(nll[mine & is_target]).all()
    assert np.isfinite(nll[~mine]).all() and np.isfinite(found[1][~mine]).all()
    assert np.isfinite(found[0][1:]).all()
