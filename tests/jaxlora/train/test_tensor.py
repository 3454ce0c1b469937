"""Devices that share each microbatch train the adapters that one device trains."""

import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxlora import Trainer
from jaxlora.errors import ConfigError
from jaxlora.forecast import plan_run
from jaxlora.run.log import read_events
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.mesh_runs import (
    ADAM_ROUNDING,
    CONFIG,
    assert_empty_slot,
    assert_same_on_meshes,
    write_untied,
)
from tests.jaxlora.train.outcome import Outcome
from tests.oracle import relative_error

pytestmark = pytest.mark.needs_devices(2)


def on(mesh: str, *, is_slow: bool = False):
    """A mesh as a parameter, for machines with as many devices."""
    marks = [pytest.mark.needs_devices(MeshSizes.parse(mesh).num_devices)]
    return pytest.param(mesh, marks=[*marks, *[pytest.mark.grid] * is_slow])


@pytest.mark.parametrize(
    "mesh",
    [
        # Variants train on this mesh below, and such jobs on replicas of it, and of
        # four devices, in test_replicas.py.
        on("tensor=2", is_slow=True),
        on("tensor=4", is_slow=True),  # more devices than key-value heads
        on("data=2,tensor=2", is_slow=True),
        on("fsdp=2,tensor=4", is_slow=True),
        on("stage=2,fsdp=2,tensor=2", is_slow=True),
    ],
)
def test_a_mesh_trains_what_one_device_trains(meshes, mesh_jobs, mesh):
    """Jobs of all lengths, ranks, targets and rates, with dropout."""
    one = meshes.once("fsdp=1", mesh_jobs)
    assert_same_on_meshes(one, meshes.once(mesh, mesh_jobs))


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
    events = read_events(outcome.trainer.output_dir / "metrics.jsonl")
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
        trainer = Trainer(other)
        resumed = Outcome(trainer, trainer.train(resume=True), trainer.model)
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


@pytest.fixture(scope="module")
def eventful(meshes, small_jobs):
    """Trains jobs on a mesh; one is paused, one joins, and one stops early."""

    def train(mesh: str) -> Outcome:
        numbers = iter(range(100))
        late = small_jobs[1].model_copy(update={"name": "late", "keep_best": False})

        def on_window(trainer):
            match next(numbers):
                case 0:
                    trainer.pause_job("job3")
                case 1:
                    trainer.add_job(late)
                case 2:
                    trainer.resume_job("job3")

        jobs = [job.model_copy(update={"steps": 6}) for job in small_jobs]
        early = {"early_stopping": 2, "early_stopping_delta": 100.0, "eval_every": 1}
        jobs[0] = jobs[0].model_copy(update=early)
        return meshes.train(mesh, jobs, window_steps=1, on_window=on_window)

    return train


@pytest.mark.grid  # `test_replicas.py` has replicas of two and of four such devices
@pytest.mark.parametrize(
    "mesh",
    [
        on("tensor=2"),
        on("data=2,stage=2,tensor=2"),  # each job is on one replica
    ],
)
def test_jobs_come_and_go(eventful, mesh):
    one, other = eventful("fsdp=1"), eventful(mesh)
    assert_same_on_meshes(one, other)
    for slot in range(4):
        assert_empty_slot(other.trainer, slot)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor=2", "tensor=2"),
        ("tensor=2", "stage=2"),
        ("fsdp=1", "tensor=2"),
    ],
)
@pytest.mark.grid  # the run of variants continues on this mesh, and on one device
def test_a_run_continues_on_any_mesh(meshes, mesh_jobs, tmp_path, before, after):
    whole = meshes.once(after, mesh_jobs, window_steps=1)
    config = meshes.config(before, mesh_jobs, window_steps=1)
    assert Trainer(config).train(callbacks=[InterruptAt(1)]).interrupted
    folder = shutil.copytree(config.output_dir, tmp_path / "run")
    config = config.replace(mesh=after, output_dir=str(folder))
    trainer = Trainer(config)
    resumed = Outcome(trainer, trainer.train(resume=True), meshes.model)
    assert_same_on_meshes(whole, resumed)
    if before == after:
        assert resumed.bytes == whole.bytes
        assert resumed.losses == whole.losses


@pytest.mark.usefixtures("memory_by_formula")
def test_the_plan_says_what_adapters_add(meshes, mesh_jobs):
    one, other = (plan_run(meshes.config(m, mesh_jobs)) for m in ("fsdp=1", "tensor=2"))
    text = ": the adapter of job1 adds "
    assert [text in note.text for note in other.plan.notes].count(True) == 1
    assert not any(text in note.text for note in one.plan.notes)
    assert other.memory.base_bytes < one.memory.base_bytes
    assert other.memory.adapter_bytes < one.memory.adapter_bytes


@pytest.mark.needs_devices(3)
def test_a_mesh_that_does_not_divide_the_model(meshes, mesh_jobs):
    match = "mesh: tensor=3 does not divide num_attention_heads=4"
    with pytest.raises(ConfigError, match=match):
        Trainer(meshes.config("tensor=3", mesh_jobs))


def test_blocks_whose_rows_cannot_be_divided(meshes, mesh_jobs):
    blocks = {"block_tokens": 25, "microbatch_tokens": 125}
    match = "tensor=2 does not divide block_tokens=25"
    with pytest.raises(ConfigError, match=match):
        Trainer(meshes.config("tensor=2", mesh_jobs, **blocks))
