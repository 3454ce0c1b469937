"""Jobs over HTTP train as `jaxlora train` does."""

import io
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy

import jaxlora
from jaxlora.run.log import read_events
from tests import tiny

BASE = {
    "rank": 4,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "max_length": 64,
    "seed": 3,
}
EVALUATED = {"eval_fraction": 0.25, "eval_every": 2}
# What is tested is in the names: objectives, and settings of modules and rates.
JOBS = {
    "sft": BASE | EVALUATED | {"epochs": 1.5, "data": "rows.jsonl"},
    "settings": BASE
    | {
        "data": "rows.jsonl",
        "steps": 3,
        "rank_pattern": {"q_proj": 2},
        "use_rslora": True,
        "layers_to_transform": [1],
        "lr_schedule": "linear",
        "lora_plus_ratio": 4,
        "learning_rate": 1e-2,
    },
    "dpo": BASE | EVALUATED | {"objective": "dpo", "data": "pairs.jsonl"},
    "simpo": BASE | {"objective": "simpo", "data": "pairs.jsonl"},
    "cpo": BASE | {"objective": "cpo", "data": "pairs.jsonl"},
    "orpo": BASE | EVALUATED | {"objective": "orpo", "data": "pairs.jsonl"},
    "kto": BASE | {"objective": "kto", "data": "pairs.jsonl"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with files of records."""
    folder = tmp_path_factory.mktemp("data")
    tiny.write_records(folder / "rows.jsonl", 24, seed=0)
    pairs = [
        {
            "prompt": "ab" * i,
            "chosen": "yes" * (1 + i % 4),
            "rejected": f"{'no' * (i % 5)}x",
        }
        for i in range(1, 17)
    ]
    tiny.write_jsonl(folder / "pairs.jsonl", pairs)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_model, model_folder, files, tmp_path_factory):
    """The folder of a run that has trained the jobs."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    jobs = [
        job | {"name": name, "data": {"path": str(files / job["data"])}}
        for name, job in JOBS.items()
    ]
    config = jaxlora.RunConfig(
        model=str(model_folder),
        output_dir=str(folder),
        jobs=jobs,
        block_tokens=16,
        microbatch_tokens=96,
    )
    jaxlora.Trainer(config, tiny_model).train()
    return folder


@pytest.fixture(scope="module")
def server(serve_in, files, tmp_path_factory):
    """A client of a server that has trained the jobs."""
    with serve_in(tmp_path_factory.mktemp("server")) as client:
        for path in files.iterdir():
            client.upload(path)
        for name, job in JOBS.items():
            client.add(**job | {"name": name, "data": {"path": job["data"]}})
        for name in JOBS:
            ended = client.wait(name)
            assert ended["status"] == "finished", ended["reason"]
        yield client


def archived(client, name, form="zip"):
    """Returns the files of a downloaded adapter, by name."""
    answer = client.get(f"/jobs/v1/jobs/{name}/adapter?format={form}")
    assert answer.is_success
    data = io.BytesIO(answer.content)
    if form == "zip":
        archive = zipfile.ZipFile(data)
        found = {n: archive.read(n) for n in archive.namelist()}
    else:
        with tarfile.open(fileobj=data) as archive:
            found = {m.name: archive.extractfile(m).read() for m in archive}
    assert {n.partition("/")[0] for n in found} == {name}
    return {n.partition("/")[2]: content for n, content in found.items()}


@pytest.mark.parametrize("name", JOBS)
def test_batches_rates_and_losses_are_those_of_a_run(server, trained, name):
    expected = read_events(trained / "metrics.jsonl")
    for kind in ("step", "eval"):
        theirs = [x for x in expected if (x["event"], x.get("job")) == (kind, name)]
        ours = server.metrics(name, kind)
        assert len(ours) == len(theirs)
        for found, wanted in zip(ours, theirs, strict=True):
            assert found.keys() == wanted.keys() - {"round"}
            for key in found.keys() - {"time", "is_best"}:
                value = wanted[key]
                if isinstance(value, float):
                    value = pytest.approx(value, rel=1e-3, abs=3e-5)
                assert found[key] == value, (kind, key)


@pytest.mark.parametrize("name", JOBS)
def test_the_adapter_is_that_of_a_run(server, trained, name):
    files = archived(server, name)
    own = safetensors.numpy.load(files["adapter_model.safetensors"])
    path = trained / "adapters" / name
    run = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    assert own.keys() == run.keys()
    for key in own:
        np.testing.assert_allclose(own[key], run[key], rtol=5e-3, atol=2e-5)
    assert {"README.md", "tokenizer.json"} <= files.keys()
    config = files["adapter_config.json"].decode()
    assert config == (path / "adapter_config.json").read_text()
    assert archived(server, name, "tar") == files
