"""Losses of labelled completions are TRL's, which golden files hold."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.data.kto_objective import KTO, recombined
from jaxlora.data.objective import Objective
from jaxlora.data.order import JobOrder
from jaxlora.data.pack import JobBatch
from jaxlora.data.tokens.samples import TokenizedSample

ROWS = 64  # of all cases, so that they share a program
GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "preferences.json"
CASES = [
    pytest.param(case, id=f"{name}-{number}")
    for name, cases in json.loads(GOLDEN.read_text())["cases"].items()
    for number, case in enumerate(cases)
    if name.startswith("kto")
]


def sample(
    prompt: int, length: int, label: bool, reference: float | None
) -> TokenizedSample:
    is_target = np.arange(prompt + length) >= prompt
    ids = np.arange(prompt + length, dtype=np.int32)
    return TokenizedSample(ids, is_target, float(label), reference)


def rows(case: dict, which: str, dtype, *, in_step: bool = False) -> tuple:
    """The rows of the samples of a golden case, or of its recombined samples."""
    lengths, prompt, objective = case["lengths"], case["prompt"], KTO
    if which:
        lengths, objective = lengths[-1:] + lengths[:-1], KTO.baseline
        assert isinstance(objective, Objective)
    logps, references = case[f"{which}policy"], case[f"{which}reference"]
    given = zip(lengths, case["labels"], references, strict=True)
    samples = [
        sample(prompt, n, label, None if in_step else sum(ref))
        for n, label, ref in given
    ]
    batch = JobBatch(
        slot=0,
        step=0,
        samples=samples,
        weight=1 / len(samples),
        objective=objective,
        settings=KTO.settings_of(case["args"]),
    )
    parts = [objective.row_inputs([s], batch.terms) for s in samples]
    assert set(parts[0]) == set(KTO.input_names)

    def padded(values, fill: float = 0.0) -> np.ndarray:
        out = np.full(ROWS, fill)
        out[: len(values)] = values
        return out

    inputs = {k: padded(np.concatenate([p[k] for p in parts])) for k in parts[0]}
    # The last row of a sample predicts nothing.
    nll = padded(np.concatenate([np.append(-np.array(one), 0.0) for one in logps]))
    by_base = np.concatenate([np.append(-np.array(one), 0.0) for one in references])
    inputs["reference_nll"] = padded(by_base * in_step)
    sizes = [len(one) + 1 for one in logps]
    groups = padded(np.repeat(np.arange(len(samples)), sizes), fill=-1)
    arrays = {k: jnp.asarray(x, dtype) for k, x in inputs.items()}
    return jnp.asarray(nll, dtype), arrays, jnp.asarray(groups, jnp.int32), batch


@jax.jit
def compute(nll, inputs, groups):
    loss = lambda nll: KTO.losses(nll, inputs, groups).sum()
    metrics = {k: x.sum() for k, x in KTO.metrics(nll, inputs, groups).items()}
    return *jax.value_and_grad(loss)(nll), metrics


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(case, dtype, in_step):
    tolerance = 1e-10 if dtype == "float64" else 2e-6
    with jax.enable_x64(dtype == "float64"):
        nll, inputs, groups, _ = rows(case, "recombined_", dtype, in_step=in_step)
        inputs |= {"baseline": jnp.zeros(ROWS, dtype)}
        baseline, *_ = compute(nll, inputs, groups)
        nll, inputs, groups, batch = rows(case, "", dtype, in_step=in_step)
        inputs |= {"baseline": jnp.full(ROWS, baseline)}
        found, gradient, metrics = compute(nll, inputs, groups)
        sums = {name: float(x) for name, x in metrics.items()}
    assert float(found) == pytest.approx(case["loss"], rel=tolerance)
    metrics = {name: sums[name] for name in batch.metric_names}
    assert metrics == pytest.approx(case["metrics"], rel=10 * tolerance, abs=tolerance)
    prompt = case["prompt"]
    expected = [
        [0.0] * (prompt - 1) + one[prompt - 1 :] + [0.0] for one in case["gradient"]
    ]
    expected = np.concatenate(expected)
    np.testing.assert_allclose(
        -gradient[: len(expected)], expected, rtol=tolerance * 10, atol=1e-9
    )


def test_a_recombined_sample_has_another_completion():
    one = TokenizedSample(
        np.arange(1, 6, dtype=np.int32), np.array([0, 0, 0, 1, 1], bool)
    )
    # A chat ends with tokens that are no targets.
    other = TokenizedSample(
        np.arange(11, 15, dtype=np.int32), np.array([0, 1, 1, 0], bool)
    )
    found = recombined(one, other, 99)
    assert found.token_ids.tolist() == [1, 2, 3, 12, 13, 14]
    assert found.is_target.tolist() == [False, False, False, True, True, False]
    cut = recombined(one, other, 4)
    assert cut.token_ids.tolist() == [1, 2, 3, 12]
    assert cut.is_target.tolist() == [False, False, False, True]
    assert not recombined(one, other, 3).is_target.any()


@pytest.mark.parametrize("shuffle", [True, False])
def test_neighbors_are_of_the_same_batch(shuffle):
    order = JobOrder(num_samples=11, batch_size=4, seed=5, shuffle=shuffle, epochs=1.0)
    neighbors = order.neighbors()
    for step in range(order.num_steps):
        batch = order.batch(step)
        assert neighbors[batch].tolist() == np.roll(batch, 1).tolist()
