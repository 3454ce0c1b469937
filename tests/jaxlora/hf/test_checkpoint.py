"""Untied heads, bounds on the number of layers, and weights that are not finite."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.config import RunConfig
from jaxlora.errors import ModelError
from jaxlora.hf.checkpoint import open_checkpoint, planned_checkpoint
from jaxlora.hf.convert import convert
from jaxlora.plan.job.planned_model import planned_model
from tests import tiny
from tests.jaxlora.hf.loading import load_model

BF16 = np.dtype(ml_dtypes.bfloat16)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def own_head(rewrite):
    """Makes a checkpoint whose config says tied, and whose head differs."""
    weights = tiny.random_weights()
    head = weights[EMBEDDING].copy()
    head[287, 31] += 1
    return rewrite({**weights, HEAD: head}), head


def read(folder, name):
    return safetensors.numpy.load_file(folder / "model.safetensors")[name]


def test_an_own_head_is_used_with_a_warning(own_head, caplog):
    folder, head = own_head
    with caplog.at_level(logging.WARNING):
        base = load_model(folder)
    (record,) = caplog.records
    assert "lm_head.weight that differs from the embedding: it is us" in record.message
    assert not base.config.tie_embeddings
    np.testing.assert_array_equal(np.asarray(base.params["lm_head.kernel"]), head.T)
    caplog.clear()
    tied = load_model(tiny.write_model(folder.parent / "tied"))
    assert not caplog.records
    assert tied.fingerprint != base.fingerprint
    assert "lm_head.kernel" not in tied.params


@pytest.mark.parametrize("stored", [np.float32, BF16])
def test_a_head_that_equals_the_embedding_stays_tied(rewrite, stored, caplog):
    weights = tiny.random_weights()
    weights[EMBEDDING] = weights[EMBEDDING].astype(BF16).astype(np.float32)
    folder = rewrite({**weights, HEAD: weights[EMBEDDING].astype(stored)})
    base = load_model(folder)
    assert base.config.tie_embeddings and "lm_head.kernel" not in base.params
    assert planned_checkpoint(folder).config == base.config
    assert not caplog.records


def test_an_own_head_is_counted_before_weights_are_loaded(own_head, folder, caplog):
    caplog.clear()
    data = {"path": tiny.write_records(folder.parent / "records.jsonl", 2, 0)}
    jobs = [{"name": "a", "data": data, "steps": 1}]
    run = RunConfig(model=str(folder), output_dir="out", jobs=jobs)
    assert not planned_model(run, folder).config.tie_embeddings
    # The files are opened once, and their heads are compared once.
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert not planned_checkpoint(folder).config.tie_embeddings
    assert HEAD in {spec.hf_name for spec in open_checkpoint(folder).specs()}


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_plan_needs_no_weights(own_head, folder, damage):
    path = folder / "model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert planned_checkpoint(folder).config.tie_embeddings


def test_an_own_head_is_merged_and_converted(
    own_head, tmp_path, make_adapter, export, caplog
):
    folder, head = own_head
    merged = merge_adapter(folder, export(make_adapter()), tmp_path / "merged")
    converted = convert(folder, tmp_path / "converted", dtype="float32")
    caplog.clear()
    for out in (merged, converted):
        np.testing.assert_array_equal(read(out, HEAD), head)
        config = json.loads((out / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
        np.testing.assert_array_equal(
            np.asarray(load_model(out).params["lm_head.kernel"]), head.T
        )
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "stored", "message"),
    [
        (np.nan, np.float32, "holds NaN, so nothing can be computed with it"),
        (-np.inf, np.float16, "holds infinity, so nothing can be computed with it"),
        (1e300, np.float64, r"holds .* 1e\+300, which overflows float32"),
    ],
)
def test_weights_that_are_not_finite(rewrite, tmp_path, value, stored, message):
    """Further dtypes: see test_parallel_load.py and test_magnitude.py."""
    weights = tiny.random_weights()
    weights[NORM] = weights[NORM].astype(stored)
    weights[NORM][17] = value
    folder, match = rewrite(weights), rf"model\.safetensors: {NORM} {message}"
    with pytest.raises(ModelError, match=match):
        load_model(folder)
    with pytest.raises(ModelError, match=match):
        convert(folder, tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


def test_a_merge_that_overflows(folder, tmp_path, make_adapter, export):
    adapter = export(make_adapter(lora_alpha=1e6))
    match = r"_proj\.weight, merged, holds a value of .* overflows float16\. Choose"
    with pytest.raises(ModelError, match=match):
        merge_adapter(folder, adapter, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    merge_adapter(folder, adapter, tmp_path / "out", dtype="bfloat16")


def test_the_fingerprint_is_of_every_byte(folder, rewrite):
    weights = tiny.random_weights(config={**tiny.CONFIG, "vocab_size": 1000})
    rewrite(weights, vocab_size=1000)
    first = load_model(folder).fingerprint
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for position in rng.integers(len(content) // 2, len(content), 5):
        content[position - position % 4] ^= 1  # the last bit of a float
        path.write_bytes(content)
        assert load_model(folder).fingerprint != first
        content[position - position % 4] ^= 1
    path.write_bytes(content)
    assert load_model(folder).fingerprint == first
