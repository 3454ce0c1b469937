"""Loading in threads: the same bits as a plain reading, refusals, places of arrays."""

import concurrent.futures
import hashlib
import io
import json
import logging
import os
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from jax.sharding import NamedSharding, PartitionSpec

from jaxlora.errors import ModelError
from jaxlora.hf import load, tensor_file
from jaxlora.hf.checkpoint import open_checkpoint
from jaxlora.models.structure import tensor_specs
from jaxlora.sharding import global_arrays
from tests import tiny
from tests.jaxlora.hf.loading import load_model
from tests.jaxlora.hf.quantized_checkpoints import write_quantized

KINDS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
RAGGED = {
    **tiny.CONFIG,
    "vocab_size": 291,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
}


def finite_bits(rng, shape, kind):
    """Numbers of any bits that stay finite in bfloat16, with subnormals and -0."""
    raw = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    values = raw.view(kind).reshape(shape)
    with np.errstate(all="ignore"):
        is_good = np.abs(values.astype(np.float64)) < 3e38
    values[~is_good] = kind.type(-0.0)
    return values


def write_ragged(folder, seed, *, tied):
    """Writes tensors of all dtypes in three shards."""
    rng = np.random.default_rng(seed)
    tiny.write_model(folder, config={**RAGGED, "tie_word_embeddings": tied})
    (folder / "model.safetensors").unlink()
    shapes = {k: v.shape for k, v in tiny.random_weights(config=RAGGED).items()}
    if not tied:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    shards, index = [{}, {}, {}], {}
    for name, shape in shapes.items():
        kind = KINDS[rng.choice(list(KINDS))]
        number = int(rng.integers(3))
        shards[number][name] = finite_bits(rng, shape, kind)
        index[name] = f"{number}.safetensors"
    for number, tensors in enumerate(shards):
        safetensors.numpy.save_file(tensors, folder / f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    return folder


def plain_reading(folder):
    """The tensors of a folder and its fingerprint, from the bytes of its files."""
    arrays, lines = {}, {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            first, end = (8 + size + x for x in entry["data_offsets"])
            part, kind, shape = content[first:end], entry["dtype"], entry["shape"]
            if kind in KINDS:
                arrays[name] = np.frombuffer(part, KINDS[kind]).reshape(shape)
            text = xxhash.xxh3_128(part).hexdigest()
            lines[name] = f"{name} {kind}{shape} {text}"
    digest = hashlib.sha256(repr(open_checkpoint(folder).config).encode())
    for name in sorted(lines):
        digest.update(lines[name].encode())
    return arrays, digest.hexdigest()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_and_fingerprint_are_those_of_a_plain_reading(
    tmp_path, monkeypatch, tied, dtype
):
    monkeypatch.setattr(load, "MAX_BYTES", 40_000)
    for seed in range(3):
        folder = write_ragged(tmp_path / str(seed), seed, tied=tied)
        arrays, fingerprint = plain_reading(folder)
        base = load.load_model(folder, dtype=dtype)
        assert (base.fingerprint, base.dtype) == (fingerprint, np.dtype(dtype))
        assert ("lm_head.kernel" in base.params) != tied
        specs = tensor_specs(base.config)
        assert list(base.params) == [spec.path for spec in specs]
        for spec in specs:
            wanted = arrays[spec.hf_name].astype(np.dtype(dtype))
            wanted = wanted.T if spec.transpose else wanted
            found = np.asarray(base.params[spec.path])
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            assert found.tobytes() == wanted.tobytes(), spec.path


@pytest.mark.parametrize("kind", ["nf4-nested", "fp8-tensor", "bitsandbytes-int8"])
def test_fingerprint_of_a_quantized_checkpoint(tmp_path, kind):
    write_quantized(tmp_path, kind)
    assert load_model(tmp_path).fingerprint == plain_reading(tmp_path)[1]


@pytest.mark.needs_devices(4)
def test_parts_on_a_mesh_are_those_of_one_device(tmp_path):
    folder = write_ragged(tmp_path, 7, tied=False)
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    rng = np.random.default_rng(0)

    def place(path, shape):
        """Divides each dimension that is even along one axis, both, or none."""
        axes = [None, "x", "y", ("x", "y")][rng.integers(4)]
        dim = rng.integers(len(shape))
        count = {None: 1, ("x", "y"): 4}.get(axes, 2)
        spec = [None] * len(shape)
        spec[dim] = axes if shape[dim] % count == 0 else None
        return NamedSharding(mesh, PartitionSpec(*spec))

    one = load_model(folder).params
    asked = {path: place(path, array.shape) for path, array in one.items()}
    several = load_model(folder, place=lambda *_: lambda path, _: asked[path]).params
    for path, array in several.items():
        assert array.sharding == asked[path]
        assert np.asarray(array).tobytes() == np.asarray(one[path]).tobytes(), path


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kinds", [("F32", "BF16"), ("F16", "F32"), ("BF16", "BF16")])
def test_each_platform_converts_alike(monkeypatch, platform, transpose, kinds):
    """The program for GPUs runs on the CPU here, on pieces of a few rows."""
    monkeypatch.setattr(global_arrays, "_PIECE_BYTES", 83 * 8 * 5 + 7)
    monkeypatch.setattr(global_arrays, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(global_arrays, "TRANSPOSED_BYTES", 0)
    stored, wanted = (KINDS[kind] for kind in kinds)
    x = finite_bits(np.random.default_rng(1), (37, 83), stored)
    if platform == "gpu":  # as on some CPUs, XLA's program flushes them
        x[np.abs(x.astype(np.float64)) < 1e-37] = 0
    found = global_arrays._put_part(x, None, platform, wanted, transpose)
    expected = x.astype(wanted)
    expected = expected.T if transpose else expected
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("transpose", [False, True])
def test_a_small_weight_needs_no_program(monkeypatch, transpose):
    monkeypatch.setattr(global_arrays, "_converted", None)
    x = finite_bits(np.random.default_rng(1), (37, 83), KINDS["BF16"])
    found = global_arrays._put_part(x, None, "gpu", x.dtype, transpose)
    assert found.dtype == x.dtype
    assert np.asarray(found).tobytes() == (x.T if transpose else x).tobytes()


# ---- damage --------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    """Tensors are read in parts of 64 bytes."""
    monkeypatch.setattr(tensor_file, "_PART_BYTES", 64)


@pytest.mark.parametrize(
    ("kind", "quantize"), [*((kind, None) for kind in KINDS), ("F64", "fp8")]
)
def test_nan_in_any_place_is_named(small_parts, tmp_path, kind, quantize):
    folder = tiny.write_model(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    for position in (0, 16, 700, 32 * 48 - 1):
        weights = {k: v.astype(KINDS[kind]) for k, v in tiny.random_weights().items()}
        weights[name].reshape(-1)[position] = np.nan
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        with pytest.raises(ModelError, match=f"model.safetensors: {name} holds NaN"):
            load_model(folder, quantize=quantize)


def test_the_first_damaged_tensor_in_the_file_is_named(tmp_path):
    folder = tiny.write_model(tmp_path)
    weights = tiny.random_weights()
    first, *_, last = sorted(name for name in weights if "proj" in name)
    weights[first][0, 0], weights[last][0, 0] = np.inf, np.nan
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    for _ in range(5):
        with pytest.raises(ModelError, match=f"{first} holds infinity"):
            load_model(folder)


def test_a_file_that_shrinks_while_threads_read_it(small_parts, folder, monkeypatch):
    lock, calls = threading.Lock(), 0

    class Shrinking(io.FileIO):
        def readinto(self, buffer):
            nonlocal calls
            with lock:
                calls += 1
                if calls == 200:
                    os.truncate(self.name, os.stat(self.name).st_size // 2)
            return super().readinto(buffer)

    monkeypatch.setattr("jaxlora.hf.tensor_file.io.FileIO", Shrinking)
    with pytest.raises(ModelError, match="became shorter while it was read"):
        load_model(folder)
    assert not [t for t in threading.enumerate() if t.name.startswith("load_")]


# ---- the rest ------------------------------------------------------------------------


def test_bytes_of_weights_being_loaded_are_bounded(tmp_path, monkeypatch):
    folder = write_ragged(tmp_path, 3, tied=False)
    checkpoint, lock, now, most = open_checkpoint(folder), threading.Lock(), 0, []
    sizes = {
        spec.path: load._host_bytes(checkpoint, spec, np.dtype(np.float32))
        for spec in checkpoint.specs()
    }
    original = load._load_weight

    def counted(checkpoint, base, dtype, place, spec, check):
        nonlocal now
        with lock:
            now += sizes[spec.path]
            most.append(now)
        found = original(checkpoint, base, dtype, place, spec, check)
        with lock:
            now -= sizes[spec.path]
        return found

    monkeypatch.setattr(load, "_load_weight", counted)
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda process: range(16))
    for bound in (1, 50_000, 200_000):
        monkeypatch.setattr(load, "MIN_BYTES", bound)
        monkeypatch.setattr(load, "MAX_BYTES", bound)
        load_model(folder)
        assert max(most) <= max(bound, *sizes.values())
        most.clear()


def test_transposed_copies_of_parts_count(folder, monkeypatch):
    """The host makes those of small parts, though the whole weight is large."""
    checkpoint = open_checkpoint(folder)
    [spec] = [s for s in checkpoint.specs() if s.path == "layers.0.mlp.up_proj.kernel"]
    stored = load._stored_bytes(checkpoint, spec)
    kind = checkpoint.files[spec.hf_name].dtype(spec.hf_name)
    monkeypatch.setattr(load, "TRANSPOSED_BYTES", stored // 4)
    for num_devices, copies in ((1, 0), (4, 1)):
        monkeypatch.setattr(jax, "device_count", lambda number=num_devices: number)
        assert load._host_bytes(checkpoint, spec, kind) == (1 + copies) * stored


def test_the_log_says_how_fast_it_was(folder, caplog):
    with caplog.at_level(logging.INFO, "jaxlora"):
        load_model(folder)
    lines = [m for m in caplog.messages if m.startswith("loaded the base: ")]
    assert len(lines) == 1
    assert " GiB in " in lines[0]


def test_a_thread_loads_to_its_default_device(folder):
    device = jax.devices()[-1]

    def run():
        with jax.default_device(device):
            return load_model(folder, quantize="int8").params

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        params = pool.submit(run).result()
    assert {d for array in params.values() for d in array.devices()} == {device}


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5,), (3, 7)])
def test_arrays_of_any_rank_are_read(tmp_path, small_parts, shape):
    wanted = finite_bits(np.random.default_rng(2), shape, np.dtype(np.float64))
    safetensors.numpy.save_file({"a": wanted}, tmp_path / "a.safetensors")
    file = tensor_file.TensorFile(tmp_path / "a.safetensors")
    found = file.array("a")
    assert (found.shape, found.tobytes()) == (shape, wanted.tobytes())
    assert file.num_bytes("a") == wanted.nbytes
