"""Runs with two microbatches side by side train what one device trains."""

import pytest

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
