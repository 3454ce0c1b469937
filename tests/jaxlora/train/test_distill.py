"""Jobs that learn from a teacher's log-probabilities.

The golden files are those of tests/golden/make_distill_runs.py, in float64; here the
weights are float32, and all jobs train together.
"""

import json

import numpy as np
import pytest

from jaxlora import LoraJob, load_model
from jaxlora.adapters.targets import resolve_targets
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens import dataset
from jaxlora.data.tokens.token_cache import TokenCache
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError, DataError
from jaxlora.models.structure import linear_shapes
from jaxlora.objectives.distill import DISTILL
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.train.job_state import JobState
from tests import tiny
from tests.jaxlora.train.golden_runs import (
    ALPHA,
    GOLDEN,
    RANK,
    TARGETS,
    read_weights,
    train_together,
)
from tests.jaxlora.train.runs import run_of, trained_tensors
from tests.jaxlora.train.test_contracts import assert_same_training
from tests.oracle import relative_error

FOLDER = GOLDEN / "distill_runs"
FILE = json.loads((FOLDER / "runs.json").read_text())
ABOUT, RUNS = FILE["about"], FILE["runs"]
JOB = {"objective": "distill", "rank": 4, "batch_size": 3, "learning_rate": 1e-2}
JOB |= {"target_modules": ["q_proj"], "steps": 4, "max_length": 64}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Trains all jobs together: the model, the jobs, the slots, and each step."""
    folder = tmp_path_factory.mktemp("golden")
    # All tokens of the golden records are those of this tokenizer, too.
    reader = DataReader(load_tokenizer(model.folder), None)
    model = load_model(GOLDEN / "peft_run" / "base", dtype="float32")
    jobs = []
    for name, run in RUNS.items():
        job = LoraJob(
            name=name,
            data={"path": tiny.write_jsonl(folder / f"{name}.jsonl", run["records"])},
            objective="distill",
            objective_args=run["settings"],
            rank=RANK,
            lora_alpha=ALPHA,
            target_modules=TARGETS,
            batch_size=ABOUT["batch_size"],
            learning_rate=ABOUT["learning_rate"],
            lr_schedule="constant",
            adam_eps=ABOUT["adam_eps"],
            max_length=64,
            shuffle=False,
        )
        start = read_weights(FOLDER / f"{name}.safetensors", "initial", folder, model)
        prepared = PreparedJob(
            settings=job,
            modules=resolve_targets(job, list(linear_shapes(model.config))),
            start=start,
            train_data=reader.read(job, "train"),
            eval_data=None,
        )
        jobs.append(JobState(prepared, start))
    return model, jobs, *train_together(model, jobs), folder


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_those_of_the_definition(trained, name):
    model, jobs, slots, steps, folder = trained
    losses = [step["loss"] for step in RUNS[name]["steps"]]
    assert [step.loss for step in steps[name]] == pytest.approx(losses, rel=2e-5)
    (job,) = (job for job in jobs if job.name == name)
    wanted = read_weights(FOLDER / f"{name}.safetensors", "final", folder, model)
    ours = slots.read(job.slot, job.start)
    for module, found in ours.modules.items():
        assert relative_error(found.a, wanted.modules[module].a) < 1e-4, module
        assert relative_error(found.b, wanted.modules[module].b) < 1e-4, module


def random_records(num: int, seed: int) -> list[dict]:
    """Records of the tiny model, some of which have labels."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(num):
        length, k = int(rng.integers(4, 60)), int(rng.integers(1, 9))
        prompt = int(rng.integers(1, length - 1))
        tops = [rng.choice(259, k, replace=False).tolist() for _ in range(length)]
        record = {
            "input_ids": rng.integers(0, 259, length).tolist(),
            "target_token_ids": [None] * prompt + tops[prompt:],
            "target_logprobs": [
                [] if t < prompt else (rng.normal(size=k) - 6).tolist()
                for t in range(length)
            ],
        }
        if i % 3 == 0:
            record["labels"] = [-100] * (length - 1) + record["input_ids"][-1:]
        records.append(record)
    return records


@pytest.fixture
def jobs(tmp_path) -> list[LoraJob]:
    """Two jobs with a teacher, and one without."""
    made = []
    for i, args in enumerate([{"temperature": 2.0}, {"kd_ce_alpha": 0.5}]):
        data = {
            "path": tiny.write_jsonl(tmp_path / f"{i}.jsonl", random_records(12, i))
        }
        job = JOB | {"objective_args": args, "eval_fraction": 0.2, "dropout": 0.1}
        made.append(LoraJob(name=f"kd{i}", data=data, seed=i, **job))
    plain = tiny.write_records(tmp_path / "plain.jsonl", 12, seed=3)
    job = JOB | {"objective": "next_token"}
    return [*made, LoraJob(name="plain", data={"path": plain}, **job)]


def test_each_job_trains_as_if_it_were_alone(train, jobs):
    slots = {"slot_targets": JOB["target_modules"], "max_concurrent_jobs": 3}
    together = train(jobs, **slots)
    assert together.losses["kd0"][0] != together.losses["kd1"][0]
    assert together.losses["plain"][0] > np.log(100)  # of its own tokens
    # The other job ends after its first step, and is there for the programs.
    alone = train([jobs[2].replace(steps=1), jobs[0]], **slots)
    assert_same_training(together, alone, ["kd0"])


