"""Losses of preferences and rewards are TRL's, which a golden file holds."""

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
# The reference may also run with the microbatch.
CASES = [
    pytest.param(name.partition("_")[0], case, in_step, id=f"{name}-{number}-{in_step}")
    for name, cases in json.loads(GOLDEN.read_text())["cases"].items()
    for number, case in enumerate(cases)
    for in_step in (False, True)[: 1 + ("reference" in case)]
]


class Batch:
    """The rows of a golden case, whose pairs come one after another here.

    Attributes:
        batch: The samples.
        nll: The likelihood of each row's next token; the last of a sample has none.
        inputs: What the objective reads, and scores of all rows.
        groups: The group of each row.
    """

    def __init__(self, name: str, case: dict, which: str = "", *, in_step=False):
        """Lays out a case, or with `recombined_` the samples of its baseline."""
        objective: Objective | None = find_objective(name)
        objective = objective.baseline if which else objective
        assert objective is not None
        size, prompt = objective.group_size, case.get("prompt", 1)
        count = len(case.get("lengths") or case["rewards"])
        order = np.arange(count).reshape(size, -1).T.ravel()
        in_order = lambda values: [values[i] for i in order]
        lengths, values = case.get("lengths") or [*range(2, 2 + count)], [0.0] * count
        if which:  # the completion of the sample before
            lengths = lengths[-1:] + lengths[:-1]
        if "labels" in case:
            values = case["labels"]
        elif case.get("margins"):
            values = case["margins"] + [0.0] * (count - len(case["margins"]))
        logps = case.get(f"{which}policy")
        if logps is None:
            logps = [np.zeros(prompt + length - 1) for length in lengths]
        references = case.get(f"{which}reference")
        samples = []
        for i in order:
            ids = np.arange(prompt + lengths[i], dtype=np.int32)
            reference = None if in_step or not references else sum(references[i])
            value = float(values[i])
            samples.append(TokenizedSample(ids, ids >= prompt, value, reference))
        self.batch = JobBatch(
            slot=0,
            step=0,
            samples=samples,
            weight=size / count,
            objective=objective,
            settings=objective.settings_of(case["args"]),
        )
        groups = [self.batch.group(i) for i in range(count // size)]
        parts = [objective.row_inputs(group, self.batch.terms) for group in groups]
        assert set(parts[0]) == set(objective.input_names)
        rows = lambda of: np.concatenate([np.append(-np.array(x), 0.0) for x in of])
        self.inputs = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        self.nll = rows(in_order(logps))
        if objective.needs_reference:
            self.inputs["reference_nll"] = rows(in_order(references)) * in_step
        # Rows that are not the last of a sequence have scores that are not read.
        self.last = np.cumsum([len(sample.token_ids) for sample in samples]) - 1
        self.inputs["score"] = np.full(len(self.nll), 9.0)
        if "rewards" in case:
            self.inputs["score"][self.last] = in_order(case["rewards"])
        self.groups = np.repeat(
            np.arange(len(groups), dtype=np.int32),
            [sum(len(sample.token_ids) for sample in group) for group in groups],
        )
        # By the likelihoods of targets, or by the scores.
        self.gradient = None
        if "rewards" in case:
            self.gradient = np.zeros(len(self.nll))
            self.gradient[self.last] = in_order(case["gradient"])
        elif "gradient" in case and not which:
            parts = [
                [0.0] * (prompt - 1) + one[prompt - 1 :] for one in case["gradient"]
            ]
            self.gradient = rows(in_order(parts))

    def arrays(self, dtype, baseline=0.0) -> tuple:
        """Arguments of the objective, with rows of padding."""
        more = (0, ROWS - len(self.groups))
        inputs = {
            k: jnp.asarray(np.pad(v, more), dtype) for k, v in self.inputs.items()
        }
        inputs["baseline"] = jnp.full(ROWS, baseline, dtype)
        groups = jnp.asarray(np.pad(self.groups, more, constant_values=-1))
        return jnp.asarray(np.pad(self.nll, more), dtype), inputs, groups


def loss_of(objective: Objective, nll, inputs, groups):
    nll = jnp.where(objective.is_target(inputs), nll, 0.0)
    return objective.losses(nll, inputs, groups).sum()


@functools.cache
def compiled(name: str):
    """Loss, gradient and sums of metrics; one program for all settings."""
    objective = find_objective(name)

    def run(nll, inputs, groups):
        def loss(nll, score):
            return loss_of(objective, nll, inputs | {"score": score}, groups)

        made = jax.value_and_grad(loss, argnums=(0, 1))(nll, inputs["score"])
        metrics = objective.metrics(nll, inputs, groups)
        return *made, {name: values.sum() for name, values in metrics.items()}

    return jax.jit(run)


def first_case(name: str) -> dict:
    return next(case.values[1] for case in CASES if case.values[0] == name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name, case, in_step", CASES)
def test_losses_are_those_of_trl(name, case, in_step, dtype):
    tolerance = 1e-10 if dtype == "float64" else 2e-6
    batch, baseline = Batch(name, case, in_step=in_step), 0.0
    with jax.enable_x64(dtype == "float64"):
        if "recombined_policy" in case:
            others = Batch(name, case, "recombined_", in_step=in_step)
            baseline = compiled(name)(*others.arrays(dtype))[0]
        loss, gradients, metrics = compiled(name)(*batch.arrays(dtype, baseline))
    assert float(loss) == pytest.approx(case["loss"], rel=tolerance)
    assert set(metrics) == set(find_objective(name).metric_names)
    names = batch.batch.metric_names
    found = {one: float(metrics[one]) for one in names}
    golden = {one: case["metrics"][one] for one in names}
    assert found == pytest.approx(golden, rel=10 * tolerance, abs=tolerance)
    if batch.gradient is not None:
        np.testing.assert_allclose(
            gradients["rewards" in case][: len(batch.groups)],
            batch.gradient,
            rtol=tolerance * 10,
            atol=1e-9,
        )


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo", "orpo", "reward"])
def test_equal_rewards_are_no_preference(name):
    """Rounding of float32 is none, in either direction; a real difference is one."""
    batch = Batch(name, first_case(name))
    _, inputs, groups = batch.arrays("float32")
    nll = np.full(len(groups), 1.7, np.float32)
    side, is_pair = np.asarray(inputs["side"]), np.asarray(inputs["weight"]) > 0
    for answer, sign in (("chosen", 1), ("rejected", -1)):
        counts = np.array([((side == sign) & (groups == g)).sum() for g in groups])
        if name == "dpo":  # the policy is the reference
            inputs[f"{answer}_reference"] = jnp.where(is_pair, -1.7 * counts, 0)
        elif name != "reward":  # both answers have the same mean likelihood
            scale = jnp.where(is_pair, 1 / np.maximum(counts, 1), 0)
            inputs[f"{answer}_scale"] = scale

    def accuracy(change: float, value: float = -1.7) -> float:
        changed = jnp.where(inputs["side"] > 0, 1 + change, 1.0)
        scores = {"score": (value * changed).astype(jnp.float32)}
        metrics = compiled(name)(nll * changed, inputs | scores, groups)[2]
        return float(metrics["accuracy" if name == "reward" else "rewards/accuracies"])

    eps = 2.0**-23
    for value in (-1.7, 1.3, 0.0, 40.0)[: 4 if name == "reward" else 1]:
        assert [accuracy(k * eps, value) for k in range(-3, 4)] == [0.0] * 7
    assert accuracy(-1e-3) == pytest.approx(1.0) and accuracy(1e-3) == 0.0


def test_the_rewards_of_the_reference_itself_are_0():
    """In any precision; the loss is as it is computed."""
    batch = Batch("dpo", first_case("dpo"))
    before = compiled("dpo")(*batch.arrays("float32"))
    terms = Terms(weight=1.0, settings=DPO.settings_of({}), is_reference=True)
    pair = [TokenizedSample(np.arange(4), np.arange(4) > 1, 0.0, -3.0)] * 2
    assert not DPO.row_inputs(pair, terms)["reward"].any()
    batch.inputs["reward"] = np.zeros_like(batch.inputs["reward"])
    loss, gradients, metrics = compiled("dpo")(*batch.arrays("float32"))
    assert loss == before[0] and (gradients[0] == before[1][0]).all()
    for kind in ("chosen", "rejected", "accuracies", "margins"):
        assert not metrics[f"rewards/{kind}"]
    assert metrics["logps/chosen"] == before[2]["logps/chosen"]


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
    batch = Batch("orpo", first_case("orpo"))
    nll, inputs, groups = batch.arrays("float32")
    bad = jnp.where(groups == 1, jnp.nan, nll)
    losses = batch.batch.objective.losses
    loss = lambda nll: jnp.where(groups != 1, losses(nll, inputs, groups), 0.0).sum()
    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_array_equal(
        jnp.where(groups == 1, 0.0, gradient(bad)),
        jnp.where(groups == 1, 0.0, gradient(nll)),
    )


def test_a_likely_completion_has_a_finite_gradient():
    """At a probability of 1, the odds are infinite."""
    _, inputs, groups = Batch("orpo", first_case("orpo")).arrays("float32")
    gradients = compiled("orpo")(jnp.zeros(len(groups)), inputs, groups)[1]
    assert jnp.isfinite(gradients[0]).all()


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
        ("dpo", {"beta": [1]}, "beta: expected a number, such as 8"),
        ("kto", {"beta": {"a": 1}}, "beta: expected a number, such as 8"),
        ("dpo", {"loss_type": ["ipo"]}, "loss_type: must be 'sigmoid', 'hinge'"),
        ("dpo", {"reference": {}}, "reference: expected text"),
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
