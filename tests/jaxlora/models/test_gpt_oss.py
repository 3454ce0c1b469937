"""gpt-oss: experts in MXFP4, the clamped gate, and the keys of its config.json."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import load_model
from jaxlora.errors import ModelError
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.checkpoint import planned_checkpoint
from jaxlora.hf.convert import convert
from jaxlora.models.config import UnroundedYarnScaling
from jaxlora.models.families.gpt_oss import clamped_gate
from jaxlora.models.registry import model_config
from jaxlora.pallas_kernels import Mxfp4Weight
from tests import tiny
from tests.jaxlora.models.test_logits import MODELS, packed_logits

FOLDER = MODELS / "gpt_oss"
CONFIG = json.loads((FOLDER / "config.json").read_text())
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn"],
}
DOWN = "model.layers.1.mlp.experts.down_proj"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the weights X K N of two tensors, by their definition."""
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
    blocks = pairs.reshape(*scales.shape, 32)
    exponents = scales[..., None].astype(np.int32) - 127
    return np.ldexp(blocks, exponents).reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def write(folder, config, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(x) for name, x in weights.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def weights():
    """The tensors of a checkpoint in MXFP4, and those of the same model dense."""
    quantized = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    dense = dict(quantized)
    quantize = jax.jit(jax.vmap(Mxfp4Weight.quantize))
    for name, w in dense.items():
        if w.ndim == 3:
            found = quantize(w.swapaxes(1, 2))
            del quantized[name]
            scales = np.array(found.scale)
            blocks = np.array(found.values).reshape(*scales.shape, 16)
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense[name] = decoded(blocks, scales)
    return quantized, dense


@pytest.fixture(scope="module")
def folders(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    config = CONFIG | {"quantization_config": MXFP4}
    return write(folder / "mxfp4", config, weights[0]), write(
        folder / "dense", CONFIG, weights[1]
    )


def test_mxfp4_is_kept_and_equals_the_dense_model(folders):
    """To the last bit, as bfloat16 holds the values."""
    kept, dense = (load_model(folder, dtype="bfloat16") for folder in folders)
    assert kept.base_format.name == "mxfp4"
    assert dense.base_format is None
    path = "layers.0.mlp.experts.gate_up_proj.kernel"
    values, scale = kept.params[f"{path}.values"], kept.params[f"{path}.scale"]
    assert (values.shape, scale.shape) == ((5, 128, 16), (5, 128, 1))
    assert values.dtype == scale.dtype == jnp.uint8
    w = jax.vmap(lambda w: w.dequantize(jnp.bfloat16))(
        Mxfp4Weight(values=values, scale=scale)
    )
    np.testing.assert_array_equal(w.swapaxes(1, 2), dense.params[path])
    tokens = np.random.default_rng(0).integers(0, 64, 40)
    logits = [packed_logits(model, [tokens], total=64)[0] for model in (kept, dense)]
    np.testing.assert_array_equal(*logits)


def test_a_dense_copy_has_the_tensors_of_transformers(folders, weights, tmp_path):
    out = convert(folders[0], tmp_path / "out", dtype="float32")
    found = safetensors.numpy.load_file(out / "model.safetensors")
    assert found.keys() == weights[1].keys()
    for name, array in weights[1].items():
        np.testing.assert_array_equal(found[name], array)
    assert load_model(out).fingerprint == load_model(folders[1]).fingerprint


def test_other_formats_take_the_dense_model(folders):
    """Its tensors are K N, and quantized weights N K."""
    model = load_model(
        folders[1], dtype="float32", quantize="mxfp4", keep_bf16=[".*attn.*"]
    )
    kept = load_model(folders[0], dtype="float32")
    for path, array in kept.params.items():
        np.testing.assert_array_equal(model.params[path], array)


def test_without_weights_the_experts_alone_are_taken_for_quantized(tmp_path):
    config = CONFIG | {"quantization_config": MXFP4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = find_base_format(planned_checkpoint(tmp_path), None)
    assert base.name == "mxfp4"
    assert base.quantizes("layers.1.mlp.experts.gate_up_proj")
    assert not base.quantizes("layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("scales", lambda x: np.where(x == x.max(), 255, x), "scales holds NaN"),
        ("scales", lambda x: None, "lacks .*down_proj.scales"),
        ("scales", lambda x: x[:, :, :1], "calls for"),
        ("blocks", lambda x: x[:3], "lacks .*experts.3.down_proj.weight"),
        ("blocks", lambda x: x.astype(np.float32), "wanted|calls for"),
        ("blocks", lambda x: x[:0], "wanted experts, each with the rows of down_proj"),
    ],
)
def test_damaged_tensors_are_refused(weights, tmp_path, name, change, error):
    found = dict(weights[0])
    changed = change(found.pop(f"{DOWN}_{name}"))
    if changed is not None:
        found[f"{DOWN}_{name}"] = changed
    config = CONFIG | {"quantization_config": MXFP4}
    folder = write(tmp_path / "damaged", config, found)
    with pytest.raises(ModelError, match=error):
        load_model(folder)


def test_the_gate_and_its_gradient_equal_their_definition():
    """Also where values are cut off, or at the limit itself."""
    rng = np.random.default_rng(0)
    gate, up = (5 * rng.normal(size=(64, 8)) for _ in range(2))
    gate[0, :3], up[1, :4] = (7, 9, -9), (7, -7, 8, -8)
    both = jnp.asarray(np.stack([gate, up], -1).reshape(64, -1), jnp.float32)
    out, vjp = jax.vjp(lambda x: clamped_gate(x, slope=1.702, limit=7.0), both)
    (gradient,) = vjp(jnp.ones_like(out))
    dgate, dup = gradient[:, 0::2], gradient[:, 1::2]
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    share = 1 / (1 + np.exp(-1.702 * g))
    np.testing.assert_allclose(out, (u + 1) * g * share, rtol=1e-5, atol=1e-5)
    slope = share + 1.702 * g * share * (1 - share)
    wanted = (u + 1) * slope * (gate <= 7), g * share * (np.abs(up) <= 7)
    for actual, exact in zip((dgate, dup), wanted, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


def test_defaults_are_those_of_transformers():
    model = model_config({"model_type": "gpt_oss"})
    sizes = (model.num_layers, model.hidden_size, model.head_dim, model.num_kv_heads)
    assert sizes == (36, 2880, 64, 8)
    assert model.layer_windows == (128, None) * 18
    assert model.rope.theta == 150000
    assert isinstance(model.rope.scaling, UnroundedYarnScaling)
    assert model.rope.scaling.factor == 32
    assert (model.experts.number, model.experts.chosen) == (128, 4)
    assert (model.gate_slope, model.gate_limit) == (1.702, 7.0)


def test_unread_keys_are_refused():
    config = {"model_type": "gpt_oss", "output_router_logits": True}
    with pytest.raises(ModelError, match="output_router_logits"):
        model_config(config)
