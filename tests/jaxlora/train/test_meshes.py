"""A run on any mesh trains the adapters that one device trains."""

import pytest

from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.runs import assert_same_bits, outcome

pytestmark = pytest.mark.needs_devices(8)

DEEP = {"pipeline_microbatches": 3, "remat": "mlp"}
SHAPES = {"microbatch_shapes": [96], "shape_compile_seconds": 0.5}


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("fsdp=2", {}, marks=pytest.mark.grid),
        pytest.param("data=2", {}, marks=pytest.mark.grid),
        pytest.param("stage=2,fsdp=2", {}, marks=pytest.mark.grid),
        # With more ticks in flight than stages.
        ("stage=2", SHAPES | {"pipeline_microbatches": 3}),
        pytest.param("data=2,stage=2,tensor=2", DEEP | SHAPES, marks=pytest.mark.grid),
    ],
)
def test_a_mesh_trains_what_one_device_trains(meshes, mesh_jobs, mesh, settings):
    """Jobs of all lengths, ranks, targets and rates, with dropout."""
    one = meshes.once("fsdp=1", mesh_jobs)
    other = meshes.once(mesh, mesh_jobs, **settings)
    assert_same_on_meshes(one, other)


@pytest.mark.grid
def test_three_stages(meshes, mesh_jobs):
    """They have a layer each, with more ticks in flight than stages, or two and one."""
    settings = {"model": str(meshes.three_layers), "pipeline_microbatches": 5}
    one = meshes.once("fsdp=1", mesh_jobs, model=settings["model"])
    for mesh in ("stage=3", "stage=2"):
        assert_same_on_meshes(one, meshes.once(mesh, mesh_jobs, **settings))


def test_batches_with_fewer_samples_than_devices(meshes, small_jobs):
    one = meshes.once("fsdp=1", small_jobs)
    other = meshes.once("data=2,stage=2,fsdp=2", small_jobs)
    assert_same_on_meshes(one, other)


def test_norms_are_over_all_stages(meshes, mesh_jobs):
    """Jobs whose gradients are on one stage only are clipped, and learn there."""
    outcome = meshes.once("stage=2", mesh_jobs)
    first, last = (set(stage.spec.adapted) for stage in outcome.trainer.layout.stages)
    for name, stage, other in [("job0", first, last), ("job3", last, first)]:
        paths = {m.removeprefix("model.") for m in outcome.adapters[name]}
        assert paths <= stage and not paths & other
        assert all(norm > 0.05 for norm in outcome.norms[name])


@pytest.mark.parametrize(
    "mesh", [pytest.param("stage=2", marks=pytest.mark.grid), "data=2,stage=2,fsdp=2"]
)
def test_same_bits_twice(meshes, small_jobs, mesh):
    """Also if the weights come from one device and not from the disk."""
    one = meshes.once(mesh, small_jobs)
    two = outcome(meshes.config(mesh, small_jobs), meshes.model)
    assert_same_bits(one, two)
