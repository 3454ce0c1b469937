"""An objective of a user is checked when it is registered, and trains as ours do."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

import jaxlora
from jaxlora import LoraJob, RunConfig, Sweep, Trainer
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from jaxlora.hf.load import load_model
from jaxlora.objectives import base, register
from jaxlora.objectives.base import Objective, ObjectiveSettings
from jaxlora.objectives.next_token import NEXT_TOKEN
from jaxlora.objectives.table import OBJECTIVES, find_objective
from jaxlora.run.events import EvalEvent, StepEvent
from tests import tiny
from tests.jaxlora.models.test_logits import packed_logits
from tests.jaxlora.train.runs import (
    InterruptAt,
    events_of,
    outcome,
    run_of,
    write_swept_job,
)


@pytest.fixture(autouse=True)
def table():
    """Forgets the objectives that a test registers."""
    before = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(before)


@pytest.fixture
def capped() -> Objective:
    """Runs the example of the documentation."""
    text = str(register.register_objective.__doc__)
    lines = [line[8:] for line in text.splitlines() if line.startswith(" " * 8)]
    text = "\n".join(lines).split("job = ")[0]
    names = {"jaxlora": jaxlora, "jnp": jnp, "pydantic": pydantic}
    exec(text, names | vars(base))
    return find_objective("capped")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.CONFIG | {"num_hidden_layers": 1}
    folder = tiny.write_model(tmp_path_factory.mktemp("own") / "model", config=config)
    return load_model(folder, dtype="float32")


@pytest.fixture
def run(model, tmp_path):
    """Makes runs of jobs whose batches fill a microbatch each, with three slots."""
    number = itertools.count()

    def make(jobs: list[LoraJob], **settings) -> RunConfig:
        return run_of(
            model,
            tmp_path / f"{next(number)}",
            jobs,
            max_concurrent_jobs=3,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            **settings,
        )

    return make


@pytest.fixture
def jobs(tmp_path) -> list[LoraJob]:
    job = write_swept_job(tmp_path).replace(eval_every=4, shuffle=False)
    own = {"objective": "capped", "learning_rate": 1e-2}
    return [
        job.replace(name="a", **own),
        job.replace(name="b", objective_args={"cap": 99.0}, seed=1, **own),
        job.replace(name="c", seed=2),
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"cap": -1}, r"objective_args\.cap: must be greater than 0 \(given: -1"),
        ({"cap": "3"}, r"objective_args\.cap: expected a number, without quotes"),
        ({"cup": 1}, r"objective_args\.cup: unknown key 'cup'\. Did you mean 'cap'"),
    ],
)
def test_settings_are_those_of_the_class(capped, model, run, jobs, args, message):
    assert capped.settings_of({"cap": 1}).cap == 1.0
    assert capped.settings_of({}).cap == 4.0
    with pytest.raises(ConfigError, match=message):
        Trainer(run([jobs[0].replace(objective_args=args)]), model).train()


def test_an_objective_that_is_not_registered(model, run, jobs):
    with pytest.raises(ConfigError, match=r"one of next_token, .*jaxlora\.register_ob"):
        Trainer(run(jobs[:1]), model).train()


@pytest.mark.usefixtures("capped")
def test_each_job_has_the_bits_that_it_has_alone(model, run, jobs):
    together = outcome(run(jobs), model)
    for one in jobs:
        others = [job.replace(steps=1) for job in jobs if job is not one]
        alone = outcome(run([*others, one]), model)
        assert alone.losses[one.name] == together.losses[one.name]
        assert alone.evals[one.name] == together.evals[one.name]
        assert alone.bytes[one.name] == together.bytes[one.name]
    # With a high cap, it is the likelihood of the next token.
    plain = jobs[1].replace(objective="next_token", objective_args={})
    same = outcome(run([jobs[0], jobs[2], plain]), model)
    assert same.losses["b"] == pytest.approx(together.losses["b"], rel=1e-6)
    assert same.losses["b"] != pytest.approx(together.losses["a"], rel=1e-2)


@pytest.mark.usefixtures("capped")
def test_losses_and_metrics_are_those_of_numpy(model, run, jobs):
    """A job that does not learn has the base's likelihoods in each step."""
    job = jobs[0].replace(learning_rate=0.0, eval_data=jobs[0].data, eval_fraction=0.0)
    found = outcome(run([job, *jobs[1:]]), model)
    samples = DataReader(load_tokenizer(model.folder), None).read(job, "train").samples
    ids = [sample.token_ids for sample in samples]
    nll = []
    for logits, labels in zip(packed_logits(model, ids, total=512), ids, strict=True):
        logits, labels = logits[:-1].astype(np.float64), labels[1:, None]
        chosen = np.take_along_axis(logits, labels, axis=1)[:, 0]
        nll.append(np.logaddexp.reduce(logits, axis=1) - chosen)
    steps = np.array(nll).reshape(-1, job.batch_size * len(nll[0]))
    wanted = np.minimum(steps, 4.0).mean(axis=1)
    assert found.losses["a"][: len(wanted)] == pytest.approx(wanted, rel=1e-5)
    assert found.evals["a"] == pytest.approx([wanted.mean()] * 3, rel=1e-5)
    events = events_of(found.result.output_dir)
    own = [event for event in events if event.get("job") == "a"]
    shares = [one["share_capped"] for one in own if one["event"] == "step"]
    assert shares[: len(steps)] == pytest.approx((steps > 4.0).mean(axis=1))
    shares = [one["eval_share_capped"] for one in own if one["event"] == "eval"]
    assert shares == pytest.approx([(steps > 4.0).mean()] * 3)


