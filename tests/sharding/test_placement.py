"""Tests the placement of parameters, including loading on eight devices."""

import os
import subprocess
import sys

import pytest
from jax.sharding import PartitionSpec

from jaxlora.sharding.rules import fsdp_spec
from tests import tiny


@pytest.mark.parametrize(
    ("shape", "size", "wanted"),
    [
        ((64, 128), 8, PartitionSpec(None, "fsdp")),
        ((128, 64), 8, PartitionSpec("fsdp", None)),
        ((64, 64), 4, PartitionSpec("fsdp", None)),
        ((63, 64), 8, PartitionSpec(None, "fsdp")),
        ((63, 65), 8, PartitionSpec()),
        ((64, 64), 1, PartitionSpec()),
        ((), 8, PartitionSpec()),
    ],
)
def test_shards_the_longest_divisible_dimension(shape, size, wanted):
    assert fsdp_spec(shape, size) == wanted


EIGHT = """
import sys
import numpy as np
from jaxlora import load_model
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sharding.rules import fsdp_placement
whole = load_model(sys.argv[1], dtype="float32")
[mesh] = stage_meshes(MeshSizes(data=2, fsdp=4))
parts = load_model(sys.argv[1], dtype="float32", place=lambda _: fsdp_placement(mesh))
for path, array in whole.params.items():
    np.testing.assert_array_equal(array, parts.params[path])
kernel = parts.params["layers.0.mlp.up_proj.kernel"]
assert {s.data.shape for s in kernel.addressable_shards} == {(32, 12)}
assert len(kernel.sharding.device_set) == 8
"""


def test_a_checkpoint_streams_to_eight_devices(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    subprocess.run([sys.executable, "-c", EIGHT, str(folder)], env=env, check=True)
