"""Compares `target_nll` and its gradient with the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules import loss
from jaxlora.modules.loss import SoftLabels, target_nll
from tests.drawn import normal
from tests.oracle import assert_as_accurate_as, relative_error

D, V = 16, 50


def problem(t, share, dtype=jnp.float32):
    rng = np.random.default_rng(t)
    hidden = rng.standard_normal((t, D), np.float32).astype(dtype)
    head = rng.standard_normal((D, V), np.float32).astype(dtype)
    labels = rng.integers(0, V, t).astype(np.int32)
    return tuple(map(jnp.asarray, (hidden, head, labels, rng.random(t) < share)))


def definition(hidden, head, labels, is_target):
    logp = jax.nn.log_softmax(hidden @ head)
    nll = -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
    return jnp.where(is_target, nll, 0.0)


def tied(hidden, head, labels, is_target):
    return target_nll(hidden, head.T, labels, is_target, head_transposed=True)


@functools.partial(jax.jit, static_argnums=0)
def with_gradient(f, hidden, head, labels, is_target):
    value, vjp = jax.vjp(lambda h: f(h, head, labels, is_target), hidden)
    weight = normal(1, value.shape, value.dtype)
    return value, vjp(weight)[0]


@pytest.mark.parametrize("op", [target_nll, tied])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("t", [64, 512, 1024 + 64])
def test_matches_the_definition(t, share, op):
    rows = problem(t, share)
    nll, dh = with_gradient(op, *rows)
    nll_wanted, dh_wanted = with_gradient(definition, *rows)
    assert relative_error(nll, nll_wanted) < 1e-6
    assert relative_error(dh, dh_wanted) < 1e-5
    np.testing.assert_array_equal(jax.jit(op)(*rows), nll)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cap", [0.5, 5.0, 100.0])
def test_a_soft_cap_matches_the_definition(cap, transposed):
    """Caps far below the logits, of their size, and far above."""
    hidden, head, *rows = problem(512, 0.3)

    def capped(hidden, head, labels, is_target):
        logits = cap * jnp.tanh(hidden @ head / cap)
        logp = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
        return jnp.where(is_target, nll, 0.0)

    def ours(hidden, head, labels, is_target):
        return target_nll(
            hidden,
            head.T if transposed else head,
            labels,
            is_target,
            head_transposed=transposed,
            logit_softcap=cap,
        )

    nll, dh = with_gradient(ours, hidden, head, *rows)
    nll_wanted, dh_wanted = with_gradient(capped, hidden, head, *rows)
    assert relative_error(nll, nll_wanted) < 1e-6
    assert relative_error(dh, dh_wanted) < 1e-5
    np.testing.assert_array_equal(ours(hidden, head, *rows), nll)
    plain, dh_plain = with_gradient(definition, hidden, head, *rows)
    assert relative_error(plain, nll) > 1e-3 and relative_error(dh_plain, dh) > 1e-3


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_bfloat16_is_as_accurate_as_plain_jax(share):
    hidden, head, *rows = problem(256, share, jnp.bfloat16)
    wide = (x.astype(jnp.float32) for x in (hidden, head))
    exact_nll, exact_dh = with_gradient(definition, *wide, *rows)
    plain_nll, plain_dh = with_gradient(definition, hidden, head, *rows)
    nll, dh = with_gradient(target_nll, hidden, head, *rows)
    plain_nll = plain_nll.astype(jnp.float32)
    assert_as_accurate_as(actual=nll, baseline=plain_nll, exact=exact_nll)
    assert_as_accurate_as(actual=dh, baseline=plain_dh, exact=exact_dh)


def test_the_number_of_targets_changes_no_row(monkeypatch):
    monkeypatch.setattr(loss, "_MAX_CHUNK", 128)
    hidden, head, labels, many = problem(1024 + 64, 0.5)
    few = many & (jnp.arange(len(many)) % 3 == 0)
    (nll, dh), (nll_few, dh_few) = (
        with_gradient(target_nll, hidden, head, labels, targets)
        for targets in (many, few)
    )
    assert many.sum() > 2 * 128 and 128 < few.sum() < many.sum() - 128
    np.testing.assert_array_equal(nll_few, np.where(few, nll, 0))
    np.testing.assert_array_equal(dh_few, np.where(few[:, None], dh, 0))


@pytest.mark.parametrize("vocab_size", [288, 32_000, 128_256, 151_936, 262_144])
def test_logits_of_a_chunk_fit(vocab_size):
    rows = loss.chunk_rows(vocab_size, 8192)
    assert rows % 128 == 0 and rows * vocab_size * 4 <= 512 * 2**20
    assert loss.chunk_rows(vocab_size, 64) == 64


@pytest.mark.parametrize("transposed", [False, True])
def test_makes_the_logits_once_and_copies_no_head(transposed):
    hidden, head, *rows = problem(64, 0.5)
    head = head.T if transposed else head

    def run(h):
        return target_nll(h, head, *rows, head_transposed=transposed).sum()

    forward, both = (
        str(jax.make_jaxpr(f)(hidden)) for f in (run, jax.value_and_grad(run))
    )
    assert forward.count("dot_general") == 1
    assert both.count("dot_general") == 2
    assert "transpose[" not in both


def test_keeps_one_row_of_features_for_the_backward_pass():
    hidden, head, *rows = problem(512, 0.5)
    _, vjp = jax.vjp(lambda h: target_nll(h, head, *rows), hidden)
    kept = sum(x.size for x in jax.tree.leaves(vjp))
    assert kept <= 512 * (D + 2)


def test_rows_do_not_touch_each_other():
    hidden, head, labels, is_target = problem(512, 0.3)
    sick, rest = np.array(hidden), np.arange(512) != 7
    sick[7] = np.nan
    for targets in (np.where(rest, is_target, value) for value in (True, False)):
        (clean, dh), (out, dh_sick) = (
            map(np.asarray, with_gradient(target_nll, h, head, labels, targets))
            for h in (hidden, sick)
        )
        np.testing.assert_array_equal(out[rest], clean[rest])
        np.testing.assert_array_equal(dh_sick[rest], dh[rest])
        assert np.isnan(out[7]) == targets[7]


@pytest.mark.parametrize("sick", [0, 7])
def test_a_row_that_is_no_target_gives_nothing_back(sick):
    hidden, head, labels, is_target = problem(64, 0.3)
    hidden, labels, is_target = map(np.array, (hidden, labels, is_target))
    hidden[sick], labels[sick], is_target[sick] = np.nan, -100, False

    @jax.jit
    def run(hidden, labels, is_target):
        nll = lambda h: target_nll(h, head, labels, is_target)
        value, vjp = jax.vjp(nll, hidden)
        return value, *vjp(jnp.where(is_target, 1.0, jnp.nan))

    value, dh = map(np.asarray, run(hidden, labels, is_target))
    assert np.isfinite(value).all() and np.isfinite(dh).all()
    assert not dh[~is_target].any()


def soft_problem(t: int):
    """Rows of one label, of several with shares, and at other temperatures."""
    hidden, head, labels, is_target = problem(t, 0.5)
    rng = np.random.default_rng(t)
    ids = np.argsort(rng.random((t, V)), axis=1)[:, :5]
    shares = rng.random((t, 5)) * (rng.random((t, 5)) < 0.7)
    soft = SoftLabels(
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(shares, jnp.float32),
        jnp.asarray(rng.choice([1.0, 0.5, 2.0], t), jnp.float32),
    )
    is_soft = np.arange(t) % 2 == 0
    one = SoftLabels.of(labels, 5)
    return hidden, head, labels, is_target, is_soft, soft, one


@pytest.mark.parametrize("cap", [None, 5.0])
def test_soft_labels_match_the_definition(cap):
    """Rows with one label among them have the bits that they have without others."""
    hidden, head, labels, is_target, is_soft, soft, one = soft_problem(512)
    both = jax.tree.map(
        lambda x, y: jnp.where(is_soft.reshape(-1, *[1] * (x.ndim - 1)), x, y),
        soft,
        one,
    )

    def wanted(hidden, head, labels, is_target):
        logits = hidden @ head
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        logp = jax.nn.log_softmax(labels.scale[:, None] * logits)
        picked = jnp.take_along_axis(logp, labels.ids, axis=1)
        return jnp.where(is_target, -(labels.shares * picked).sum(axis=1), 0.0)

    def ours(hidden, head, labels, is_target):
        return target_nll(hidden, head, labels, is_target, logit_softcap=cap)

    nll, dh = with_gradient(ours, hidden, head, both, is_target)
    nll_wanted, dh_wanted = with_gradient(wanted, hidden, head, both, is_target)
    assert relative_error(nll, nll_wanted) < 1e-6
    assert relative_error(dh, dh_wanted) < 1e-5
    plain, dh_plain = with_gradient(ours, hidden, head, labels, is_target)
    np.testing.assert_array_equal(nll[~is_soft], plain[~is_soft])
    np.testing.assert_array_equal(dh[~is_soft], dh_plain[~is_soft])