@pytest.mark.usefixtures("capped")
def test_a_sweep_over_a_setting_is_resumed(model, run, jobs):
    sweep = Sweep(parameters={"objective_args.cap": [2.0, 4.0, 8.0]})
    whole, config = run(jobs[:1], sweep=sweep), run(jobs[:1], sweep=sweep)
    wanted = outcome(whole, model)
    Trainer(config, model).train(callbacks=[InterruptAt(2)])
    found = outcome(config, model, resume=True)
    assert found.bytes == wanted.bytes
    assert len({tuple(losses) for losses in wanted.losses.values()}) == 3


def test_kept_programs_know_its_code(capped):
    """Other mathematics or constants under the same name are another program."""

    def scaled(name: str, factor: float) -> str:
        table = np.full(1, factor, np.float32)  # a constant that is no literal
        losses = lambda nll, inputs, groups: base.weighted(nll * table, inputs)
        one = dataclasses.replace(capped, name=name, losses=losses)
        jaxlora.register_objective(one)
        return find_objective(name).fingerprint

    found = [scaled("one", 0.1), scaled("same", 0.1), scaled("other", 0.2)]
    assert found[0] == found[1] != found[2] and "" not in found
    assert not NEXT_TOKEN.fingerprint


class Required(ObjectiveSettings):
    cap: float


ONES = lambda samples, terms: {"weight": np.ones(len(samples[0].token_ids))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "dpo"}, "'dpo' is taken: there are next_token, dpo"),
        ({"name": "My-Own"}, "'My-Own' must be lower-case letters, digits and '_'"),
        (
            {"settings": {"gamma": 1}},
            "settings is {'gamma': 1}, and must be a subclass",
        ),
        ({"settings": Required}, "its setting cap has no default"),
        ({"group_size": 2}, r"group_size is 2 with kinds=\(\), and must be 1, or 2"),
        (
            {"input_names": ("weight", "more")},
            "row_inputs makes the shapes .*: .5,.* of 5 tokens, and input_names",
        ),
        (
            {"losses": lambda nll, inputs, groups: nll if nll[0] > 0 else -nll},
            "losses fails when it is traced",
        ),
        (
            {"losses": lambda nll, inputs, groups: base.weighted(nll, inputs).sum()},
            r"losses returns float32\(\), and must return float32\(5,\)",
        ),
        (
            {"metric_names": ("accuracy",)},
            r"metrics returns {}, and must return {'accuracy': 'float32\(5,\)'}",
        ),
        (
            {"is_target": lambda inputs: inputs["weight"]},
            r"is_target returns float32\(5,\), and must return bool\(5,\)",
        ),
        (
            {"losses": lambda nll, inputs, groups: nll + 1.0},
            "rows whose inputs are 0 have the loss 5.0 and the gradient 1.0, and must",
        ),
        ({"name": 5}, "objective name 5 must be lower-case"),
        ({"kinds": "preference"}, "kinds is 'preference', and must be a tuple of"),
        ({"metric_names": ("step",)}, "metric_names has 'step', which lines of"),
        ({"num_terms": lambda samples: -1}, "num_terms returns -1 for samples with"),
        ({"num_terms": lambda samples: "3"}, "num_terms returns '3' for samples"),
        ({"row_inputs": lambda samples, terms: 1 / 0}, "row_inputs fails .*ZeroDiv"),
        (
            {"losses": lambda nll, inputs, groups: inputs["cap"]},
            "losses fails when it is traced: 'cap'",
        ),
        (
            {"losses": lambda n, i, groups: base.weighted(n - 50 * n.mean(), i)},
            "losses: rows depend on rows of other samples",
        ),
        (
            {"losses": lambda n, i, groups: base.weighted(n * i["weight"].sum(), i)},
            "losses: rows depend on rows of other samples",
        ),
        (
            {
                "metric_names": ("rest",),
                "metrics": lambda n, i, groups: {"rest": n.max() - n},
            },
            "metric rest: rows depend on rows of other samples",
        ),
        (
            {"losses": lambda nll, inputs, groups: inputs["weight"] * jnp.sqrt(nll)},
            "the loss 0.0 and the gradient nan, and must have 0",
        ),
    ],
)
def test_objectives_that_are_refused(changes, message):
    before = dict(OBJECTIVES)
    objective = dataclasses.replace(NEXT_TOKEN, name="mine", row_inputs=ONES)
    vars(objective).update(changes)  # the checks of types in tests would refuse some
    with pytest.raises(ConfigError, match=message):
        jaxlora.register_objective(objective)
    assert before == OBJECTIVES


def test_metrics_take_no_name_that_an_event_has():
    fields = {
        f.name for kind in (StepEvent, EvalEvent) for f in dataclasses.fields(kind)
    }
    assert {name.removeprefix("eval_") for name in fields} <= register._OF_STEPS
