"""Quantized checkpoints of the hub: contents, refusals and damage."""

import json
import logging

import numpy as np
import pytest

from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.checkpoint import open_checkpoint, planned_checkpoint
from jaxlora.models.structure import linear_path, tensor_specs
from tests import tiny
from tests.jaxlora.hf import quantized_checkpoints as stored
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.quantized_checkpoints import (
    BLOCKS,
    KINDS,
    LINEARS,
    write_quantized,
)
from tests.pallas_kernels.quantized.weights import dequantized

Q = "model.layers.1.self_attn.q_proj"
KERNEL = "layers.1.self_attn.q_proj.kernel"


def dense_weights(base):
    """W [N, K] of each quantized linear, by Hugging Face's name."""
    weights = {}
    for name in LINEARS:
        prefix = f"{linear_path(name)}.kernel."
        arrays = {
            path.removeprefix(prefix): array
            for path, array in base.params.items()
            if path.startswith(prefix)
        }
        if arrays:
            weight = base.base_format.weight(arrays)
            weight.check()
            weights[f"{name}.weight"] = np.asarray(dequantized(weight))
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_checkpoint(tmp_path, kind):
    wanted = write_quantized(tmp_path, kind)
    base = load_model(tmp_path)
    assert base.base_format.name == KINDS[kind][2]
    assert base.base_format.kept == ()
    options = base.base_format.options
    assert getattr(options, "double_quant", True) == (kind != "nf4")
    found = dense_weights(base)
    assert len(found) == len(LINEARS)
    # The codebook of absmax differs in its last digits, and so do products with it.
    tolerance = 1e-6 if kind == "nf4-nested" else 0
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], rtol=tolerance, atol=0)
    for spec in tensor_specs(base.config):
        if spec.hf_name not in found:
            array = wanted[spec.hf_name]
            np.testing.assert_array_equal(base.params[spec.path], array)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_requantized_and_the_error_is_logged(tmp_path, kind, caplog):
    wanted = write_quantized(tmp_path, kind)
    with caplog.at_level(logging.INFO, "jaxlora"):
        base = load_model(tmp_path)
    squares = np.zeros(2)
    for name, array in dense_weights(base).items():
        w = wanted[name]
        scale = np.abs(w).max(axis=1, keepdims=True) / 448
        # Half a unit in the last of e4m3's four digits; 2^-10 below the normal numbers.
        bound = np.maximum(np.abs(w) * 2.0**-4, scale * 2.0**-10)
        assert np.all(np.abs(array - w) <= bound * (1 + 1e-5))
        squares += np.square(array - w).sum(), np.square(w).sum()
    error = f"{100 * (squares[0] / squares[1]) ** 0.5:.2f}%"
    assert f"adds an error of {error} of the weights" in caplog.text


def test_linears_that_are_not_converted_stay_dense(tmp_path):
    keep = ("down_proj", "layers.0.self_attn.v_proj")
    wanted = write_quantized(tmp_path, "nf4-nested", keep=keep)
    base = load_model(tmp_path)
    assert base.base_format.kept == (
        "layers.0.self_attn.v_proj",
        "layers.0.mlp.down_proj",
        "layers.1.mlp.down_proj",
    )
    found = np.asarray(base.params["layers.0.mlp.down_proj.kernel"])
    np.testing.assert_array_equal(
        found.T, wanted["model.layers.0.mlp.down_proj.weight"]
    )
    assert len(dense_weights(base)) == len(LINEARS) - 3
    assert load_model(tmp_path, keep_bf16=["down_proj"]).base_format == base.base_format
    with pytest.raises(ConfigError, match=r"keep_bf16 matches layers\.0\.mlp\.up"):
        load_model(tmp_path, keep_bf16=["up_proj"])


def test_a_transposed_copy(tmp_path):
    write_quantized(tmp_path, "fp8-channel")
    base = load_model(tmp_path, quantize="fp8", quantize_args={"weight_copies": 2})
    assert base.base_format.options.stores_transpose
    values = np.asarray(base.params[f"{KERNEL}.values"])
    copy = np.asarray(base.params[f"{KERNEL}.transposed"])
    np.testing.assert_array_equal(copy.view(np.uint8), values.T.view(np.uint8))


