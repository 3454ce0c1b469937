"""Meshes: their sizes in words, and the devices of each stage."""

import logging
import os

import jax
import pytest

from jaxlora.sharding import layerwise
from jaxlora.sharding import mesh as mesh_module
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("fsdp=1", MeshSizes()),
        ("fsdp=4", MeshSizes(fsdp=4)),
        ("stage=2,fsdp=2", MeshSizes(stage=2, fsdp=2)),
        ("data=2,stage=3,fsdp=4", MeshSizes(data=2, stage=3, fsdp=4)),
    ],
)
def test_words_and_sizes_are_equivalent(words, sizes):
    assert MeshSizes.parse(words) == sizes
    assert str(sizes) == words


def test_order_and_spaces_do_not_matter():
    assert MeshSizes.parse(" fsdp = 04 ,stage=2") == MeshSizes(stage=2, fsdp=4)
    assert str(MeshSizes.parse("fsdp=4,data=1,stage=2")) == "stage=2,fsdp=4"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("", "the mesh is empty. Give its sizes, such as fsdp=4"),
        ("  ", "the mesh is empty"),
        ("fsdp", "the word 'fsdp', which is not axis=number"),
        ("fsdp=2,", "the word '', which is not axis=number"),
        ("model=2", "no axis 'model'. The axes are data, stage, fsdp, expert, tensor"),
        ("fsdp=2,fsdp=2", "gives a size for fsdp twice"),
        ("fsdp=0", "'0' is not a positive whole number"),
        ("stage=-1", "'-1' is not a positive whole number.*such as stage=2"),
        ("stage=1.5", "'1.5' is not a positive whole number"),
        ("stage=²", "'²' is not a positive whole number"),
        (
            "stage=" + "9" * 5000,
            "not a positive whole number of devices of a m.*such as stage=2",
        ),
    ],
)
def test_words_that_are_refused(words, match):
    with pytest.raises(ValueError, match=match):
        MeshSizes.parse(words)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_refused(size):
    with pytest.raises(ValueError, match=f"stage={size} is not a positive whole"):
        MeshSizes(stage=size)


def test_numbers_of_devices():
    sizes = MeshSizes(data=2, stage=3, fsdp=4, expert=2, tensor=5)
    assert (sizes.num_devices, sizes.num_lanes) == (240, 16)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("stage=2,fsdp=4", "stage=2,fsdp=4 needs 2 x 4 = 8 devices and this machine "),
        ("data=5", "data=5 needs 5 devices and this machine has 4: make one of its"),
    ],
)
def test_a_mesh_larger_than_the_machine(words, match):
    sizes = MeshSizes.parse(words)
    with pytest.raises(ValueError, match=match):
        sizes.check_fits(4)
    sizes.check_fits(sizes.num_devices)


def test_the_stages_of_a_mesh(monkeypatch, caplog):
    """Devices are taken along tensor, expert, fsdp, data, and then the stages."""

    def grids(words: str, num_devices: int) -> list:
        monkeypatch.setattr(mesh_module.jax, "devices", lambda: range(num_devices))
        meshes = stage_meshes(MeshSizes.parse(words))
        axes = "data", "fsdp", "expert", "tensor"
        assert all(mesh.axis_names == axes for mesh in meshes)
        return [mesh.devices.tolist() for mesh in meshes]

    with caplog.at_level(logging.INFO, "jaxlora.sharding"):
        assert grids("data=2,stage=2,fsdp=3", 12) == [
            [[[[0]], [[1]], [[2]]], [[[3]], [[4]], [[5]]]],
            [[[[6]], [[7]], [[8]]], [[[9]], [[10]], [[11]]]],
        ]
        assert grids("fsdp=2,tensor=2", 4) == [[[[[0, 1]], [[2, 3]]]]]
        assert grids("fsdp=2,expert=2", 4) == [[[[[0], [1]], [[2], [3]]]]]
        assert not caplog.records
        assert grids("stage=2", 3) == [[[[[0]]]], [[[[1]]]]]
    assert caplog.messages == ["mesh stage=2: uses 2 of 3 devices: 0, 1"]


def test_one_device_is_a_mesh():
    [mesh] = stage_meshes(MeshSizes())
    assert mesh.shape == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert mesh.devices.tolist() == [[[[jax.devices()[0]]]]]


def test_a_machine_with_too_few_devices():
    with pytest.raises(ValueError, match="needs 2 x 2 = 4 devices and this machine"):
        stage_meshes(MeshSizes(stage=2, fsdp=2), jax.devices()[:1])


@pytest.mark.needs_devices(2)
@pytest.mark.parametrize(("set_by_user", "policy"), [(None, "2"), ("0", "0")])
def test_gathers_use_the_copy_engines_unless_the_user_chose(
    monkeypatch, set_by_user, policy
):
    monkeypatch.setattr(layerwise, "has_symmetric_buffers", lambda: True)
    monkeypatch.setenv("NCCL_CTA_POLICY", "")  # is restored after the test
    monkeypatch.delenv("NCCL_CTA_POLICY")
    if set_by_user is not None:
        monkeypatch.setenv("NCCL_CTA_POLICY", set_by_user)
    stage_meshes(MeshSizes.parse("stage=2"))
    assert os.environ.get("NCCL_CTA_POLICY") == set_by_user
    stage_meshes(MeshSizes.parse("fsdp=2"))
    assert os.environ["NCCL_CTA_POLICY"] == policy


def test_a_cpu_has_no_symmetric_buffers():
    assert not layerwise.has_symmetric_buffers()
