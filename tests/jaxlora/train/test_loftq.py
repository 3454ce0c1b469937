"""LoftQ: adapters that start from the error of a quantized base."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxlora import LoraJob, RunConfig, Trainer, import_peft, load_model, merge_adapter
from jaxlora.adapters.files.gguf_export import export_gguf
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.adapters.targets import resolve_targets
from jaxlora.errors import AdapterError, ConfigError
from jaxlora.models.structure import linear_shapes
from jaxlora.pallas_kernels import FORMATS
from tests import tiny
from tests.oracle import relative_error

CONFIG = tiny.CONFIG | {"hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_hidden_layers": 1}
NAME, RANK = "model.layers.0.mlp.down_proj", 4
TARGETS = ["q_proj", "down_proj"]


def job(folder, **settings) -> LoraJob:
    given = {
        "name": "loftq",
        "data": {"path": str(folder / "data.jsonl")},
        "rank": RANK,
        "lora_alpha": 8,
        "target_modules": TARGETS,
        "init_lora_weights": "loftq",
        "batch_size": 4,
        "steps": 2,
        "max_length": 64,
    }
    return LoraJob(**given | settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loftq")
    tiny.write_records(folder / "data.jsonl", 12, seed=0)
    tiny.write_model(folder / "model", config=CONFIG)
    return folder


def run_config(folder, jobs, out: str, **settings) -> RunConfig:
    given = {
        "model": str(folder / "model"),
        "output_dir": str(folder / out),
        "jobs": jobs,
        "microbatch_tokens": 256,
        "block_tokens": 16,
        "dtype": "float32",
        "quantize_base": "nf4",
        "max_concurrent_jobs": 2,
    }
    return RunConfig(**given | settings)


def dequantized(w: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(FORMATS[name].quantize(jnp.asarray(w)).dequantize(jnp.float32))


@pytest.mark.parametrize(("k", "n", "bits"), [(64, 96, 4), (192, 32, 4), (64, 48, 8)])
def test_the_start_is_the_nearest_matrix_to_the_error(tmp_path, k, n, bits):
    """By the singular values of W - Q(W) in float64."""
    w = np.random.default_rng(k).normal(size=(n, k)).astype(np.float32)
    name = {4: "nf4", 8: "int8"}[bits]
    made = job(
        tmp_path, target_modules=["down_proj"], loftq_config={"loftq_bits": bits}
    )
    kernel = FORMATS[name].quantize(jnp.asarray(w))
    targets = resolve_targets(made, [NAME])
    adapter = fresh_adapter(made, targets, {NAME: kernel}, stored=lambda _: w)
    found = adapter.modules[NAME]
    error = (w.astype(np.float64) - dequantized(w, name)).T
    u, s, vh = np.linalg.svd(error)
    wanted = (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
    assert relative_error(2 * found.a @ found.b, wanted) < 1e-4
    sizes = np.sqrt(s[:RANK] / 2)
    np.testing.assert_allclose(np.linalg.norm(found.a, axis=0), sizes, rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(found.b, axis=1), sizes, rtol=1e-3)


def test_a_run_trains_it_beside_a_plain_job(folder, tmp_path):
    loftq = job(folder)
    plain = job(folder, name="plain", init_lora_weights=True)
    both = Trainer(run_config(folder, [loftq, plain], "both"))
    both.train()
    # The other job ends after its first step, and is there for the programs.
    short = plain.replace(steps=1)
    alone = Trainer(run_config(folder, [short, loftq], "alone"))
    alone.train()
    shapes = linear_shapes(both.model.config)
    folders = [folder / run / "adapters" / "loftq" for run in ("both", "alone")]
    adapter, same = (import_peft(one, shapes) for one in folders)
    for name, weights in adapter.modules.items():
        for key, array in weights.tensors.items():
            assert relative_error(array, same.modules[name].tensors[key]) < 1e-5

    written = json.loads((folders[0] / "adapter_config.json").read_text())
    assert written["init_lora_weights"] is True
    assert written["loftq_config"] == {"loftq_bits": 4, "loftq_iter": 1}
    _check_merged(folder, folders[0], adapter, tmp_path)
    dense = load_model(folder / "model", dtype="float32")
    with pytest.raises(AdapterError, match="this base is not quantized"):
        dense.generate("a", adapters={"a": str(folders[0])}, max_new_tokens=1)
    with pytest.raises(AdapterError, match="is relative to a base in nf4"):
        export_gguf(folders[0], tmp_path / "out.gguf", base=str(folder / "model"))
    further = LoraJob(
        name="b", data=loftq.data, steps=1, max_length=64, init_from=str(folders[0])
    )
    with pytest.raises(AdapterError, match="this base is not quantized"):
        Trainer(run_config(folder, [further], "b", quantize_base=None))


@pytest.mark.grid
def test_at_the_largest_rank_it_starts_as_the_base_that_is_not_quantized(folder):
    """Where all of the error fits into A B, and all linears are adapted."""
    every = {"target_modules": "all-linear", "steps": 1, "rank": 64}
    runs = {
        "nf4": job(folder, **every),
        None: job(folder, init_lora_weights=True, **every),
    }
    losses = []
    for base, one in runs.items():
        config = run_config(folder, [one], f"whole-{base}", quantize_base=base)
        losses.append(Trainer(config).train().jobs[0].progress.first_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.grid
@pytest.mark.needs_devices(2)
def test_a_mesh_starts_it_alike(folder):
    """It starts from weights that are divided among devices."""
    starts = []
    for mesh in ("fsdp=1", "fsdp=2"):
        still = job(folder, learning_rate=0.0, steps=1)
        config = run_config(folder, [still], f"start-{mesh}", mesh=mesh)
        result = Trainer(config).train()
        path = result.jobs[0].folder / "adapter_model.safetensors"
        starts.append(safetensors.numpy.load_file(path))
    for key, array in starts[0].items():
        np.testing.assert_array_equal(starts[1][key], array)


def _check_merged(folder, adapter_folder, adapter, tmp_path) -> None:
    """Adapted weights are Q(W) + s A B, and others are W."""
    out = merge_adapter(folder / "model", adapter_folder, tmp_path / "merged")
    before, after = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (folder / "model", out)
    )
    for name, w in before.items():
        weights = adapter.modules.get(name.removesuffix(".weight"))
        if weights is None:
            np.testing.assert_array_equal(after[name], w)
            continue
        wanted = dequantized(w, "nf4") + 2 * (weights.a @ weights.b).T
        np.testing.assert_allclose(after[name], wanted, atol=1e-6)
        # The start is nearer to W than the quantized weight is.
        assert np.linalg.norm(wanted - w) < np.linalg.norm(dequantized(w, "nf4") - w)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loftq_config": {"loftq_iter": 5}}, "would quantize the base anew"),
        ({"loftq_config": {"loftq_bits": 2}}, "loftq_bits=2 must be 4 .nf4. or 8"),
        ({"loftq_config": {"bits": 4}}, "it has 'bits'; its settings are loftq_bits"),
        (
            {"loftq_config": {"loftq_bits": 4}, "init_lora_weights": True},
            "it needs init_lora_weights: loftq",
        ),
        ({"use_dora": True}, "use_dora and init_lora_weights=loftq cannot be combined"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, **settings)


@pytest.mark.parametrize(
    ("base", "stored"),
    [
        ({"quantize_base": None}, "is not quantized. Set quantize_base: nf4"),
        ({"quantize_base": "int8"}, "is int8. Set quantize_base: nf4"),
        ({"keep_bf16": ("down_proj",)}, "down_proj is not quantized"),
    ],
)
def test_the_base_needs_its_format(folder, base, stored):
    with pytest.raises(ConfigError, match=stored):
        Trainer(run_config(folder, [job(folder)], "refused", **base))
