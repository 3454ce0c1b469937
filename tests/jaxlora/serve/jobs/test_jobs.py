"""Jobs over HTTP train as `jaxlora train` does."""

import io
import zipfile

import numpy as np
import pytest
import safetensors.numpy

import jaxlora
from jaxlora.run.log import read_events
from tests import tiny

JOB = {
    "rank": 4,
    "batch_size": 4,
    "epochs": 1.5,
    "learning_rate": 3e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "max_length": 64,
    "eval_fraction": 0.25,
    "eval_every": 3,
    "seed": 3,
}


@pytest.fixture(scope="session")
def trained(tiny_model, model_folder, tmp_path_factory):
    """Trains jobs by a run; returns its folder and result."""
    folder = tmp_path_factory.mktemp("trained")

    def train(path, job):
        config = jaxlora.RunConfig(
            model=str(model_folder),
            output_dir=str(folder / job["name"]),
            jobs=[job | {"data": {"path": str(path)}}],
            block_tokens=16,
            microbatch_tokens=96,
        )
        jaxlora.Trainer(config, tiny_model).train()
        return folder / job["name"]

    return train


def weights(data):
    return safetensors.numpy.load(data)


def downloaded(client, name):
    answer = client.get(f"/jobs/v1/jobs/{name}/adapter")
    assert answer.is_success
    archive = zipfile.ZipFile(io.BytesIO(answer.content))
    return {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}


def test_a_job_makes_the_adapter_of_a_run(client, records, trained):
    """With the same batches, rates and losses, as far as rounding allows."""
    client.upload(records)
    job = JOB | {"name": "one"}
    made = client.add(**job, data={"path": "rows.jsonl"})
    assert made["num_steps"] == 8
    ended = client.wait("one")
    assert (ended["status"], ended["step"]) == ("finished", 8), ended
    folder = trained(records, job)
    expected = read_events(folder / "metrics.jsonl")
    for kind, key in (("step", "loss"), ("eval", "eval_loss")):
        theirs = [line for line in expected if line["event"] == kind]
        ours = client.metrics("one", kind)
        assert [x["step"] for x in ours] == [x["step"] for x in theirs]
        for name in (key, *(("learning_rate", "grad_norm") if kind == "step" else ())):
            found, wanted = ([x[name] for x in one] for one in (ours, theirs))
            np.testing.assert_allclose(found, wanted, rtol=2e-5)
    files = downloaded(client, "one")
    own = weights(files["adapter_model.safetensors"])
    run = weights((folder / "adapters/one/adapter_model.safetensors").read_bytes())
    assert own.keys() == run.keys()
    for name in own:
        np.testing.assert_allclose(own[name], run[name], rtol=2e-3, atol=2e-6)
    assert {"README.md", "tokenizer.json", "adapter_config.json"} <= files.keys()


PAIRS = JOB | {"eval_every": 2, "epochs": 1, "objective": "dpo"}
KTO = PAIRS | {"objective": "kto", "eval_fraction": 0.0, "eval_every": None}


@pytest.mark.parametrize("job", [PAIRS, KTO], ids=["dpo", "kto"])
def test_losses_of_several_positions_are_those_of_a_run(client, tmp_path, trained, job):
    """Their gradients come from log-probabilities of a forward pass."""
    path = tmp_path / "pairs.jsonl"
    pairs = [
        {"prompt": "ab" * i, "chosen": "yes" * (1 + i % 4), "rejected": "no" * (i % 5)}
        for i in range(1, 17)
    ]
    tiny.write_jsonl(
        path, [{**one, "rejected": one["rejected"] + "x"} for one in pairs]
    )
    client.upload(path)
    job = job | {"name": job["objective"]}
    client.add(**job, data={"path": "pairs.jsonl"})
    ended = client.wait(job["name"])
    assert ended["status"] == "finished", ended
    expected = read_events(trained(path, job) / "metrics.jsonl")
    for kind in ("step", "eval"):
        theirs = [line for line in expected if line["event"] == kind]
        ours = client.metrics(job["name"], kind)
        assert len(ours) == len(theirs)
        for found, wanted in zip(ours, theirs, strict=True):
            assert found.keys() == wanted.keys()
            for key in wanted.keys() - {"event", "job", "time", "round", "is_best"}:
                wanted_value = pytest.approx(wanted[key], rel=1e-3, abs=3e-5)
                assert found[key] == wanted_value, (kind, key)
