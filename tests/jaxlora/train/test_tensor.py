"""Devices that share each microbatch train the adapters that one device trains."""

import pytest

from tests.jaxlora.train.mesh_runs import assert_same_on_meshes

pytestmark = pytest.mark.needs_devices(8)


@pytest.mark.parametrize(
    "mesh",
    [
        "tensor=2",
        "tensor=4",
        "fsdp=2,tensor=2",
        "stage=2,tensor=2",
        "data=2,tensor=2",
        "fsdp=2,tensor=4",
        "stage=2,fsdp=2,tensor=2",
    ],
)
def test_a_mesh_trains_what_one_device_trains(meshes, mesh_jobs, mesh):
    """Jobs of all lengths, ranks, targets and rates, with dropout."""
    one = meshes.once("fsdp=1", mesh_jobs)
    assert_same_on_meshes(one, meshes.once(mesh, mesh_jobs))
