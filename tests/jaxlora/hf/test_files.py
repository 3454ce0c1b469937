"""The files of a checkpoint, and the requests to the hub."""

import fnmatch
import shutil
import unittest.mock

import huggingface_hub
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import errors as hub_errors

from jaxlora.errors import ModelError
from jaxlora.hf.files import model_folder, safetensor_files
from tests import tiny


def test_one_file_counts_more_than_an_index(folder, shard):
    index = shard()
    single = folder / "model.safetensors"
    safetensors.numpy.save_file({"new": np.zeros(2, np.float32)}, single)
    assert {n: f.path for n, f in safetensor_files(folder).items()} == {"new": single}
    single.unlink()
    assert set(safetensor_files(folder)) == set(tiny.random_weights())
    assert index.is_file()


@pytest.fixture
def hub(monkeypatch, folder, tmp_path):
    """Replaces the hub by one repository; a request raises `error` if it is set."""

    class Hub:
        error: Exception | None = None
        asked: list[tuple] = []
        files = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "adapter_model.safetensors",
            "original/model.safetensors",
            "onnx/config.json",
            "pytorch_model.bin",
            "README.md",
        ]
        fetched: list[str] = []

    def download(repo_id, *, revision, allow_patterns, ignore_patterns):
        Hub.asked = [*Hub.asked, (repo_id, revision)]
        if Hub.error is not None:
            raise Hub.error

        def matches(file, patterns):
            return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

        Hub.fetched = [
            file
            for file in Hub.files
            if matches(file, allow_patterns) and not matches(file, ignore_patterns)
        ]
        return str(shutil.copytree(folder, tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return Hub


def test_only_what_is_read_is_fetched(hub, tmp_path):
    assert model_folder("nobody/tiny", "v1") == tmp_path / "snapshot"
    assert hub.asked == [("nobody/tiny", "v1")]
    assert hub.fetched == hub.files[:7]


def test_a_folder_is_not_looked_up(hub, folder):
    assert model_folder(folder) == folder
    assert model_folder(str(folder)) == folder
    assert not hub.asked


def http(kind):
    return kind("404 of the test", response=unittest.mock.Mock(headers={}))


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (
            http(hub_errors.GatedRepoError),
            "is gated: accept its licence on the hub",
        ),
        (http(hub_errors.RepositoryNotFoundError), "neither a folder here nor a model"),
        (
            http(hub_errors.RevisionNotFoundError),
            "has no revision 'v1' on the hub. G",
        ),
        (http(hub_errors.HfHubHTTPError), "cannot be fetched from the hub: 404 of the"),
        (hub_errors.LocalEntryNotFoundError("no"), "is not complete in the cache"),
        (hub_errors.HTTPError("broke"), "cannot be fetched from the hub: broke"),
        (OSError("disk full"), "cannot be fetched from the hub: disk full"),
    ],
)
def test_what_does_not_come_from_the_hub(hub, error, match):
    hub.error = error
    with pytest.raises(ModelError, match=f"nobody/tiny .*{match}"):
        model_folder("nobody/tiny", "v1")


def test_a_fetched_folder_without_config(hub, folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_folder("nobody/tiny")
