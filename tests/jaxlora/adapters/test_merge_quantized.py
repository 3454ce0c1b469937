"""Dense copies of quantized bases: merged with a QLoRA adapter, and converted."""

import io
import json
import logging

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

from jaxlora.adapters.files.merge import merge_adapter
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.errors import AdapterError
from jaxlora.hf.convert import convert
from jaxlora.inspect import inspect_path
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.quantized_checkpoints import CONFIG, LINEARS, write_quantized
from tests.pallas_kernels.quantized.weights import dequantized, quantized

BF16 = np.dtype(ml_dtypes.bfloat16)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
D, F = CONFIG["hidden_size"], CONFIG["intermediate_size"]
SHAPES = {Q: (D, D), DOWN: (F, D)}  # K and N
# As peft writes it for a model that was loaded in 4 bits.
QLORA = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "unsloth/Llama-3.2-1B-bnb-4bit",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.18.0",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


@pytest.fixture
def qlora(tmp_path):
    """The folder of a QLoRA adapter on two linears, and its updates of W."""
    rng, tensors, updates = np.random.default_rng(0), {}, {}
    for name, (k, n) in SHAPES.items():
        a, b = (rng.normal(size=s).astype(np.float32) for s in ((8, k), (n, 8)))
        prefix = f"base_model.model.{name}.lora_"
        tensors |= {f"{prefix}A.weight": a, f"{prefix}B.weight": b}
        updates[f"{name}.weight"] = 2 * b.astype(np.float64) @ a
    folder = tmp_path / "qlora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(QLORA))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder, updates


def read(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def test_a_qlora_adapter_is_read(qlora):
    adapter = import_peft(qlora[0], SHAPES)
    assert set(adapter.modules) == {Q, DOWN}
    assert adapter.dropout == 0.05


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-blocks", "bitsandbytes-int8"])
def test_the_merged_checkpoint_is_dense(tmp_path, qlora, kind):
    wanted, (adapter, updates) = write_quantized(tmp_path / "base", kind), qlora
    out = merge_adapter(tmp_path / "base", adapter, tmp_path / "out", dtype="float32")
    found = read(out)
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        expected = wanted[name] + updates.get(name, 0.0)
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


def test_merged_in_bfloat16_unless_told_otherwise(tmp_path, qlora, caplog):
    wanted = write_quantized(tmp_path / "base", "nf4-nested", keep=["up_proj"])
    with caplog.at_level(logging.INFO, "jaxlora"):
        out = merge_adapter(tmp_path / "base", qlora[0], tmp_path / "out")
    found, config = read(out), json.loads((out / "config.json").read_text())
    assert {array.dtype for array in found.values()} == {BF16}
    assert config["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert f"its {len(LINEARS) - 2} quantized linears are dequantized" in caplog.text
    for name, array in found.items():
        expected = wanted[name] + qlora[1].get(name, 0.0)
        error = np.abs(array.astype(np.float64) - expected)
        # Half a unit in the last of bfloat16's 8 digits, and float32's own rounding.
        assert np.all(error <= 2.0**-8 * np.abs(expected) + 1e-6)


@pytest.mark.parametrize(("bits", "name"), [(4, "nf4"), (8, "int8")])
def test_an_adapter_of_loftq_is_merged_into_the_quantized_weights(
    tmp_path, qlora, bits, name
):
    """It is relative to them, and so can be merged only."""
    folder, updates = qlora
    config = folder / "adapter_config.json"
    loftq = {"loftq_bits": bits, "loftq_iter": 1}
    config.write_text(json.dumps(QLORA | {"loftq_config": loftq}))
    with pytest.raises(AdapterError, match=f"of a base in {name} .* can only be merg"):
        import_peft(folder, SHAPES)
    tiny.write_model(tmp_path / "base", config=CONFIG)
    found = read(merge_adapter(tmp_path / "base", folder, tmp_path / "out"))
    for key, w in read(tmp_path / "base").items():
        if key in updates:
            w = np.asarray(dequantized(quantized(name, w))) + updates[key]
        np.testing.assert_allclose(found[key], w, atol=2e-6)


@pytest.mark.parametrize("kind", ["int8-channel", "fp8-blocks", "nf4"])
def test_a_converted_checkpoint_is_dense(tmp_path, kind, caplog):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_proj.input_scale"] = np.ones(1, np.float32)

    wanted = write_quantized(tmp_path / "base", kind, change=add)
    with caplog.at_level(logging.INFO, "jaxlora"):
        out = convert(tmp_path / "base", tmp_path / "out", dtype="float32")
    assert "linears are dequantized" in caplog.text
    found = read(out)
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])
    assert load_model(out, quantize="fp8").base_format.name == "fp8"


def test_inspect_says_how_the_linears_are_stored(tmp_path):
    def remove(tensors):
        del tensors[f"{Q}.weight_scale"]

    write_quantized(tmp_path, "fbgemm", keep=["up_proj"], change=remove)
    console = Console(file=io.StringIO(), width=200)
    inspect_path(str(tmp_path), console)
    text = console.file.getvalue()
    assert "fbgemm fp8 per channel: 12 of 14 linears" in text
    assert f"tensors missing    │ {Q}.weight_scale" in text
