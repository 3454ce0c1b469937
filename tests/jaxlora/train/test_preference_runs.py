"""Jobs that learn from preferences end where TRL took each alone.

The golden files are those of tests/golden/make_preference_runs.py, in float64; here the
weights are float32, and all jobs train together.
"""

import functools
import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob, load_model
from jaxlora.adapters.targets import resolve_targets
from jaxlora.models.structure import linear_shapes
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.train.job_state import JobState
from tests.jaxlora.train.golden_runs import (
    ALPHA,
    GOLDEN,
    RANK,
    TARGETS,
    read_weights,
    train_together,
)
from tests.jaxlora.train.runs import data_of
from tests.oracle import relative_error

FILE = json.loads((GOLDEN / "preference_runs" / "runs.json").read_text())
ABOUT, RUNS = FILE["about"], FILE["runs"]
# A run of each objective with its own settings, and one of each further kind of loss.
# `test_losses.py` compares the values of all losses with TRL's.
ALWAYS = (
    *(name for name in RUNS if "random" not in name),
    *("dpo-random3", "dpo-random5", "dpo-random6", "kto-random0"),
    *("cpo-random0", "simpo-random0"),
)
OTHERS = tuple(name for name in RUNS if name not in ALWAYS)
CASES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.grid) for name in OTHERS)]


def kind_of(name: str) -> str:
    """The objective of a run."""
    return name.partition("-")[0]


def weights(name: str, when: str, folder: pathlib.Path, model):
    """The adapter before or after training."""
    path = GOLDEN / "preference_runs" / f"{name}.safetensors"
    return read_weights(path, when, folder, model, has_score=kind_of(name) == "reward")


def samples(record: dict) -> list[TokenizedSample]:
    prompt, value = (
        record["prompt"],
        float(record.get("label", record.get("margin", 0))),
    )
    keys = [key for key in ("completion", "chosen", "rejected") if key in record]
    out = []
    for key in keys:
        ids = [*prompt, *record[key], ABOUT["eos"]]
        is_target = np.arange(len(ids)) >= len(prompt)
        out.append(TokenizedSample(np.array(ids, np.int32), is_target, value))
    return out


def job_state(name: str, folder: pathlib.Path, model) -> JobState:
    args = dict(RUNS[name]["settings"])
    objective = kind_of(name)
    if objective == "simpo":
        args.pop("loss_type")  # a loss of CPO in TRL
    job = LoraJob(
        name=name,
        data={"path": "golden"},
        objective=objective,
        objective_args=args,
        rank=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS,
        batch_size=RUNS[name].get("batch_size", ABOUT["batch_size"]),
        learning_rate=ABOUT["learning_rate"],
        lr_schedule="constant",
        adam_eps=ABOUT["adam_eps"],
        max_length=64,
        shuffle=False,
    )
    found = [one for record in RUNS[name]["records"] for one in samples(record)]
    is_kto = objective == "kto"
    size = 1 if is_kto else 2
    data = data_of(found, 64, group_size=size, is_recombined=is_kto)
    start = weights(name, "initial", folder, model)
    prepared = PreparedJob(
        settings=job,
        modules=resolve_targets(job, list(linear_shapes(model.config))),
        start=start,
        train_data=data,
        eval_data=None,
    )
    return JobState(prepared, start)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains jobs together: the model, the jobs, the slots, and each step."""

    @functools.cache
    def run(names: tuple[str, ...]):
        folder = tmp_path_factory.mktemp("golden")
        model = load_model(GOLDEN / "peft_run" / "base", dtype="float32")
        jobs = [job_state(name, folder, model) for name in names]
        slots, steps = train_together(model, jobs, capacity=512)
        return model, jobs, slots, steps, folder

    return run


@pytest.fixture
def trained(train, name):
    return train(ALWAYS if name in ALWAYS else OTHERS)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics_are_those_of_trl(trained, name):
    golden, ours = RUNS[name]["steps"], trained[3][name]
    losses = [step["loss"] for step in golden]
    assert [step.loss for step in ours] == pytest.approx(losses, rel=2e-5)
    assert len(ours) == (5 if "random" in name else 10)
    for step, outcome in zip(golden, ours, strict=True):
        found = dict(outcome.metrics)
        wanted = {k: step["metrics"][k] for k in found}
        assert found == pytest.approx(wanted, rel=2e-5, abs=2e-5)
        names = {"rewards/chosen", "accuracy", "kl"} & step["metrics"].keys()
        assert names <= outcome.metrics.keys()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_trl(trained, name):
    model, jobs, slots, _, folder = trained
    (job,) = (job for job in jobs if job.name == name)
    wanted, ours = (
        weights(name, "final", folder, model),
        slots.read(job.slot, job.start),
    )
    assert ours.modules.keys() == wanted.modules.keys()
    # Adam magnifies the rounding of gradients near zero, as large betas have them.
    bound = 5e-4 if "random" in name else 1e-4
    for module, found in ours.modules.items():
        assert relative_error(found.a, wanted.modules[module].a) < bound, module
        assert relative_error(found.b, wanted.modules[module].b) < bound, module
    if kind_of(name) == "reward":
        scores = (one.outside["score"].array for one in (ours, wanted))
        assert relative_error(*scores) < 1e-4
