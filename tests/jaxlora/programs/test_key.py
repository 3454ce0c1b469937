"""Each ingredient changes the key, and the same values give the same key elsewhere."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.attention import WideHeads
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.programs import key
from jaxlora.programs.key import canonical, program_key
from jaxlora.sharding.mesh import STAGE_AXES

SHAPE = jax.ShapeDtypeStruct((4, 8), jnp.float32)
ARGUMENTS = ({"w": SHAPE}, np.int32(1))


@pytest.fixture(scope="module")
def spec(two_layers) -> DecoderSpec:
    return DecoderSpec(
        config=two_layers.config,
        options=DecoderOptions(dtype=jnp.dtype("float32"), max_segment_tokens=64),
        slots=SlotShape(num_slots=2, rank=4, use_dropout=True, settings=()),
        adapted=("layers.0.self_attn.q_proj",),
    )


def changed_specs(spec: DecoderSpec) -> dict[str, DecoderSpec]:
    """Returns the spec with one field of it, or of one of its parts, changed."""
    replace = dataclasses.replace
    values = {
        "dtype": jnp.dtype("bfloat16"),
        "base_format": BaseFormat.named("int8"),
        "remat": "layer",
        "implementation": "mosaic",
        "attention": "cudnn",
        "wide_heads": WideHeads(512, "xla"),
        "max_segment_tokens": 128,
        "mean_segment_tokens": 32,
        "fsdp": 2,
        "expert": 2,
        "tensor": 2,
        "kv_parts": 2,
        "objectives": ("dpo",),
        "layers_per_program": 1,
        "most_adapters": 1,
    }
    assert values.keys() == {f.name for f in dataclasses.fields(DecoderOptions)}
    found = {
        k: replace(spec, options=replace(spec.options, **{k: v}))
        for k, v in values.items()
    }
    for name, value in (("num_slots", 3), ("rank", 8), ("use_dropout", False)):
        found[name] = replace(spec, slots=replace(spec.slots, **{name: value}))
    found["rms_eps"] = replace(spec, config=replace(spec.config, rms_eps=1e-3))
    found["rope"] = replace(
        spec, config=replace(spec.config, rope=replace(spec.config.rope, theta=5.0))
    )
    found["adapted"] = replace(spec, adapted=("layers.1.self_attn.q_proj",))
    found["layers"] = spec.stage(0, 1)
    return found


def test_every_field_of_the_decoder_changes_the_key(spec):
    keys = {name: program_key(one, ()) for name, one in changed_specs(spec).items()}
    keys["same"] = program_key(spec, ())
    assert len(set(keys.values())) == len(keys)
    assert program_key(dataclasses.replace(spec), ()) == keys["same"]


def placements() -> dict[str, StageSharding]:
    devices = np.array(jax.devices())

    def on(chosen: np.ndarray, *sizes: int) -> StageSharding:
        data, fsdp, tensor = sizes
        mesh = Mesh(chosen.reshape(data, fsdp, 1, tensor), STAGE_AXES)
        return StageSharding(mesh=mesh)

    return {
        "none": ONE_DEVICE,
        "device": StageSharding(device=SingleDeviceSharding(devices[0])),
        "other device": StageSharding(device=SingleDeviceSharding(devices[1])),
        "mesh": on(devices[:2], 1, 2, 1),
        "turned": on(devices[:2], 2, 1, 1),
        "shared": on(devices[:2], 1, 1, 2),
        "swapped": on(devices[1::-1], 1, 2, 1),
        "others": on(devices[2:4], 1, 2, 1),
        "larger": on(devices[:4], 2, 2, 1),
    }


@pytest.mark.needs_devices(4)
def test_devices_and_meshes_change_the_key():
    keys = {name: program_key(one, ()) for name, one in placements().items()}
    assert len(set(keys.values())) == len(keys)


def arguments() -> dict[str, tuple]:
    where = placements()["larger"].mesh
    by_row, by_column = (
        NamedSharding(where, PartitionSpec(*axes))
        for axes in (("data",), (None, "fsdp"))
    )
    with_weak = jax.ShapeDtypeStruct((4, 8), jnp.float32, weak_type=True)
    tree = {
        "same": SHAPE,
        "shape": jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "dtype": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16),
        "weak type": with_weak,
        "by row": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_row),
        "by column": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_column),
    }
    found = {name: ({"w": one}, np.int32(1)) for name, one in tree.items()}
    found["path"] = {"v": SHAPE}, np.int32(1)
    found["list"] = [SHAPE], np.int32(1)
    found["none"] = {"w": SHAPE, "x": None}, np.int32(1)
    return found


@pytest.mark.needs_devices(4)
def test_arguments_change_the_key():
    keys = {name: program_key("f", args) for name, args in arguments().items()}
    assert len(set(keys.values())) == len(keys)
    assert (
        program_key("f", ({"w": np.zeros((4, 8), np.float32)}, np.int32(7)))
        == (keys["same"])
    )


def test_an_array_has_the_key_of_its_shape():
    x = jax.device_put(jnp.ones((4, 8)), jax.devices()[0])
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert program_key("f", (x,)) == program_key("f", (shape,))
    assert program_key("f", (jnp.ones((4, 8)),)) == program_key("f", (SHAPE,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_matmul_precision", "float32"),
        ("jax_enable_x64", True),
        ("jax_threefry_partitionable", False),
        ("jax_optimization_level", "O1"),
        ("jax_debug_nans", True),
        ("jax_default_prng_impl", "rbg"),
    ],
)
def test_settings_of_jax_change_the_key(name, value):
    before, old = program_key("f", ARGUMENTS), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert program_key("f", ARGUMENTS) != before
    finally:
        jax.config.update(name, old)
    assert program_key("f", ARGUMENTS) == before


def test_a_setting_of_this_thread_changes_the_key():
    before = program_key("f", ARGUMENTS)
    with jax.default_matmul_precision("bfloat16"):
        assert program_key("f", ARGUMENTS) != before


@pytest.fixture
def fresh_environment():
    yield
    key.environment.cache_clear()
    key.source_stamp.cache_clear()


def key_again() -> str:
    key.environment.cache_clear()
    key.source_stamp.cache_clear()
    return program_key("f", ARGUMENTS)


@pytest.mark.parametrize(
    "name", ["XLA_FLAGS", "JAXLORA_KERNELS", "NVIDIA_TF32_OVERRIDE"]
)
def test_environment_variables_change_the_key(monkeypatch, name, fresh_environment):
    before = key_again()
    monkeypatch.setenv(name, "--something=1")
    assert key_again() != before


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (key, "_library_versions"),
        (key, "_machine"),
        (jax, "process_count"),
        (jax, "process_index"),
    ],
)
@pytest.mark.usefixtures("fresh_environment")
def test_libraries_machine_and_processes_change_the_key(monkeypatch, where, name):
    before = key_again()
    value = ["another"] if where is key else 7
    monkeypatch.setattr(where, name, lambda: value)
    assert key_again() != before


@pytest.mark.usefixtures("fresh_environment")
def test_python_and_a_version_of_a_library_change_the_key(monkeypatch, tmp_path):
    keys = {key_again()}
    (tmp_path / "jax_cuda13_plugin-0.11.3.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    keys.add(key_again())
    (tmp_path / "pandas-2.0.dist-info").mkdir()
    keys.add(key_again())
    assert len(keys) == 2
    monkeypatch.setattr(sys, "version", "3.13")
    assert key_again() not in keys


def test_a_changed_source_file_changes_the_key(
    monkeypatch, tmp_path, fresh_environment
):
    """Also one of a linked folder, and a table of tiles; compiled files do not."""
    package, linked = tmp_path / "package", tmp_path / "linked"
    for folder in (package, linked, package / "__pycache__"):
        folder.mkdir(parents=True)
    (package / "kernels").symlink_to(linked)
    (package / "a.py").write_text("x = 1")
    (linked / "tiles.json").write_text("{}")
    monkeypatch.setattr(key, "_PACKAGE", package)
    keys = [key_again()]
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert key_again() == keys[0]
    (linked / "tiles.json").write_text("[]")
    keys.append(key_again())
    (package / "a.py").write_text("x = 2")
    keys.append(key_again())
    (package / "a.py").rename(package / "b.py")
    keys.append(key_again())
    assert len(set(keys)) == 4


def test_files_that_are_newer_than_the_process(
    monkeypatch, tmp_path, fresh_environment
):
    """The process may run older code than the files have."""
    (tmp_path / "a.py").write_text("x = 1")
    os.utime(tmp_path / "a.py", (1, 1))
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    key.source_stamp.cache_clear()
    stamp = key.source_stamp()
    assert stamp.is_current()
    (tmp_path / "a.py").write_text("x = 2")
    assert not stamp.is_current()
    key.source_stamp.cache_clear()
    assert not key.source_stamp().is_current()


def test_a_value_without_a_canonical_form():
    for value in (object(), lambda: 1, jnp.ones(())):
        with pytest.raises(TypeError, match="has no canonical form"):
            canonical(value)


def test_kinds_of_values_differ():
    values = [1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {1: 1}, range(1), int]
    assert len(set(map(canonical, values))) == len(values)
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical(frozenset("abc")) == canonical(frozenset("cba"))


OTHER_PROCESS = """
import jax, jax.numpy as jnp, numpy as np
from jaxlora.programs.key import program_key
shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
print(program_key({"a": {"x", "y", "z"}, "b": 2.5}, ({"w": shape}, np.int32(1))))
"""


def test_two_processes_have_the_same_key():
    """Hashes of strings, and so orders of sets, differ between them."""
    found = {
        subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
