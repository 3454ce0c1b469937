"""Merged checkpoints: `W + scaling * (A B)`, and the rest as it was."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.errors import AdapterError, ConfigError, ModelError
from jaxlora.hf.tensor_file import TensorFile
from tests import tiny
from tests.jaxlora.hf.loading import load_model

BF16 = np.dtype(ml_dtypes.bfloat16)


def read(folder):
    file = TensorFile(folder / "model.safetensors")
    return {name: file.array(name) for name in file.names()}


def merged_by_hand(weights, adapter):
    """In float64, by hand: B A as PEFT keeps them, times alpha over r."""
    out = {name: array.astype(np.float64) for name, array in weights.items()}
    for name, lora in adapter.modules.items():
        divisor = np.sqrt(lora.rank) if adapter.use_rslora else lora.rank
        update = lora.b.T.astype(np.float64) @ lora.a.T.astype(np.float64)
        out[f"{name}.weight"] += lora.lora_alpha / divisor * update
    return out


@pytest.mark.parametrize("use_rslora", [False, True])
def test_weights_in_float32(folder, tmp_path, make_adapter, export, use_rslora):
    adapter = make_adapter(rank=lambda name: 2 + ("0" in name), use_rslora=use_rslora)
    out = merge_adapter(folder, export(adapter), tmp_path / "out")
    weights, found = tiny.random_weights(), read(out)
    wanted = merged_by_hand(weights, adapter)
    assert list(found) == list(read(folder))
    for name, array in found.items():
        assert array.dtype == np.float32
        if name.removesuffix(".weight") in adapter.modules:
            np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-5)
            assert not np.allclose(array, weights[name])
        else:
            np.testing.assert_array_equal(array, weights[name])


def test_weights_in_bfloat16_are_rounded_once(
    folder, rewrite, tmp_path, make_adapter, export
):
    weights = {k: v.astype(BF16) for k, v in tiny.random_weights().items()}
    adapter = make_adapter(lora_alpha=0.5)
    out = merge_adapter(rewrite(weights), export(adapter), tmp_path / "out")
    wanted = merged_by_hand(weights, adapter)
    for name, array in read(out).items():
        assert array.dtype == BF16
        if name.removesuffix(".weight") not in adapter.modules:
            np.testing.assert_array_equal(array, weights[name])
            continue
        # Half a unit in the last of bfloat16's 8 digits, and float32's own rounding.
        error = np.abs(array.astype(np.float64) - wanted[name])
        assert np.all(error <= 2.0**-8 * np.abs(wanted[name]) + 1e-6)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("bfloat16", BF16), ("float16", np.float16), ("float32", np.float32)],
)
def test_dtype(folder, rewrite, tmp_path, make_adapter, export, dtype, kind):
    rewrite(dtype="float32")
    adapter = make_adapter()
    out = merge_adapter(folder, export(adapter), tmp_path / "out", dtype=dtype)
    for name, array in read(out).items():
        assert array.dtype == kind
        if name.removesuffix(".weight") not in adapter.modules:
            wanted = tiny.random_weights()[name].astype(kind)
            np.testing.assert_array_equal(array, wanted)
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == dtype
    assert "dtype" not in config


def test_the_folder_is_a_whole_checkpoint(folder, tmp_path, make_adapter, export):
    out = merge_adapter(folder, export(make_adapter()), tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        new, old = (json.loads((f / name).read_text()) for f in (out, folder))
        assert new == old
    merged, base = load_model(out), load_model(folder)
    assert merged.config == base.config
    assert merged.fingerprint != base.fingerprint


def test_a_sharded_base(folder, shard, tmp_path, make_adapter, export):
    adapter = export(make_adapter())
    whole = read(merge_adapter(folder, adapter, tmp_path / "whole"))
    shard()
    out = read(merge_adapter(folder, adapter, tmp_path / "out"))
    assert out.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(out[name], array)


def test_a_full_folder_is_refused(folder, make_adapter, export):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        merge_adapter(folder, export(make_adapter()), folder)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        (
            {"intermediate_size": 64},
            {},
            AdapterError,
            r"down_proj\.lora_A\.weight has",
        ),
        ({"weights": {}}, {}, ModelError, r"model\.layers\.N.*fetch the missing files"),
        ({}, {"dtype": "float8"}, ConfigError, "'float8'; wanted one of bfloat16, flo"),
    ],
)
def test_what_is_refused(
    folder, rewrite, tmp_path, make_adapter, export, change, options, error, match
):
    """And nothing is written."""
    adapter = export(make_adapter())
    with pytest.raises(error, match=match):
        merge_adapter(rewrite(**change), adapter, tmp_path / "out", **options)
    with pytest.raises(ModelError, match="no: there is no such folder"):
        merge_adapter(tmp_path / "no", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
