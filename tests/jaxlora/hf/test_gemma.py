"""Gemma checkpoints in and out: exact names of tensors, and weights as they were."""

import json
import pathlib

import numpy as np
import pytest

from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.hf.convert import convert
from jaxlora.hf.load import load_model
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.structure import linear_shapes

MODELS = pathlib.Path(__file__).parents[2] / "golden" / "models"


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    file = TensorFile(folder / "model.safetensors")
    return {name: file.array(name) for name in file.names()}


def adapter_for(model) -> Adapter:
    rng = np.random.default_rng(0)
    modules = {}
    for name, (k, n) in linear_shapes(model.config).items():
        if name.endswith(("q_proj", "down_proj")):
            a, b = (rng.normal(size=s).astype(np.float32) for s in ((k, 2), (2, n)))
            tensors = {"lora_a": a, "lora_b": b}
            modules[name] = LoraWeights(tensors=tensors, rank=2, lora_alpha=1.0)
    return Adapter(modules=modules)


@pytest.fixture(params=["gemma2", "gemma3_v4", "gemma3_v5"])
def folder(request) -> pathlib.Path:
    return MODELS / request.param


def test_a_converted_copy_holds_the_same_tensors(folder, tmp_path):
    out = convert(folder, tmp_path / "out", dtype="float32")
    wanted, found = read(folder), read(out)
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, out)
    )
    before.pop("dtype", None)
    assert after == {**before, "torch_dtype": "float32"}


def test_the_four_norms_are_loaded_as_they_are_stored(folder):
    """The 1 of `1 + weight` is added when a norm is computed, not when it is loaded."""
    stored, params = read(folder), load_model(folder, dtype="float32").params
    for ours, theirs in {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }.items():
        wanted = stored[f"model.layers.1.{theirs}.weight"]
        np.testing.assert_array_equal(params[f"layers.1.{ours}.scale"], wanted)


def test_an_adapter_merges_and_all_else_is_copied(folder, tmp_path):
    model = load_model(folder, dtype="float32")
    adapter, names = adapter_for(model), list(linear_shapes(model.config))
    export_peft(adapter, tmp_path / "a", base_model="b", linear_names=names)
    merged = read(merge_adapter(folder, tmp_path / "a", tmp_path / "out"))
    stored = read(folder)
    assert list(merged) == list(stored)
    for name, array in stored.items():
        weights = adapter.modules.get(name.removesuffix(".weight"))
        if weights is None:
            np.testing.assert_array_equal(merged[name], array)
        else:
            wanted = array + 0.5 * (weights.a @ weights.b).T
            np.testing.assert_allclose(merged[name], wanted, rtol=1e-5, atol=1e-5)


def test_an_adapter_has_the_names_of_peft(folder, tmp_path):
    model = load_model(folder, dtype="float32")
    adapter, names = adapter_for(model), list(linear_shapes(model.config))
    out = export_peft(adapter, tmp_path / "a", base_model="b", linear_names=names)
    file = TensorFile(out / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"} <= set(file.names())
    config = json.loads((out / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    again = import_peft(out, linear_shapes(model.config))
    assert again.modules.keys() == adapter.modules.keys()
    for name, weights in adapter.modules.items():
        np.testing.assert_array_equal(again.modules[name].a, weights.a)
        np.testing.assert_array_equal(again.modules[name].b, weights.b)
