"""Revisions of models from the hub: the one that is read, and its record in exports."""

import json
import logging

import huggingface_hub.constants
import numpy as np
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.cli.main import main
from jaxlora.errors import ModelError
from jaxlora.hf.files import model_folder
from jaxlora.train.saved.export import export_checkpoint
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.train.runs import AtWindow

OLD, NEW = "a" * 40, "b" * 40
NORM = "model.norm.weight"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Makes a cache of the hub with two commits of nobody/tiny, without a network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    repo = cache / "models--nobody--tiny"
    (repo / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate({"v1": OLD, "main": NEW}.items()):
        tiny.write_model(repo / "snapshots" / commit, seed=seed)
        (repo / "refs" / name).write_text(commit)
    return repo


def norm(folder):
    return np.asarray(load_model(folder).params["norm.scale"])


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("asked", "commit", "seed"), [(None, NEW, 1), ("v1", OLD, 0), (OLD, OLD, 0)]
)
def test_a_base_knows_its_commit(hub, asked, commit, seed):
    base = load_model("nobody/tiny", revision=asked)
    assert base.revision == commit
    assert base.source == "nobody/tiny"
    wanted = tiny.random_weights(seed)[NORM]
    np.testing.assert_array_equal(np.asarray(base.params["norm.scale"]), wanted)


def test_a_folder_has_no_revision(folder, hub, caplog):
    assert load_model(folder).revision is None
    assert load_model(hub / "snapshots" / OLD).revision is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert load_model(folder, revision="v1").revision is None
    (record,) = caplog.records
    assert "revision 'v1' has no effect" in record.message


def test_commands(hub, tmp_path, make_adapter, export, capsys):
    adapter = str(export(make_adapter()))
    wanted = tiny.random_weights(0)[NORM]
    revision = ["--revision", "v1"]
    arguments = ["nobody/tiny", adapter, str(tmp_path / "merged")]
    assert main(["merge", *arguments, *revision]) == 0
    np.testing.assert_array_equal(norm(tmp_path / "merged"), wanted)
    arguments = ["nobody/tiny", str(tmp_path / "out"), "--dtype", "float32"]
    assert main(["convert", *arguments, *revision]) == 0
    np.testing.assert_array_equal(norm(tmp_path / "out"), wanted)
    capsys.readouterr()
    assert main(["inspect", "nobody/tiny", *revision]) == 0
    assert OLD in capsys.readouterr().out
    assert main(["inspect", "nobody/tiny", "--revision", "v2"]) == 1
    assert "nobody/tiny is not a folder here, it is not" in capsys.readouterr().err


class Enough(Exception):
    """Ends a run between two checkpoints."""


def test_exports_name_the_commit(hub, tmp_path):
    def job(name, steps):
        return {
            "name": name,
            "data": {"path": tiny.write_records(tmp_path / f"{name}.jsonl", 8, 0)},
            "target_modules": ["q_proj"],
            "rank": 2,
            "max_length": 96,
            "steps": steps,
        }

    config = RunConfig(
        model="nobody/tiny",
        revision="v1",
        output_dir=str(tmp_path / "run"),
        microbatch_tokens=256,
        block_tokens=16,
        jobs=[job("short", 1), job("long", 3)],
        checkpoint_every=1,
        window_steps=1,
    )
    rounds = []

    def stop(trainer):
        rounds.append(trainer)
        if len(rounds) == 2:
            raise Enough

    with pytest.raises(Enough):
        Trainer(config).train(callbacks=[AtWindow(stop)])
    exported = export_checkpoint(tmp_path / "run", tmp_path / "out").folders
    assert len(exported) == 2
    for folder in (tmp_path / "run" / "adapters" / "short", *exported):
        written = config_of(folder)
        assert written["base_model_name_or_path"] == "nobody/tiny"
        assert written["revision"] == OLD


def test_a_hub_cache_that_cannot_be_read(hub, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    folder = hub / "snapshots" / NEW
    monkeypatch.setattr(type(folder), "is_dir", refuse)
    with pytest.raises(ModelError, match=r"cannot be read: Permission denied\. Check"):
        model_folder("nobody/tiny")
