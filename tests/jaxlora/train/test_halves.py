"""Runs with two microbatches side by side train what one device trains."""

import pytest

from jaxlora.costs.device_speed import find_speed
from jaxlora.costs.links import make_links
from jaxlora.memory.mesh import estimated_footprint
from jaxlora.plan import plan_run
from jaxlora.train.plan.auto_mesh.predict import Rates, shape_seconds
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.test_tensor import on

pytestmark = pytest.mark.needs_devices(2)


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param(*on("tensor=2").values, {}),
        pytest.param(*on("tensor=2").values, {"remat": "mlp"}, marks=pytest.mark.grid),
        pytest.param(
            *on("tensor=2").values, {"layers_per_program": 1}, marks=pytest.mark.grid
        ),
        pytest.param(
            "stage=2,tensor=2",
            {},
            marks=[pytest.mark.needs_devices(4), pytest.mark.grid],
        ),
        pytest.param(
            "data=2,tensor=4",
            {},
            marks=[pytest.mark.needs_devices(8), pytest.mark.grid],
        ),
    ],
)
def test_a_mesh_trains_what_one_device_trains(meshes, mesh_jobs, mesh, settings):
    """Jobs of all lengths, ranks, targets and rates, with dropout and evaluations."""
    one = meshes.once("fsdp=1", mesh_jobs)
    other = meshes.train(mesh, mesh_jobs, overlap_halves=True, **settings)
    lanes = 4 if "data=2" in mesh else 2
    assert other.trainer.layout.num_lanes == lanes
    assert_same_on_meshes(one, other)


@pytest.mark.usefixtures("memory_by_formula")
def test_the_plan_counts_both(meshes, mesh_jobs):
    """A device keeps both microbatches, and takes the time of both."""
    one, two = (
        plan_run(meshes.config("tensor=2", mesh_jobs, overlap_halves=halves)).plan
        for halves in (False, True)
    )
    a, b = (estimated_footprint(p.stages, 16, 128).stages[0] for p in (one, two))
    assert b.bytes_per_token == pytest.approx(2 * a.bytes_per_token)
    assert b.transient_bytes_per_token > a.transient_bytes_per_token
    assert b.resident_bytes == a.resident_bytes
    assert (one.lanes.num_lanes, two.lanes.num_lanes) == (1, 2)
    rates = Rates(links=make_links(find_speed("NVIDIA H200"), 2))
    times = [shape_seconds(p.stages, 128, rates).stages[0].forward for p in (one, two)]
    assert times[1](128.0, 0.0) == pytest.approx(2 * times[0](128.0, 0.0))
