"""Whole embeddings and heads of several slots in a microbatch, by their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora.models.whole_tables import WholeTables
from jaxlora.modules import loss
from jaxlora.modules.loss import SoftLabels
from jaxlora.modules.whole_head import whole_nll, with_whole_logits
from tests.drawn import Draws, normal
from tests.oracle import relative_error

G, V, D, BLOCK = 4, 50, 16, 8
BLOCKS = np.array([1, 0, -1, 1, 2, 0])
TRAINED = np.array([True, True, False, True])  # of the last slot there are no rows
T = len(BLOCKS) * BLOCK
MINE = np.repeat(np.isin(BLOCKS, (0, 1)), BLOCK)


def gradients(f, argnums=0):
    """Compiles the gradients and the value of a function with a further result."""
    return jax.jit(jax.grad(f, argnums, has_aux=True))


def make() -> tuple[WholeTables, jax.Array, jax.Array]:
    """The copies of the slots; hidden states and tokens, many of them equal."""
    rng, draws = np.random.default_rng(0), Draws(0)
    layer = WholeTables(G, V, D)
    layer.is_trained[...] = jnp.asarray(TRAINED)
    drawn = np.asarray(draws.normal(G, V, D))
    layer.table[...] = jnp.asarray(np.where(TRAINED[:, None, None], drawn, 0))
    tokens = rng.integers(0, V, T).astype(np.int32) % 7
    tokens[3] = V - 1
    return layer, draws.normal(T, D), jnp.asarray(tokens)


def with_table(layer: WholeTables, table: jax.Array) -> WholeTables:
    """The layer with other copies, which may be traced."""
    graph, tables, rest = nnx.split(layer, nnx.LoRAParam, ...)
    tables["table"] = tables["table"].replace(table)
    return nnx.merge(graph, tables, rest)


@pytest.mark.parametrize("has_shares", [False, True])
def test_each_slot_has_its_own_head(has_shares, monkeypatch):
    """Several chunks for a slot, none for another; labels of one token or several."""
    monkeypatch.setattr(loss, "_CHUNK_MULTIPLE", 4)
    monkeypatch.setattr(loss, "_MAX_LOGITS_BYTES", 4 * V * 8)
    assert loss.chunk_rows(V, T) == 8
    layer, hidden, labels = make()
    rng = np.random.default_rng(5)
    is_target = jnp.asarray(rng.random(T) < 0.7)
    weight, cap = normal(6, (T,)), 5.0
    hidden = jnp.asarray(np.where(is_target[:, None], hidden, np.float32(np.nan)))
    slots, shares = np.repeat(BLOCKS, BLOCK), None
    given = labels
    if has_shares:
        ids = np.stack([labels, (np.asarray(labels) + 11) % V], axis=1)
        scale = np.linspace(0.5, 1.5, T, dtype=np.float32)
        numbers = rng.random((T, 2)).astype(np.float32), scale
        shares = SoftLabels(*map(jnp.asarray, (ids, *numbers)))
        given = shares

    def ours(table, hidden, weight=weight):
        whole = with_table(layer, table).of_head(jnp.asarray(BLOCKS))
        nll = whole_nll(hidden, whole, given, is_target, logit_softcap=cap)
        return (nll * weight).sum(), nll

    def wanted(table, hidden):
        x = jnp.where((is_target & MINE)[:, None], hidden, 0)
        logits = cap * jnp.tanh(jnp.einsum("td,tvd->tv", x, table[slots]) / cap)
        if shares is None:
            logp = jax.nn.log_softmax(logits)
            nll = -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
        else:
            logp = jax.nn.log_softmax(logits * shares.scale[:, None])
            picked = jnp.take_along_axis(logp, shares.ids, axis=1)
            nll = -(shares.shares * picked).sum(axis=1)
        nll = jnp.where(is_target & MINE, nll, 0)
        return (nll * weight).sum(), nll

    arguments = layer.table[...], hidden
    found, nll = gradients(ours, (0, 1))(*arguments)
    exact, nll_wanted = gradients(wanted, (0, 1))(*arguments)
    assert relative_error(nll, nll_wanted) < 1e-6
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) < 1e-5
    _check_divergence(ours, arguments, (nll, *found), is_target)

    @jax.jit
    def logits_of(layer):
        whole = layer.of_head(jnp.asarray(BLOCKS))
        return with_whole_logits(jnp.ones((T, V)), jnp.ones((T, D)), whole)

    logits = np.asarray(logits_of(layer))
    assert (logits[~MINE] == 1).all()
    own = np.asarray(layer.table[...])[slots[MINE]].sum(axis=2)
    assert relative_error(logits[MINE], own) < 1e-5


def _check_divergence(ours, arguments, healthy, is_target):
    """A copy that has diverged changes no bit of other slots."""
    table, hidden = np.array(arguments[0]), arguments[1]
    table[0, 1] = np.nan
    healthy = [*map(np.asarray, healthy)]
    found, nll = jax.tree.map(np.asarray, gradients(ours, (0, 1))(table, hidden))
    sick = np.repeat(BLOCKS == 0, BLOCK)
    assert np.isnan(nll[sick & is_target]).all()
    for one, other in zip((nll, found[1]), (healthy[0], healthy[2]), strict=True):
        np.testing.assert_array_equal(one[~sick], other[~sick])
    np.testing.assert_array_equal(found[0][1:], healthy[1][1:])
    # So does a loss whose weight has diverged, of the first row, which is of slot 1.
    weight, bad = np.ones(T, np.float32), np.ones(T, np.float32)
    bad[0] = np.nan
    run = gradients(ours)
    wanted, found = (np.asarray(run(*arguments, x)[0]) for x in (weight, bad))
    np.testing.assert_array_equal(found[0], wanted[0])
