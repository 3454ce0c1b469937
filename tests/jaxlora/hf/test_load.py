"""Loading of checkpoints: contents, refusals, and memory."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import huggingface_hub.constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlora.errors import ModelError
from jaxlora.hf import load, tensor_file
from jaxlora.hf.save import save_checkpoint
from jaxlora.models.structure import tensor_specs
from tests import tiny
from tests.jaxlora.hf.loading import load_model

Q = "model.layers.1.self_attn.q_proj"
BF16 = np.dtype(ml_dtypes.bfloat16)


def assert_params_equal(base, weights):
    wanted = {
        spec.path: weights[spec.hf_name].T if spec.transpose else weights[spec.hf_name]
        for spec in tensor_specs(base.config)
    }
    assert base.params.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(base.params[path]), array, path)


def test_params_are_the_weights_with_linears_transposed(folder):
    base = load_model(folder)
    weights = tiny.random_weights()
    assert_params_equal(base, weights)
    assert base.params["layers.0.mlp.up_proj.kernel"].shape == (32, 48)
    np.testing.assert_array_equal(
        np.asarray(base.params["layers.1.self_attn.q_proj.kernel"]),
        weights[f"{Q}.weight"].T,
    )
    assert base.dtype == np.float32
    assert (base.folder, base.source) == (folder, str(folder))


def test_parts_of_a_tensor_meet_without_a_seam(folder, monkeypatch):
    monkeypatch.setattr(tensor_file, "_PART_BYTES", 28)
    assert_params_equal(load_model(folder), tiny.random_weights())


@pytest.mark.parametrize("stored", [np.float16, BF16, np.float64])
def test_other_dtypes_are_cast(rewrite, stored):
    weights = {k: v.astype(stored) for k, v in tiny.random_weights().items()}
    folder = rewrite(weights)
    as_float = {k: v.astype(np.float32) for k, v in weights.items()}
    assert_params_equal(load_model(folder), as_float)
    base = load_model(folder, dtype="bfloat16")
    assert base.dtype == BF16
    assert_params_equal(base, {k: v.astype(BF16) for k, v in as_float.items()})


def test_shards_are_read_through_the_index(shard, folder):
    shard()
    assert_params_equal(load_model(folder), tiny.random_weights())


def test_untied_head(rewrite):
    weights = tiny.random_weights()
    head = np.random.default_rng(1).normal(size=(288, 32)).astype(np.float32)
    folder = rewrite({**weights, "lm_head.weight": head}, tie_word_embeddings=False)
    base = load_model(folder)
    np.testing.assert_array_equal(np.asarray(base.params["lm_head.kernel"]), head.T)


def test_a_stored_tied_head_and_rotary_frequencies_are_ignored(rewrite):
    weights = tiny.random_weights()
    extra = {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    base = load_model(rewrite({**weights, **extra}))
    assert_params_equal(base, weights)


def test_biases_are_loaded(rewrite):
    weights = tiny.random_weights()
    rng = np.random.default_rng(2)
    for layer in range(2):
        for name, size in (("q", 32), ("k", 16), ("v", 16)):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = rng.normal(
                size=size
            ).astype(np.float32)
    base = load_model(rewrite(weights, model_type="qwen2"))
    assert_params_equal(base, weights)
    assert base.params["layers.1.self_attn.k_proj.bias"].shape == (16,)


def test_place_says_where_each_array_goes(folder):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    asked = {}

    def place(path, shape):
        asked[path] = shape
        return sharding

    base = load_model(folder, place=lambda *_: place)
    assert asked == {path: array.shape for path, array in base.params.items()}
    assert asked["layers.0.mlp.down_proj.kernel"] == (48, 32)
    assert all(array.sharding == sharding for array in base.params.values())
    assert_params_equal(base, tiny.random_weights())


def test_fingerprint_tells_bases_apart(folder, rewrite, tmp_path):
    first = load_model(folder).fingerprint
    assert load_model(folder, dtype="bfloat16").fingerprint == first
    copy = tiny.write_model(tmp_path / "elsewhere")
    assert load_model(copy).fingerprint == first
    assert load_model(rewrite(transformers_version="5.0.0")).fingerprint == first
    assert load_model(rewrite(rope_theta=5e5)).fingerprint != first
    weights = tiny.random_weights()
    weights["model.norm.weight"][3] += 1
    assert load_model(rewrite(weights, rope_theta=1e4)).fingerprint != first
    assert load_model(rewrite(tiny.random_weights())).fingerprint == first


def test_fingerprint_does_not_depend_on_shards(folder, shard):
    first = load_model(folder).fingerprint
    shard()
    assert load_model(folder).fingerprint == first


def test_missing_tensor(rewrite):
    weights = tiny.random_weights()
    del weights[f"{Q}.weight"]
    with pytest.raises(ModelError, match=rf"lacks {Q}.weight \[32, 32\]"):
        load_model(rewrite(weights))


def test_missing_head(rewrite):
    with pytest.raises(ModelError, match=r"lacks lm_head.weight \[288, 32\]"):
        load_model(rewrite(tie_word_embeddings=False))


def test_extra_tensor(rewrite):
    extra = {f"{Q}.bias": np.zeros(32, np.float32)}
    with pytest.raises(ModelError, match=rf"holds {Q}.bias, which is not part of the"):
        load_model(rewrite({**tiny.random_weights(), **extra}))


def test_wrong_shape(rewrite):
    with pytest.raises(ModelError, match=r"has shape \[48, 32\]; .* \[64, 32\]"):
        load_model(rewrite(intermediate_size=64))


def test_quantised_dtype(rewrite):
    weights = {**tiny.random_weights(), f"{Q}.weight": np.zeros((32, 32), np.int8)}
    with pytest.raises(ModelError, match=rf"{Q}.weight has dtype I8; wanted one of"):
        load_model(rewrite(weights))


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_file(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"damaged or incomplete: .* Fetch or copy"):
        load_model(folder)


def test_truncated_shard(folder, shard):
    shard()
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"b\.safetensors is damaged or incomplete"):
        load_model(folder)


def test_index_names_a_missing_file(folder, shard):
    shard(**{f"{Q}.weight": "c.safetensors"})
    with pytest.raises(ModelError, match=r"names c\.safetensors, which is missing"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../b.safetensors", "/etc/passwd", "sub/b", 7])
def test_index_names_a_file_elsewhere(folder, shard, name):
    shard(**{f"{Q}.weight": name})
    with pytest.raises(ModelError, match=f"names {name!r}, which is not a plain file"):
        load_model(folder)


def test_index_puts_a_tensor_into_another_file(folder, shard):
    shard(**{f"{Q}.weight": "a.safetensors"})
    with pytest.raises(ModelError, match=rf"a.safetensors lacks {Q}.weight, which the"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', "[]", "{"])
def test_damaged_index(folder, shard, text):
    shard().write_text(text)
    with pytest.raises(ModelError, match=r"index\.json (has no weight_map|holds|can)"):
        load_model(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    match = r"only pickled weights \(pytorch_model\.bin\)\. .*run any code"
    with pytest.raises(ModelError, match=match):
        load_model(folder)


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model"):
        load_model(folder)


def test_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json, so it is not a Hugging"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_damaged_config(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json (cannot be read|holds a list)"):
        load_model(folder)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Switches the hub off; returns a list of the calls that it got."""
    calls = []

    def refuse(*args, **_):
        calls.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return calls


