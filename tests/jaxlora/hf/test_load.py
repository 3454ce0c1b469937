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
from jaxlora.hf.convert import save_checkpoint
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


def test_no_tensor_that_is_alone_is_copied_on_the_host(folder, monkeypatch):
    """It would take twice the memory that `_host_bytes` counts."""
    found, given = [], []
    read, put = tensor_file.TensorFile.read, load.put_converted

    def noted_read(self, *args, **settings):
        array, digest = read(self, *args, **settings)
        found.append(array)
        return array, digest

    def noted_put(x, *args, **settings):
        given.append(x)
        return put(x, *args, **settings)

    monkeypatch.setattr(tensor_file.TensorFile, "read", noted_read)
    monkeypatch.setattr(load, "put_converted", noted_put)
    load_model(folder)
    assert len(given) == len(found) > 0
    assert {id(x) for x in given} == {id(x) for x in found}


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


def test_fingerprint_does_not_depend_on_files(folder, shard):
    """On their metadata, or on the shards."""
    path, weights = folder / "model.safetensors", tiny.random_weights()
    first = load_model(folder).fingerprint
    safetensors.numpy.save_file(weights, path, {"format": "pt", "made_by": "x" * 999})
    assert load_model(folder).fingerprint == first
    shard()
    assert load_model(folder).fingerprint == first


HEAD = "lm_head.weight"
ZEROS = np.zeros((32, 32), np.float32)


@pytest.mark.parametrize(
    ("weights", "config", "match"),
    [
        ({f"{Q}.weight": None}, {}, rf"lacks {Q}.weight \[32, 32\]"),
        ({}, {"tie_word_embeddings": False}, r"lacks lm_head.weight \[288, 32\]"),
        ({HEAD: ZEROS}, {}, r"lm_head\.weight has shape \[32, 32\]"),
        ({f"{Q}.bias": ZEROS[0]}, {}, rf"holds {Q}.bias, which is not part of the"),
        ({}, {"intermediate_size": 64}, r"has shape \[48, 32\]; .* \[64, 32\]"),
        ({f"{Q}.weight": ZEROS.astype(np.int8)}, {}, "has dtype I8; wanted one of"),
        ({}, {"num_hidden_layers": 3}, "layers=3, and the weights hold 2 layers"),
        ({}, {"num_hidden_layers": 1000}, "layers=1000, and the weights hold 2"),
    ],
)
def test_weights_that_do_not_fit_their_config(rewrite, weights, config, match):
    given = tiny.random_weights() | weights
    given = {name: array for name, array in given.items() if array is not None}
    with pytest.raises(ModelError, match=match):
        load_model(rewrite(given, **config))


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_files(folder, shard, size):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"damaged or incomplete: .* Fetch or copy"):
        load_model(folder)
    shard()
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"b\.safetensors is damaged or incomplete"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("c.safetensors", r"names c\.safetensors, which is missing"),
        ("a.safetensors", rf"a.safetensors lacks {Q}.weight, which the .* copy both"),
        *(
            (name, "which is not a plain file name")
            for name in ("../b.safetensors", "/etc/passwd", "sub/b", 7, None, 1.5)
        ),
        (["a.safetensors"], "which is not a plain file name"),
        ({"a": 1}, "which is not a plain file name"),
    ],
)
def test_indices_that_are_refused(folder, shard, file, match):
    shard(**{f"{Q}.weight": file})
    with pytest.raises(ModelError, match=match):
        load_model(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', "[]", "{"])
def test_damaged_index(folder, shard, text):
    shard().write_text(text)
    with pytest.raises(ModelError, match=r"index\.json (has no weight_map|holds|can)"):
        load_model(folder)


def test_folders_without_files(folder):
    """Pickled weights beside safetensors are never read, and alone are refused."""
    path, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    pickled.write_bytes(b"never read")
    assert_params_equal(load_model(folder), tiny.random_weights())
    path.unlink()
    match = r"only pickled weights \(pytorch_model\.bin\)\. .*run any code"
    with pytest.raises(ModelError, match=match):
        load_model(folder)
    pickled.unlink()
    match = r"holds neither model.safetensors nor model.* Only safetensors are read, an"
    with pytest.raises(ModelError, match=match):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json, .* checkpoint\.$"):
        load_model(folder)
    for file, what in (("run.json", "a run"), ("adapter_config.json", "an adapter")):
        (folder / file).write_text("{}")
        with pytest.raises(ModelError, match=f"It is {what}: its base belongs here"):
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


def test_fetched_hub_id_offline(no_network, tmp_path):
    repo = tmp_path / "models--nobody--tiny"
    tiny.write_model(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    base = load_model("nobody/tiny")
    assert base.source == "nobody/tiny"
    assert_params_equal(base, tiny.random_weights())
    assert not no_network


@pytest.mark.parametrize(
    ("source", "match"),
    [
        *((name, "no such folder") for name in ("/no/such/folder", "./model", "a/b/c")),
        ("model.safetensors", r"model\.safetensors is a file; a checkpoint"),
        ("what is this?", "cannot be fetched from the hub"),
        ("nobody/nothing", "nobody/nothing is not a folder here, it is"),
    ],
)
def test_sources_that_are_refused(no_network, folder, monkeypatch, source, match):
    """Without asking the hub, which is off."""
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError, match=match):
        load_model(source)
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


def test_the_default_dtype_is_the_devices(folder):
    wanted = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    base = load.load_model(folder)
    assert {array.dtype for array in base.params.values()} == {jnp.dtype(wanted)}
