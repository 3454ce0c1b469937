"""Dense checkpoints whose linears are quantized while they are loaded."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.checkpoint import open_checkpoint, planned_checkpoint
from jaxlora.hf.quantized import place
from jaxlora.models.base_format import BaseFormat
from jaxlora.pallas_kernels import FORMATS
from tests import tiny
from tests.jaxlora.hf import quantized_checkpoints as stored
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.test_quantized_checkpoints import KERNEL, Q, dense_weights

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
WEIGHTS = tiny.random_weights(config=stored.CONFIG)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense checkpoint with linears that every format can hold."""
    return tiny.write_model(tmp_path_factory.mktemp("dense"), config=stored.CONFIG)


@pytest.fixture(scope="module")
def loaded(dense):
    """The checkpoint in each format."""
    return {name: load_model(dense, quantize=name) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_only_linears_of_the_layers_are_quantized(loaded, dense, name):
    base, plain = loaded[name], load_model(dense)
    assert base.base_format == BaseFormat.named(name)
    assert plain.base_format is None
    assert base.fingerprint == plain.fingerprint
    quantized = {f"{path}.kernel" for path in open_checkpoint(dense).linear_paths}
    for path, array in plain.params.items():
        if path not in quantized:
            np.testing.assert_array_equal(base.params[path], array)
    fields = {
        path.rsplit(".", 1)[0] for path in base.params.keys() - plain.params.keys()
    }
    assert fields == quantized
    assert plain.params.keys() - base.params.keys() == quantized


def test_fp8_has_one_scale_per_output_feature(loaded):
    base, w = loaded["fp8"], WEIGHTS[f"{Q}.weight"]
    scale = np.abs(w).max(axis=1) / np.float32(448)
    found = np.asarray(base.params[f"{KERNEL}.scale"])
    np.testing.assert_allclose(found, scale, rtol=1e-6)
    values = (w * (1 / found)[:, None]).clip(-448, 448).astype(E4M3)
    np.testing.assert_array_equal(
        np.asarray(base.params[f"{KERNEL}.values"]).view(np.uint8),
        values.view(np.uint8),
    )


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.5 / 127), ("nf4", 0.16)])
def test_errors_are_within_the_distance_of_codes(loaded, name, bound):
    """Half the largest distance, relative to the largest weight of a row or block."""
    size = {"int8": stored.CONFIG["hidden_size"], "nf4": 64}[name]
    for hf_name, array in dense_weights(loaded[name]).items():
        w = WEIGHTS[hf_name]
        size = w.shape[1] if name == "int8" else 64
        errors = np.abs(array - w).reshape(-1, size)
        largest = np.abs(w).reshape(-1, size).max(axis=1, keepdims=True)
        assert np.all(errors <= bound * 1.01 * largest)


@pytest.mark.parametrize("kind", [np.float16, BF16, np.float64])
def test_weights_are_quantized_from_the_stored_precision(tmp_path, kind):
    import safetensors.numpy

    folder = tiny.write_model(tmp_path, config=stored.CONFIG)
    weights = {name: array.astype(kind) for name, array in WEIGHTS.items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    base = load_model(folder, quantize="fp8")
    w = np.float32(weights[f"{Q}.weight"])
    scale = np.asarray(base.params[f"{KERNEL}.scale"])
    np.testing.assert_allclose(scale, np.abs(w).max(axis=1) / 448, rtol=1e-6)


def test_kept_linears_and_transposed_copies(dense):
    base = load_model(
        dense,
        quantize="fp8",
        quantize_args={"weight_copies": 2},
        keep_bf16=["down_proj", "0.*k_proj"],
    )
    assert base.base_format == BaseFormat.named(
        "fp8",
        kept=(
            "layers.0.self_attn.k_proj",
            "layers.0.mlp.down_proj",
            "layers.1.mlp.down_proj",
        ),
        weight_copies=2,
    )
    kept = np.asarray(base.params["layers.0.mlp.down_proj.kernel"])
    np.testing.assert_array_equal(
        kept.T, WEIGHTS["model.layers.0.mlp.down_proj.weight"]
    )
    copy = np.asarray(base.params[f"{KERNEL}.transposed"])
    values = np.asarray(base.params[f"{KERNEL}.values"])
    np.testing.assert_array_equal(copy.view(np.uint8), values.T.view(np.uint8))


@pytest.mark.needs_devices(2)
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_bits_on_several_devices(loaded, dense, name):
    """Matrices are divided, by columns if these are even; vectors are replicated."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    asked, formats = {}, []

    def place_of(path, shape):
        columns, rows = PartitionSpec(None, "x"), PartitionSpec("x")
        spec = PartitionSpec()
        if len(shape) == 2:
            spec = rows if shape[1] % 2 else columns
        asked[path] = jax.sharding.NamedSharding(mesh, spec)
        return asked[path]

    def choose(_, found):
        formats.append(found)
        return place_of

    base = load_model(dense, quantize=name, place=choose)
    assert formats == [base.base_format]
    assert asked.keys() == base.params.keys() == loaded[name].params.keys()
    for path, array in base.params.items():
        assert array.sharding == asked[path]
        wanted = np.asarray(loaded[name].params[path])
        assert np.asarray(array).tobytes() == wanted.tobytes(), path


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"quantize": "fp4"}, ConfigError, "quantize='fp4'; wanted one of fp8, int8"),
        ({"keep_bf16": ["up_proj"]}, ConfigError, "only for a quantized base"),
        (
            {"quantize_args": {"weight_copies": 2}},
            ConfigError,
            "only for a quantized base",
        ),
        (
            {"quantize": "int8", "quantize_args": {"weight_copies": 2}},
            ConfigError,
            "'weight_copies' is no setting of int8, which has none",
        ),
        (
            {"quantize": "fp8", "keep_bf16": ["donw_proj"]},
            ConfigError,
            "keep_bf16 'donw_proj' matches no linear",
        ),
    ],
)
def test_refused_settings(dense, tmp_path, options, kind, match):
    options = {"quantize": None, **options}
    with pytest.raises(kind, match=match):
        find_base_format(open_checkpoint(dense), **options)
    shutil.copy(dense / "config.json", tmp_path)
    with pytest.raises(kind, match=match):
        find_base_format(planned_checkpoint(tmp_path), **options)


def test_shapes_that_nf4_cannot_hold_are_named(folder):
    match = "self_attn.q_proj: nf4 has blocks of 64 values along K, but K=32"
    with pytest.raises(ModelError, match=match):
        load_model(folder, quantize="nf4")
    found = find_base_format(open_checkpoint(folder), "int8")
    (folder / "model.safetensors").unlink()
    assert found == find_base_format(planned_checkpoint(folder), "int8")


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_needs_one_copy_in_float32_at_most(name):
    w = jax.ShapeDtypeStruct((512, 1024), np.float16)
    program = place._quantized.lower(w, BaseFormat.named(name).options).compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary <= 4.5 * w.size