@pytest.mark.grid
@pytest.mark.needs_devices(4)
def test_layouts_and_resuming(jobs, model, tmp_path):
    """Replicas whose devices share the vocabulary; and the same bits on resume."""
    found = {}
    for mesh, stop in (("data=1", False), ("tensor=2,data=2", False), ("data=1", True)):
        out = tmp_path / f"{mesh}-{stop}"
        config = run_of(
            model,
            out,
            jobs,
            mesh=mesh,
            microbatch_tokens=128,
            block_tokens=16,
            dtype="float32",
            checkpoint_every=1,
            window_steps=1,
        )
        found[mesh, stop] = trained_tensors(config, stop=stop)
    one, divided, resumed = found.values()
    assert one.keys() == divided.keys() == {"kd0", "kd1", "plain"}
    for name, wanted in one.items():
        for key, array in wanted.items():
            np.testing.assert_array_equal(resumed[name][key], array)
            assert relative_error(divided[name][key], array) < 1e-4


def test_what_is_stored_is_what_the_records_say(tmp_path, model, monkeypatch):
    """Long records are cut; so they are from the cache, and in a file on disk."""
    monkeypatch.setattr(dataset, "TOKENS_IN_MEMORY", 4)
    records = random_records(8, seed=5)
    path = tiny.write_jsonl(tmp_path / "data.jsonl", records)
    job = LoraJob(name="a", data={"path": path}, **JOB | {"max_length": 30})
    cache = TokenCache(tmp_path / "cache")
    tokenizer = load_tokenizer(model.folder)
    prints = set()
    for reader in (DataReader(tokenizer, cache), DataReader(tokenizer, cache)):
        data = reader.read(job, "train")
        prints.add(data.fingerprint)
        kept = [r for r in records if r["target_token_ids"][1:30] != [None] * 29]
        shown = [r for r in kept if "labels" not in r or len(r["input_ids"]) <= 30]
        assert len(data.samples) == len(shown)
        for sample, record in zip(data.samples, shown, strict=True):
            assert sample.token_ids.tolist() == record["input_ids"][:30]
            targets = np.flatnonzero(sample.is_target)
            if "labels" in record:
                assert targets.tolist() == [len(record["input_ids"]) - 1]
            assert len(sample.top.ids) == len(targets)
            for t, ids, logprobs in zip(targets, *sample.top, strict=True):
                wanted = record["target_token_ids"][t], record["target_logprobs"][t]
                assert ids.tolist() == wanted[0]
                np.testing.assert_allclose(logprobs, wanted[1], rtol=1e-6)
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [1, 999]}, "'input_ids' has token 999, and the tokenizer has"),
        ({"input_ids": "abc"}, "Write a list of tokens"),
        ({"target_token_ids": [None, [5, -1]]}, "Write a list of tokens"),
        ({"target_logprobs": [None]}, "has 1 items, and there are 2 tokens"),
        ({"target_logprobs": [None, [-1.0]]}, "has 1 numbers, and there are 2 tokens"),
        ({"target_logprobs": [None, [-1.0, 0.7]]}, "Give natural logarithms"),
        ({"target_token_ids": [None, [5, 5]]}, "has a token twice"),
        ({"labels": [1]}, "'labels' has 1 items"),
        (
            {
                "target_token_ids": [None, list(range(65))],
                "target_logprobs": [None, [-5.0] * 65],
            },
            "has 65 log-probabilities, and at most 64 are read",
        ),
    ],
)
def test_records_that_are_refused(tmp_path, model, changes, message):
    record = {"input_ids": [1, 2], "target_token_ids": [None, [3, 4]]}
    record |= {"target_logprobs": [None, [-1.0, -2.0]]} | changes
    job = LoraJob(
        name="a", data={"path": tiny.write_jsonl(tmp_path / "x.jsonl", [record])}, **JOB
    )
    with pytest.raises(DataError, match=message):
        DataReader(load_tokenizer(model.folder), None).read(job, "train")


def test_settings_that_are_refused(tmp_path, model):
    reader = DataReader(load_tokenizer(model.folder), None)
    path = tiny.write_jsonl(tmp_path / "data.jsonl", random_records(2, seed=1))
    for data, message in (
        ({"chat": True}, "chat says how text becomes tokens"),
        ({"loss_on": "all"}, "loss_on says how text becomes tokens"),
        ({"kind": "messages"}, "does not learn from records of the kind messages"),
    ):
        with pytest.raises(DataError, match=message):
            reader.read(LoraJob(name="a", data={"path": path, **data}, **JOB), "train")
    job = LoraJob(name="a", data={"path": path, "kind": "distill"}, **JOB)
    with pytest.raises(DataError, match="next_token, which does not learn from"):
        reader.read(job.replace(objective="next_token"), "train")
    for args, message in (
        ({"kd_ce_alpha": 1.0, "temperature": 2.0}, "needs a temperature of 1"),
        ({"kd_alpha": 0.0}, "so nothing is learned"),
        ({"temperature": 0.0}, "temperature: must be greater than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            DISTILL.settings_of(args)
