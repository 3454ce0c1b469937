"""`target_nll` against the definition, with its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules.loss import target_nll
from tests.oracle import relative_error

D, V = 16, 50


def problem(t, share):
    keys = jax.random.split(jax.random.key(t), 4)
    hidden = jax.random.normal(keys[0], (t, D))
    head = jax.random.normal(keys[1], (D, V))
    labels = jax.random.randint(keys[2], (t,), 0, V)
    return hidden, head, labels, jax.random.uniform(keys[3], (t,)) < share


def definition(hidden, head, labels, is_target):
    logp = jax.nn.log_softmax(hidden @ head)
    nll = -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
    return jnp.where(is_target, nll, 0.0)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("t", [64, 512, 1024 + 64])
def test_matches_the_definition(t, share):
    hidden, head, labels, is_target = problem(t, share)
    weight = jax.random.normal(jax.random.key(1), (t,))
    results = []
    for f in (target_nll, definition):
        value, vjp = jax.vjp(lambda h, f=f: f(h, head, labels, is_target), hidden)
        results.append((value, vjp(weight)[0]))
    (nll, dh), (nll_wanted, dh_wanted) = results
    assert relative_error(nll, nll_wanted) < 1e-6
    assert relative_error(dh, dh_wanted) < 1e-5


def test_rows_do_not_touch_each_other():
    hidden, head, labels, is_target = problem(512, 0.3)
    sick = hidden.at[7].set(jnp.nan)
    rest = np.arange(512) != 7
    for targets in (is_target.at[7].set(True), is_target.at[7].set(False)):

        def run(h, targets=targets):
            return target_nll(h, head, labels, targets)

        (clean, vjp), (out, vjp_sick) = jax.vjp(run, hidden), jax.vjp(run, sick)
        np.testing.assert_array_equal(out[rest], clean[rest])
        weight = jnp.ones(512)
        np.testing.assert_array_equal(vjp_sick(weight)[0][rest], vjp(weight)[0][rest])
        assert np.isnan(out[7]) == targets[7]
