"""A text model that is one part of another, whose other parts are kept."""

import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.adapter import Adapter, LoraWeights, OutsideWeights
from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.hf.convert import convert
from jaxlora.hf.load import load_model
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.structure import linear_names, linear_shapes

BASE = pathlib.Path(__file__).parents[2] / "golden" / "models" / "mistral3"
NAME = "model.language_model.layers.1.mlp.down_proj"


def read(folder, file="model.safetensors"):
    found = TensorFile(folder / file)
    return {name: found.array(name) for name in found.names()}


@pytest.fixture
def exported(tmp_path) -> pathlib.Path:
    """An adapter of one linear and of one row of the embedding."""
    config, rng = open_checkpoint(BASE).config, np.random.default_rng(0)
    k, n = linear_shapes(config)[NAME]
    tensors = {"lora_a": rng.normal(size=(k, 2)), "lora_b": rng.normal(size=(2, n))}
    row = rng.normal(size=(1, config.hidden_size)).astype(np.float32)
    adapter = Adapter(
        modules={
            NAME: LoraWeights(
                tensors={key: x.astype(np.float32) for key, x in tensors.items()},
                rank=2,
                lora_alpha=2.0,
            )
        },
        outside={"token_rows": OutsideWeights(row, tokens=(5,))},
    )
    return export_peft(
        adapter,
        tmp_path / "adapter",
        base_model=str(BASE),
        linear_names=linear_names(config),
    )


@pytest.mark.parametrize(
    ("case", "others", "own"), [("mistral3", 15, 21), ("gemma3_images", 23, 41)]
)
def test_other_parts_are_skipped_and_said(case, others, own, caplog):
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(BASE.parent / case)
    assert f"not read: {others} tensors of other parts (multi_modal_" in caplog.text
    checkpoint.check()
    assert len(checkpoint.files) == own


def test_names_in_a_peft_folder(exported):
    names = read(exported, "adapter_model.safetensors")
    text = "base_model.model.model.language_model"
    assert set(names) == {
        f"{text}.layers.1.mlp.down_proj.lora_A.weight",
        f"{text}.layers.1.mlp.down_proj.lora_B.weight",
        f"{text}.embed_tokens.token_adapter.trainable_tokens_delta",
    }
    settings = json.loads((exported / "adapter_config.json").read_text())
    assert settings["target_modules"] == [NAME]  # other parts have a down_proj, too
    adapter = import_peft(exported, linear_shapes(open_checkpoint(BASE).config))
    assert list(adapter.modules) == [NAME]
    assert adapter.outside["token_rows"].tokens == (5,)


def test_a_merged_model_has_all_parts(exported, tmp_path):
    merged = merge_adapter(BASE, exported, tmp_path / "merged")
    before, after = read(BASE), read(merged)
    changed = {
        name for name, x in before.items() if not np.array_equal(x, after.get(name))
    }
    down = "language_model.model.layers.1.mlp.down_proj.weight"
    assert changed == {down, "language_model.model.embed_tokens.weight"}
    assert json.loads((merged / "config.json").read_text()) == json.loads(
        (BASE / "config.json").read_text()
    )
    open_checkpoint(merged).check()


def test_a_converted_model_has_all_parts(tmp_path):
    folder = convert(BASE, tmp_path / "out", dtype="bfloat16")
    assert set(read(folder)) == set(read(BASE))
    open_checkpoint(folder).check()


def test_gemma_4_is_read_and_merged_beside_vision(caplog, tmp_path):
    base = BASE.parent / "gemma4_vision"
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(base)
    assert "tensors of other parts (model.embed_vision" in caplog.text
    checkpoint.check()
    name = "model.language_model.layers.1.self_attn.k_proj"  # of values, too
    assert changed_by(base, [name], tmp_path) == [f"{name}.weight"]


def test_experts_of_a_qwen3_6_are_merged_beside_vision_and_further_tokens(
    caplog, tmp_path
):
    """The experts of a layer stay two tensors."""
    golden, base = BASE.parent / "qwen3_6_moe", tmp_path / "base"
    shutil.copytree(golden, base)
    of_mtp = {"mtp.layers.0.mlp.experts.down_proj": np.ones((5, 3, 2), np.float32)}
    file = base / "model.safetensors"
    safetensors.numpy.save_file(read(golden) | of_mtp, file, {"format": "pt"})
    with caplog.at_level(logging.INFO):
        checkpoint = open_checkpoint(base)
    assert "tensors of other parts (model.visual" in caplog.text
    checkpoint.check()
    experts = [n for n in linear_names(checkpoint.config) if ".1.mlp.experts." in n]
    some = [name for name in experts if name.endswith("up_proj")]
    block = "model.language_model.layers.1.mlp.experts"
    assert changed_by(base, some, tmp_path) == [f"{block}.gate_up_proj"]


def changed_by(base, modules, tmp_path) -> list[str]:
    """Names of the tensors that a merged adapter of these linears changes."""
    shapes, rng = linear_shapes(open_checkpoint(base).config), np.random.default_rng(0)

    def weights(k, n):
        tensors = {"lora_a": rng.normal(size=(k, 2)), "lora_b": rng.normal(size=(2, n))}
        tensors = {key: x.astype(np.float32) for key, x in tensors.items()}
        return LoraWeights(tensors=tensors, rank=2, lora_alpha=2.0)

    adapter = Adapter(modules={name: weights(*shapes[name]) for name in modules})
    names = {"base_model": str(base), "linear_names": tuple(shapes)}
    folder = export_peft(adapter, tmp_path / "adapter", **names)
    merged = read(merge_adapter(base, folder, tmp_path / "merged"))
    before = read(base)
    assert merged.keys() == before.keys()
    return [key for key, x in before.items() if not np.array_equal(x, merged[key])]


def test_the_text_of_a_qwen3_5_is_found_beside_vision_and_further_tokens(tmp_path):
    text = BASE.parent / "qwen3_5"
    folder = tmp_path / "whole"
    folder.mkdir()
    settings = json.loads((text / "config.json").read_text())
    config = {"model_type": "qwen3_5", "text_config": settings, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in read(text).items()
    }
    for name in ("model.visual.patch_embed.proj.weight", "mtp.norm.weight"):
        weights[name] = np.ones((2, 3), np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    whole, alone = (load_model(one, dtype="float32") for one in (folder, text))
    assert whole.params.keys() == alone.params.keys()
    for path, array in alone.params.items():
        np.testing.assert_array_equal(whole.params[path], array)


def test_further_tokens_of_a_text_model_are_skipped_and_said(tmp_path, caplog):
    caplog.set_level("INFO")
    text = BASE.parent / "qwen3_5"
    (tmp_path / "config.json").write_bytes((text / "config.json").read_bytes())
    weights = read(text) | {"mtp.norm.weight": np.ones(3, np.float32)}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.check()
    assert checkpoint.files.keys() == read(text).keys()
    assert "not read: 1 tensor of other parts (mtp.norm.weight" in caplog.text