def test_zero_rows_of_fp8_have_a_scale_to_divide_by(tmp_path):
    def zero(tensors):
        tensors[f"{Q}.weight"][3] = 0
        tensors[f"{Q}.weight_scale"][3] = 0

    write_quantized(tmp_path, "fp8-channel", change=zero)
    base = load_model(tmp_path)
    assert np.asarray(base.params[f"{KERNEL}.scale"]).min() > 0
    assert not dense_weights(base)[f"{Q}.weight"][3].any()


def test_scales_of_activations_are_ignored_and_said_once(tmp_path, caplog):
    def add(tensors):
        for name in LINEARS:
            tensors[f"{name}.activation_scale"] = np.ones(1, np.float32)
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)

    write_quantized(tmp_path, "fp8-tensor", change=add)
    with caplog.at_level(logging.INFO, "jaxlora"):
        load_model(tmp_path)
    assert caplog.text.count("scales of activations") == 1
    assert f"{len(LINEARS) + 1} scales of activations" in caplog.text


def test_fingerprint_covers_the_scales(tmp_path):
    def change(tensors):
        tensors[f"{Q}.weight_scale"][0] *= 2

    write_quantized(tmp_path / "a", "fp8-channel")
    write_quantized(tmp_path / "b", "fp8-channel", change=change)
    first = load_model(tmp_path / "a")
    assert load_model(tmp_path / "a", quantize="fp8").fingerprint == first.fingerprint
    assert load_model(tmp_path / "b").fingerprint != first.fingerprint


def test_another_format_is_refused(tmp_path):
    write_quantized(tmp_path, "nf4-nested")
    match = "quantized already, as bitsandbytes nf4, .* as fp8 would add a second error"
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path, quantize="fp8")
    with pytest.raises(ModelError, match=match):
        find_base_format(planned_checkpoint(tmp_path), "fp8")
    with pytest.raises(ConfigError, match="'weight_copies' is no setting of nf4"):
        load_model(tmp_path, quantize_args={"weight_copies": 2})


def test_the_planned_format_needs_no_weights(tmp_path):
    write_quantized(tmp_path, "nf4", keep=["down_proj"])
    planned = planned_checkpoint(tmp_path)
    assert find_base_format(planned, None) == load_model(tmp_path).base_format
    (tmp_path / "model.safetensors").unlink()
    planned = planned_checkpoint(tmp_path)
    found = find_base_format(planned, None, ["up_proj"])
    assert (found.name, len(found.kept)) == ("nf4", 2)
    with pytest.raises(ModelError, match="quantized already"):
        find_base_format(planned, "int8")


# ---- refusals and damage -------------------------------------------------------------


# Settings of the weights of compressed-tensors.
OTHER_WEIGHTS = {
    "num_bits": 4,
    "symmetric": False,
    "strategy": "group",
    "type": "bool",
    "actorder": "group",
}


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("fp8-channel", {"quant_method": None}, "quant_method=None, which is not"),
        ("fp8-channel", {"quant_method": "quark"}, "Supported: compressed-tensors"),
        ("fp8-channel", {"format": "pack-quantized"}, "format='pack-quantized'"),
        ("fp8-channel", {"config_groups": {"FP8": [1]}}, "config_groups with weights"),
        ("fp8-channel", {"config_groups": {}}, "config_groups="),
        ("fp8-channel", {"transform_config": {"a": 1}}, "transform_config="),
        ("fp8-channel", {"sparsity_config": {"format": "sparse"}}, "sparsity_config="),
        *(
            ("fp8-channel", {key: value}, "quantization_config with weights=")
            for key, value in OTHER_WEIGHTS.items()
        ),
        ("fp8-blocks", {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4'"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bf"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit and load_in_8bit"),
    ],
)
def test_other_kinds_are_refused(tmp_path, kind, change, match):
    write_quantized(tmp_path, kind)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    changed = config["quantization_config"]
    if change.keys() <= OTHER_WEIGHTS.keys():
        changed = changed["config_groups"]["group_0"]["weights"]
    changed |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path)


