"""Converts checkpoint folders to another dtype."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxlora.errors import ModelError
from jaxlora.hf.convert import convert
from jaxlora.hf.tensor_file import TensorFile
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.test_load import assert_params_equal


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype(folder, tmp_path, dtype):
    out = convert(folder, tmp_path / "out", dtype=dtype)
    kind = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(dtype, np.dtype(np.float32))
    file = TensorFile(out / "model.safetensors")
    assert {file.array(name).dtype for name in file.names()} == {kind}
    weights = {k: v.astype(kind) for k, v in tiny.random_weights().items()}
    base = load_model(out, dtype=dtype)
    assert_params_equal(base, weights)
    assert base.config == load_model(folder).config
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_the_dtype_of_transformers_5_is_replaced(rewrite, tmp_path):
    out = convert(rewrite(dtype="float32"), tmp_path / "out", dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert "dtype" not in config
    assert config["torch_dtype"] == "bfloat16"


def test_shards_become_one_file(folder, shard, tmp_path):
    shard()
    out = convert(folder, tmp_path / "out", dtype="float32")
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert_params_equal(load_model(out), tiny.random_weights())


def test_an_incomplete_checkpoint_is_refused(rewrite, tmp_path):
    weights = tiny.random_weights()
    del weights["model.norm.weight"]
    source = rewrite(weights)
    with pytest.raises(ModelError, match=r"lacks model\.norm\.weight"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_dtype(folder, tmp_path):
    with pytest.raises(ModelError, match="dtype='int8' is unknown; there is: bfloat16"):
        convert(folder, tmp_path / "out", dtype="int8")
