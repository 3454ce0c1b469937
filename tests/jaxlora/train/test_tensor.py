"""Devices that share each microbatch train the adapters that one device trains."""

import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import Trainer
from jaxlora.forecast import plan_run
from tests.jaxlora.train.mesh_runs import (
    ADAM_ROUNDING,
    CONFIG,
    assert_same_on_meshes,
    write_untied,
)
from tests.jaxlora.train.runs import InterruptAt, Outcome, events_of, outcome
from tests.oracle import relative_error

pytestmark = pytest.mark.needs_devices(2)


@pytest.mark.grid
def test_optimizers_that_combine_elements_and_dora(meshes, mesh_jobs):
    """Such optimizers need whole matrices, of which each device has a part."""
    names = "adafactor", "muon", "schedule_free_adamw", "sgd"
    plain = {"adam_eps": 1e-8, "lr_schedule": "constant", "weight_decay": 0.0}
    jobs = [
        job.replace(optimizer=name, use_dora=name == "muon", **plain)
        for job, name in zip(mesh_jobs, names, strict=True)
    ]
    one, other = (meshes.train(mesh, jobs) for mesh in ("fsdp=1", "tensor=2"))
    assert_same_on_meshes(one, other)


@pytest.fixture(scope="module")
def variants(mesh_jobs, tmp_path_factory):
    """Jobs with VeRA, and with rows of the embedding and of the head, and a base with
    biases; with dropout and evaluations."""
    folder = tmp_path_factory.mktemp("variants") / "base"
    config = CONFIG | {"num_hidden_layers": 1, "attention_bias": True}
    write_untied(folder, config)
    path = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    rng = np.random.default_rng(0)
    for name, size in {"q": 32, "k": 16, "v": 16, "o": 32}.items():
        key = f"model.layers.0.self_attn.{name}_proj.bias"
        weights[key] = rng.normal(size=size, scale=0.1).astype(np.float32)
    safetensors.numpy.save_file(weights, path, {"format": "pt"})
    # Divided by outputs and by inputs.
    targets = {"target_modules": ("q_proj", "o_proj")}
    rows = {"embed_tokens": [67, 68, 97], "lm_head": [35, 97, 200]}
    vera = {"use_vera": True, "lora_alpha": 32.0, "use_rslora": False, "rank": 6}
    plain = {"weight_decay": 0.0, "lora_plus_ratio": 1.0}
    kinds = vera, {"trainable_token_indices": rows}
    jobs = [
        job.replace(**targets | {"dropout": 0.1} | plain | kind)
        for job, kind in zip(mesh_jobs, kinds, strict=False)
    ]
    return jobs, {
        "model": str(folder),
        "slot_targets": None,
        "max_concurrent_jobs": 2,
        "window_steps": 1,
        "checkpoint_every": 1,
    }


def assert_same_tensors(one: Outcome, other: Outcome) -> None:
    """Compares whole folders, with rows of tokens."""
    for name in one.bytes:
        ours, theirs = (safetensors.numpy.load(x.bytes[name]) for x in (one, other))
        assert ours.keys() == theirs.keys()
        for key, array in ours.items():
            assert relative_error(array, theirs[key]) < ADAM_ROUNDING, (name, key)


def texts(outcome: Outcome) -> list[tuple]:
    events = events_of(outcome.trainer.output_dir)
    found = [e for e in events if e["event"] == "sample"]
    return [(e["job"], e["step"], e["text"]) for e in found]


def test_variants_and_rows_of_tokens_also_after_a_change_of_mesh(
    meshes, variants, tmp_path
):
    jobs, settings = variants
    one, whole = (meshes.train(m, jobs, **settings) for m in ("fsdp=1", "tensor=2"))
    assert_same_on_meshes(one, whole)
    assert_same_tensors(one, whole)
    config = meshes.config("tensor=2", jobs, **settings)
    assert Trainer(config).train(callbacks=[InterruptAt(1)]).interrupted
    for mesh, wanted in (("tensor=2", whole), ("fsdp=1", one)):
        folder = shutil.copytree(config.output_dir, tmp_path / mesh)
        other = config.replace(mesh=mesh, output_dir=str(folder))
        resumed = outcome(other, resume=True)
        assert_same_tensors(wanted, resumed)
        assert (resumed.bytes == wanted.bytes) == (mesh == "tensor=2")


@pytest.mark.usefixtures("memory_by_formula")
def test_the_plan_counts_variants(meshes, variants):
    jobs, settings = variants
    one, other = (
        plan_run(meshes.config(mesh, jobs, **settings)).memory
        for mesh in ("fsdp=1", "tensor=2")
    )
    assert one.adapter_bytes / 2 < other.adapter_bytes < one.adapter_bytes


@pytest.mark.grid
def test_texts_of_variants(meshes, variants):
    jobs, settings = variants
    settings = settings | {"samples": {"prompts": ["abc"], "max_new_tokens": 4}}
    one, other = (meshes.train(m, jobs, **settings) for m in ("fsdp=1", "tensor=2"))
    assert texts(one) == texts(other) != []


@pytest.mark.usefixtures("memory_by_formula")
def test_the_plan_says_what_adapters_add(meshes, mesh_jobs):
    one, other = (plan_run(meshes.config(m, mesh_jobs)) for m in ("fsdp=1", "tensor=2"))
    text = ": the adapter of job1 adds "
    assert [text in note.text for note in other.plan.notes].count(True) == 1
    assert not any(text in note.text for note in one.plan.notes)
    assert other.memory.base_bytes < one.memory.base_bytes
    assert other.memory.adapter_bytes < one.memory.adapter_bytes


@pytest.mark.needs_devices(8)
def test_quantized_keys_that_devices_share_and_divide(meshes, mesh_jobs):
    """Two heads of keys on four devices, whose weights, N K, `fsdp` divides, too."""
    settings = {"quantize_base": "int8", "slot_targets": r".*\.0\.self_attn\..*"}
    jobs = [job.replace(target_modules=["q_proj", "v_proj"]) for job in mesh_jobs[:2]]
    one, divided = (
        meshes.train(mesh, jobs, **settings) for mesh in ("fsdp=1", "fsdp=2,tensor=4")
    )
    assert_same_on_meshes(one, divided)