def _without(name):
    return lambda tensors: tensors.pop(f"{Q}.{name}")


def _with(name, array):
    return lambda tensors: tensors.update({f"{Q}.{name}": np.asarray(array)})


def _state(text):
    array = np.frombuffer(text.encode(), np.uint8)
    return _with("weight.quant_state.bitsandbytes__nf4", array)


def _nan(tensors):
    tensors[f"{Q}.weight"].view(np.uint8)[5, 7] = 0xFF


STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64]}
NESTED = {**STATE, "nested_blocksize": 256}


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("fp8-channel", _nan, f"{Q}.weight holds NaN"),
        ("fp8-channel", _without("weight"), f"lacks {Q}.weight"),
        ("fp8-channel", _without("weight_scale"), f"lacks {Q}.weight_scale, which com"),
        (
            "fp8-channel",
            _with("weight_scale", np.ones((9, 1), np.float32)),
            rf"{Q}.weight_scale has shape \[9, 1\]; .* calls for \[64, 1\] or \[64\]",
        ),
        (
            "fp8-channel",
            _with("weight_scale", np.full(64, -1, np.float32)),
            f"{Q}.weight_scale holds the scale -1;",
        ),
        ("fp8-channel", _with("weight_scale", np.ones(64)), "has dtype F64; .* F32 or"),
        (
            "fp8-channel",
            _with("weight_zero_point", np.ones(1)),
            "weight_zero_point, wh",
        ),
        (
            "fp8-blocks",
            _with("weight_scale_inv", np.ones((2, 1), np.float32)),
            r"\[1, 1",
        ),
        (
            "bitsandbytes-int8",
            _with("weight_format", np.uint8(1)),
            "weight_format is 1",
        ),
        ("nf4", _with("weight.quant_map", stored.NF4[::-1].copy()), "not the codebook"),
        ("nf4", _with("weight", np.zeros((64, 32), np.uint8)), r"for \[2048, 1\]"),
        ("nf4", _state("{"), "bitsandbytes__nf4 is not JSON"),
        (
            "nf4",
            _state(json.dumps({**STATE, "shape": [32, 128]})),
            r"shape=\[32, 128\]",
        ),
        ("nf4-nested", _state(json.dumps(STATE)), "nested_blocksize=None; only 256"),
        ("nf4-nested", _state(json.dumps(NESTED)), "nested_offset=None; wanted a fin"),
        ("nf4-nested", _without("weight.nested_absmax"), "absmax has dtype U8; .* F32"),
    ],
)
def test_damaged_tensors(tmp_path, kind, change, match):
    write_quantized(tmp_path, kind, change=change)
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path)


def test_only_linears_of_the_layers_may_be_quantized(tmp_path):
    def change(tensors):
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name].astype(stored.E4M3)

    write_quantized(tmp_path, "fp8-channel", change=change)
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight has dtype F8_E4M3; .*Only"
    ):
        load_model(tmp_path)


def test_double_quantization_in_a_part_is_refused(tmp_path):
    def change(tensors):
        w = tiny.random_weights(config=stored.CONFIG)[f"{Q}.weight"]
        for name in [name for name in tensors if name.startswith(f"{Q}.")]:
            del tensors[name]
        parts, _ = stored.bitsandbytes_nf4(w, nested=False)
        tensors |= {f"{Q}.{part}": array for part, array in parts.items()}

    write_quantized(tmp_path, "nf4-nested", change=change)
    match = r"by Nf4Options\(double_quant=False\) and others by Nf4Options\("
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path)


def test_a_quantized_model_is_described(tmp_path):
    write_quantized(tmp_path, "nf4-nested")
    assert open_checkpoint(tmp_path).kind == "bitsandbytes nf4"
