"""A decoder in segments trains what it trains as one program."""

import pytest

from tests import tiny
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers."""
    folder = tmp_path_factory.mktemp("base") / "five"
    tiny.write_model(folder, config=tiny.CONFIG | {"num_hidden_layers": 5})
    return folder


def test_segments(meshes, mesh_jobs, deep):
    settings = {"model": str(deep)}
    one = meshes.once("fsdp=1", mesh_jobs, **settings)
    other = meshes.once("fsdp=1", mesh_jobs, layers_per_program=2, **settings)
    print(
        one.bytes == other.bytes, one.losses == other.losses, one.norms == other.norms
    )
    print(one.result.num_compilations, other.result.num_compilations)
    assert_same_on_meshes(one, other)
