"""Writes checkpoints and reads them back."""

import json

import numpy as np
import pytest

from jaxlora.hf.convert import save_checkpoint
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.test_load import assert_params_equal


def save(out, weights=None, **options):
    weights = tiny.random_weights() if weights is None else weights
    return save_checkpoint(out, weights.items(), tiny.CONFIG, **options)


def test_one_file(tmp_path, folder):
    extra = [folder / "tokenizer.json"]
    out = save(tmp_path / "out", extra_files=extra)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert json.loads((out / "config.json").read_text()) == tiny.CONFIG
    assert (out / "tokenizer.json").read_bytes() == extra[0].read_bytes()
    base = load_model(out)
    assert_params_equal(base, tiny.random_weights())
    assert base.fingerprint == load_model(folder).fingerprint


def test_shards(tmp_path):
    out = save(tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    weights = tiny.random_weights()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert list(index["weight_map"]) == list(weights)
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 2
    assert files == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    assert {path.name for path in out.glob("*.safetensors")} == set(files)
    assert_params_equal(load_model(out), weights)
    # A tensor larger than a shard has one to itself.
    embedding = index["weight_map"]["model.embed_tokens.weight"]
    assert list(index["weight_map"].values()).count(embedding) == 1


def test_views_are_written_as_they_read(tmp_path):
    weights = {n: np.asfortranarray(w) for n, w in tiny.random_weights().items()}
    out = save(tmp_path / "out", weights)
    assert_params_equal(load_model(out), tiny.random_weights())


def test_a_full_folder_is_refused(tmp_path, folder):
    before = sorted(folder.iterdir())
    with pytest.raises(FileExistsError, match=r"exists already. Remove it, or choose"):
        save(folder)
    assert sorted(folder.iterdir()) == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert_params_equal(load_model(save(tmp_path / "out")), tiny.random_weights())


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 5_000}])
def test_a_failure_leaves_nothing(tmp_path, options):
    def tensors():
        yield from list(tiny.random_weights().items())[:5]
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        save_checkpoint(tmp_path / "out", tensors(), tiny.CONFIG, **options)
    assert not list(tmp_path.iterdir())


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    out = save(tmp_path / "out", max_shard_bytes=20_000)
    assert {f.stat().st_mode for f in out.iterdir()} == {plain.stat().st_mode}