def test_unknown_hub_id_offline(no_network):
    with pytest.raises(ModelError, match="nobody/nothing is not a folder here, it is"):
        load_model("nobody/nothing")
    assert not no_network


def test_fetched_hub_id_offline(no_network, tmp_path):
    repo = tmp_path / "models--nobody--tiny"
    tiny.write_model(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    base = load_model("nobody/tiny")
    assert base.source == "nobody/tiny"
    assert_params_equal(base, tiny.random_weights())
    assert not no_network


@pytest.mark.parametrize("source", ["/no/such/folder", "./model", "a/b/c"])
def test_missing_folder_is_not_looked_up(no_network, source):
    with pytest.raises(ModelError, match="there is no such folder"):
        load_model(source)
    assert not no_network


def test_a_file_is_not_looked_up(no_network, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match=r"model\.safetensors is a file; a checkpoint"):
        load_model("model.safetensors")
    assert not no_network


def test_names_that_are_no_hub_ids(no_network):
    with pytest.raises(ModelError, match="cannot be fetched from the hub"):
        load_model("what is this?")
    assert not no_network


# Loads a checkpoint, dense and quantized, one tensor at a time; prints how much private
# memory that took at its peak.
PEAK = """
import json, pathlib, sys, threading
from jaxlora.hf import load
from jaxlora.hf.load import load_model
load.MIN_BYTES = load.MAX_BYTES = 1

def anonymous():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])

def watch():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())

for quantize in ("fp8", None):
    load_model(sys.argv[2], quantize=quantize)
    stop, peak, base = threading.Event(), [0], None
    baseline = anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    base = load_model(sys.argv[1], dtype="float32", quantize=quantize)
    stop.set()
    thread.join()
    held = sum(array.nbytes for array in base.params.values())
    print(json.dumps({"beyond": peak[0] - baseline - held, "held": held}))
"""
MIB = 2**20


def write_big(folder: pathlib.Path) -> dict[str, int]:
    """Writes 110 MB in four shards; returns the number of values by tensor."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 16000}
    config = {**tiny.CONFIG, **sizes, "num_hidden_layers": 4}
    from jaxlora.models.registry import model_config

    specs = tensor_specs(model_config(config))
    values = np.random.default_rng(0).normal(size=16000 * 1024).astype(BF16)
    arrays = ((s.hf_name, values[: np.prod(s.hf_shape)]) for s in specs)
    shapes = {s.hf_name: s.hf_shape for s in specs}
    tensors = ((name, array.reshape(shapes[name])) for name, array in arrays)
    save_checkpoint(folder, tensors, config, max_shard_bytes=30_000_000)
    return {name: int(np.prod(shape)) for name, shape in shapes.items()}


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="reads /proc"
)
def test_host_holds_one_tensor_beyond_the_params(tmp_path, folder):
    sizes = write_big(tmp_path / "big")
    assert len(list((tmp_path / "big").glob("*-of-00004.safetensors"))) == 4
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "big"), str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    quantized, dense = map(json.loads, out.stdout.splitlines())
    total, linears = sum(sizes.values()), [n for s, n in sizes.items() if "proj" in s]
    assert dense["held"] == 4 * total
    # 16 MiB for the interpreter's own growth and what malloc keeps.
    allowed = 4 * max(sizes.values()) + total // 5 + 16 * MIB
    assert dense["beyond"] <= allowed, f"{dense} > {allowed / MIB:.0f} MiB"
    # The embedding as it is stored, or one dense linear, in bfloat16 and twice in
    # float32, as XLA quantizes it on a CPU.
    allowed = max(2 * max(sizes.values()), (2 + 4 + 4) * max(linears)) + 32 * MIB
    assert allowed < 2 * sum(linears)
    assert quantized["held"] < 4 * (total - sum(linears)) + 1.01 * sum(linears)
    assert quantized["beyond"] <= allowed, f"{quantized} > {allowed / MIB:.0f} MiB"


def test_weights_in_one_file_and_pickled_ones_beside_it(folder):
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert_params_equal(load_model(folder), tiny.random_weights())


def test_metadata_of_the_file_does_not_matter(folder):
    weights = tiny.random_weights()
    path = folder / "model.safetensors"
    first = load_model(folder).fingerprint
    safetensors.numpy.save_file(weights, path, {"format": "pt", "made_by": "x" * 999})
    assert load_model(folder).fingerprint == first


def test_the_default_dtype_is_the_devices(folder):
    wanted = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    base = load.load_model(folder)
    assert {array.dtype for array in base.params.values()} == {jnp.dtype(wanted)}
