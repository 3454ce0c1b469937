"""Losses of preferences are TRL's, which golden files hold."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.data.pack import JobBatch
from jaxlora.errors import ConfigError
from jaxlora.objectives.base import Objective, Terms, group_sums
from jaxlora.objectives.preference import DPO
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.objectives.table import find_objective

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "preferences.json"
ROWS = 64  # of all cases, so that they share programs
CASES = [
    pytest.param(name.partition("_")[0], case, id=f"{name}-{number}")
    for name, cases in json.loads(GOLDEN.read_text())["cases"].items()
    for number, case in enumerate(cases)
    if "policy" in case and find_objective(name.partition("_")[0]).group_size == 2
]


class Batch:
    """The rows of a golden case, with pairs one after another."""

    def __init__(self, name: str, case: dict, *, in_step: bool = False):
        half = len(case["lengths"]) // 2
        order = [i for pair in range(half) for i in (pair, pair + half)]
        logps = [np.array(case["policy"][i]) for i in order]
        references = case.get("reference")
        samples = []
        for i in order:
            length, prompt = case["lengths"][i], case["prompt"]
            is_target = np.arange(prompt + length) >= prompt
            ids = np.arange(prompt + length, dtype=np.int32)
            reference = sum(references[i]) if references else None
            is_given = reference is not None and not in_step
            more = {"reference_logp": reference} if is_given else {}
            samples.append(TokenizedSample(ids, is_target, **more))
        self.objective = find_objective(name)
        batch = JobBatch(
            slot=0,
            step=0,
            samples=samples,
            weight=1 / half,
            objective=self.objective,
            settings=self.objective.settings_of(case["args"]),
        )
        parts = [
            self.objective.row_inputs(batch.group(i), batch.terms) for i in range(half)
        ]
        self.inputs = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        assert set(self.inputs) == set(self.objective.input_names)
        # The last row of a sample predicts nothing.
        self.nll = np.concatenate([np.append(-one, 0.0) for one in logps])
        if self.objective.needs_reference:
            by_base = [np.append(-np.array(references[i]), 0.0) for i in order]
            self.inputs["reference_nll"] = np.concatenate(by_base) * in_step
        pairs = zip(logps[::2], logps[1::2], strict=True)
        sizes = [len(chosen) + len(rejected) + 2 for chosen, rejected in pairs]
        self.groups = np.repeat(np.arange(half, dtype=np.int32), sizes)

    def arrays(self, dtype) -> tuple:
        """Arguments of the objective, with rows of padding."""
        more = (0, ROWS - len(self.groups))
        inputs = {
            k: jnp.asarray(np.pad(v, more), dtype) for k, v in self.inputs.items()
        }
        groups = jnp.asarray(np.pad(self.groups, more, constant_values=-1))
        return jnp.asarray(np.pad(self.nll, more), dtype), inputs, groups

    def loss(self, nll, inputs, groups):
        return _loss(self.objective, nll, inputs, groups)


def _loss(objective: Objective, nll, inputs, groups):
    nll = jnp.where(objective.is_target(inputs), nll, 0.0)
    return objective.losses(nll, inputs, groups).sum()


@functools.cache
def compiled(name: str):
    """Loss, gradient and metrics; one program for all settings of an objective."""
    objective = find_objective(name)

    def run(*args):
        loss = functools.partial(_loss, objective)
        return *jax.value_and_grad(loss)(*args), objective.metrics(*args)

    return jax.jit(run)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name, case", CASES)
def test_losses_are_those_of_trl(name, case, dtype):
    batch, tolerance = Batch(name, case), 1e-10 if dtype == "float64" else 2e-6
    with jax.enable_x64(dtype == "float64"):
        loss, gradient, metrics = compiled(name)(*batch.arrays(dtype))
        found = {name: float(values.sum()) for name, values in metrics.items()}
    assert float(loss) == pytest.approx(case["loss"], rel=tolerance)
    assert set(found) == set(batch.objective.metric_names)
    golden = {name: case["metrics"][name] for name in found}
    assert found == pytest.approx(golden, rel=tolerance, abs=tolerance)
    if "gradient" in case:
        half = len(case["lengths"]) // 2
        golden = [
            row
            for pair in range(half)
            for i in (pair, pair + half)
            for row in [0.0] * (case["prompt"] - 1)
            + case["gradient"][i][case["prompt"] - 1 :]
            + [0.0]
        ]
        gradient = gradient[: len(batch.groups)]
        np.testing.assert_allclose(-gradient, golden, rtol=tolerance * 10, atol=1e-9)


@pytest.mark.parametrize(
    "name, case", [c for c in CASES if find_objective(str(c.values[0])).needs_reference]
)
def test_the_reference_may_run_with_the_microbatch(name, case):
    batch = Batch(name, case, in_step=True)
    with jax.enable_x64(True):
        loss, _, metrics = compiled(name)(*batch.arrays("float64"))
        found = {name: float(values.sum()) for name, values in metrics.items()}
    assert float(loss) == pytest.approx(case["loss"], rel=1e-10)
    golden = {name: case["metrics"][name] for name in found}
    assert found == pytest.approx(golden, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo", "orpo"])
def test_equal_rewards_are_no_preference(name):
    """Rounding of float32 is none, in either direction; a real difference is one."""
    case = next(c.values[1] for c in CASES if c.values[0] == name)
    batch = Batch(name, case)
    _, inputs, groups = batch.arrays("float32")
    nll = np.full(len(groups), 1.7, np.float32)
    side, is_pair = np.asarray(inputs["side"]), np.asarray(inputs["weight"]) > 0
    for answer, sign in (("chosen", 1), ("rejected", -1)):
        counts = np.array([((side == sign) & (groups == g)).sum() for g in groups])
        if name == "dpo":  # the policy is the reference
            inputs[f"{answer}_reference"] = jnp.where(is_pair, -1.7 * counts, 0)
        else:  # both answers have the same mean likelihood
            scale = jnp.where(is_pair, 1 / np.maximum(counts, 1), 0)
            inputs[f"{answer}_scale"] = scale

    def accuracy(change: float) -> float:
        changed = jnp.where(inputs["side"] > 0, nll * (1 + change), nll)
        found = compiled(name)(changed, inputs, groups)[2]["rewards/accuracies"]
        return float(found.sum())

    eps = 2.0**-23
    assert [accuracy(k * eps) for k in range(-3, 4)] == [0.0] * 7
    assert accuracy(-1e-3) == pytest.approx(1.0) and accuracy(1e-3) == 0.0


def test_the_rewards_of_the_reference_itself_are_0():
    """In any precision; the loss is as it is computed."""
    case = next(c.values[1] for c in CASES if c.values[0] == "dpo")
    batch = Batch("dpo", case)
    before = compiled("dpo")(*batch.arrays("float32"))
    terms = Terms(weight=1.0, settings=DPO.settings_of({}), is_reference=True)
    pair = [TokenizedSample(np.arange(4), np.arange(4) > 1, 0.0, -3.0)] * 2
    assert not DPO.row_inputs(pair, terms)["reward"].any()
    batch.inputs["reward"] = np.zeros_like(batch.inputs["reward"])
    loss, gradient, metrics = compiled("dpo")(*batch.arrays("float32"))
    assert loss == before[0] and (gradient == before[1]).all()
    for kind in ("chosen", "rejected", "accuracies", "margins"):
        assert not np.asarray(metrics[f"rewards/{kind}"]).any()
    logps = "logps/chosen"
    np.testing.assert_array_equal(metrics[logps], before[2][logps])


def test_sums_of_groups_have_the_same_bits_anywhere():
    rng = np.random.default_rng(7)
    values = rng.normal(size=50).astype(np.float32)
    found = []
    for first, rows in ((0, 64), (13, 128), (70, 120)):
        at = np.zeros(rows, np.float32)
        at[first : first + 50] = values
        at[first + 50 :] = rng.normal(size=rows - first - 50)  # another job's rows
        groups = np.full(rows, -1, np.int32)
        groups[first : first + 50] = np.repeat([3, 4], [17, 33])
        groups[first + 50 :] = 5
        sums = jax.jit(group_sums)(at, groups)
        found.append(np.asarray(sums)[[first, first + 17]])
    exact = np.add.reduceat(values.astype(np.float64), [0, 17])
    np.testing.assert_allclose(found[0], exact, rtol=1e-5)
    for one in found[1:]:
        assert one.tobytes() == found[0].tobytes()


def test_values_that_are_not_finite_stay_in_their_pair():
    case = next(c.values[1] for c in CASES if c.values[0] == "orpo")
    batch = Batch("orpo", case)
    nll, inputs, groups = batch.arrays("float32")
    bad = jnp.where(groups == 1, jnp.nan, nll)
    loss = lambda nll: jnp.where(
        groups != 1, batch.objective.losses(nll, inputs, groups), 0.0
    ).sum()
    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_array_equal(
        jnp.where(groups == 1, 0.0, gradient(bad)),
        jnp.where(groups == 1, 0.0, gradient(nll)),
    )


def test_a_likely_completion_has_a_finite_gradient():
    """At a probability of 1, the odds are infinite."""
    case = next(c.values[1] for c in CASES if c.values[0] == "orpo")
    batch = Batch("orpo", case)
    _, inputs, groups = batch.arrays("float32")
    gradient = jax.jit(jax.grad(batch.loss))(jnp.zeros(len(groups)), inputs, groups)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    "name, args, message",
    [
        (
            "simpo",
            {"gamma": 1.0},
            r"(?s)'gamma'.*'simpo_gamma'.*Settings of simpo: beta, sim",
        ),
        (
            "next_token",
            {"beta": 1.0},
            r"(?s)'beta'.*Settings of next_token: none",
        ),
        ("cpo", {"beta": 0.0}, r"beta: must be greater than 0 \(given: 0\.0\)"),
        ("cpo", {"label_smoothing": 0.5}, "label_smoothing: must be less than 0.5"),
        ("cpo", {"loss_type": "kto"}, "loss_type: must be 'sigmoid', 'hinge' or 'ipo'"),
        ("orpo", {"beta": "high"}, "beta: expected a number, .*given: 'high'"),
        (
            "kto",
            {"desirable_weight": 0.0, "undesirable_weight": 0.0},
            "desirable_weight and undesirable_weight are 0, so nothing is learned",
        ),
    ],
)
def test_settings_that_do_not_exist_are_refused(name, args, message):
    with pytest.raises(ConfigError, match=message):
        find_objective(name).settings_of(args)
