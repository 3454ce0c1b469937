"""Losses of rewards are TRL's, which a golden file holds."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.data.pack import JobBatch
from jaxlora.objectives.reward import REWARD
from jaxlora.objectives.sample import TokenizedSample

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "preferences.json"
CASES = json.loads(GOLDEN.read_text())["cases"]["reward"]


@jax.jit
def compute(nll, inputs, groups):
    def loss(score):
        return REWARD.losses(nll, inputs | {"score": score}, groups).sum()

    metrics = {k: x.sum() for k, x in REWARD.metrics(nll, inputs, groups).items()}
    return *jax.value_and_grad(loss)(inputs["score"]), metrics


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(case):
    chosen, rejected = np.array(case["rewards"]).reshape(2, -1)
    margins = case["margins"] or [0.0] * len(chosen)

    def sample(length: int, value: float) -> TokenizedSample:
        is_target = np.arange(length) > 0
        return TokenizedSample(np.arange(length, dtype=np.int32), is_target, value)

    sizes = [(2 + i, 5 - i) for i in range(len(chosen))]
    pairs = [
        [sample(c, m), sample(r, 0.0)] for (c, r), m in zip(sizes, margins, strict=True)
    ]
    batch = JobBatch(
        slot=0,
        step=0,
        samples=[one for pair in pairs for one in pair],
        weight=1 / len(pairs),
        objective=REWARD,
        settings=REWARD.settings_of(case["args"]),
    )
    parts = [REWARD.row_inputs(pair, batch.terms) for pair in pairs]
    ends = [i for c, r in np.cumsum(sizes).reshape(-1, 2).tolist() for i in (c, r)]
    last = np.array(ends) - 1
    with jax.enable_x64(True):
        inputs = {
            k: jnp.asarray(np.concatenate([p[k] for p in parts])) for k in parts[0]
        }
        groups = jnp.repeat(jnp.arange(len(pairs)), 7)
        nll = jnp.zeros(len(groups))
        # Rows that are not the last of a sequence have scores that are not read.
        score = jnp.full(len(groups), 9.0).at[last[::2]].set(chosen)
        score = score.at[last[1::2]].set(rejected)
        found, gradient, metrics = compute(nll, inputs | {"score": score}, groups)
        sums = {name: float(x) for name, x in metrics.items()}
    assert float(found) == pytest.approx(case["loss"], rel=1e-10)
    assert sums == pytest.approx(case["metrics"], rel=1e-10)
    expected = np.zeros(len(groups))
    expected[last[::2]], expected[last[1::2]] = np.array(case["gradient"]).reshape(
        2, -1
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)


def test_equal_rewards_are_no_preference():
    """Rounding of float32 is none, in either direction."""
    inputs = {
        "side": jnp.array([1.0, -1.0]),
        **{name: jnp.array([1.0, 0.0]) for name in ("weight", "margin")},
        "center": jnp.zeros(2),
    }
    groups = jnp.zeros(2, int)

    def accuracy(chosen: float, rejected: float) -> float:
        score = jnp.array([chosen, rejected], jnp.float32)
        *_, metrics = compute(jnp.zeros(2), inputs | {"score": score}, groups)
        return float(metrics["accuracy"])

    eps = 2.0**-23
    for value in (1.3, -1.3, 0.0, 40.0):
        found = [accuracy(value * (1 + k * eps), value) for k in range(-3, 4)]
        assert found == [0.0] * 7
    assert accuracy(1.3001, 1.3) == 1.0 and accuracy(-1.3001, -1.3) == 0.0
