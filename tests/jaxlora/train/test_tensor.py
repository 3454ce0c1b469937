"""Devices that share each microbatch train the adapters that one device trains."""

import shutil

import pytest

from jaxlora import Trainer
from jaxlora.errors import ConfigError
from jaxlora.plan import plan_run
from jaxlora.sharding.mesh_sizes import MeshSizes
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes
from tests.jaxlora.train.outcome import Outcome

pytestmark = pytest.mark.needs_devices(2)


def on(mesh: str, *, is_slow: bool = False):
    """A mesh as a parameter, for machines with as many devices."""
    marks = [pytest.mark.needs_devices(MeshSizes.parse(mesh).num_devices)]
    return pytest.param(mesh, marks=[*marks, *[pytest.mark.grid] * is_slow])


@pytest.mark.parametrize(
    "mesh",
    [
        on("tensor=2"),
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
    names = "adafactor", "muon", "schedule_free_adamw", "adamw_8bit"
    plain = {"adam_eps": 1e-8, "lr_schedule": "constant", "weight_decay": 0.0}
    jobs = [
        job.replace(optimizer=name, use_dora=name == "muon", **plain)
        for job, name in zip(mesh_jobs, names, strict=True)
    ]
    one, other = (meshes.train(mesh, jobs) for mesh in ("fsdp=1", "tensor=2"))
    assert_same_on_meshes(one, other)


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


@pytest.mark.parametrize(
    "mesh",
    [
        on("tensor=2"),
        on("data=2,stage=2,tensor=2", is_slow=True),  # each job is on one replica
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
        pytest.param("tensor=2", "stage=2", marks=pytest.mark.grid),
        ("fsdp=1", "tensor=2"),
    ],
)
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
