"""The dimension along which each weight is divided."""

import pytest
from jax.sharding import PartitionSpec

from jaxlora.sharding.rules import shard_dim, weight_spec


@pytest.mark.parametrize(
    ("shape", "fsdp", "dims", "wanted"),
    [
        ((64, 128), 8, (0, 1), 0),
        ((63, 64), 8, (0, 1), 1),
        ((64, 64), 8, (1,), 1),
        ((64, 64), 1, (0, 1), None),
        ((64,), 8, (0, 1), None),
        ((63,), 8, (0, 1), None),
    ],
)
def test_the_first_dimension_that_can_be_divided(shape, fsdp, dims, wanted):
    assert shard_dim("w", shape, fsdp, dims=dims) == wanted


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        ((0, 1), r"w of shape \(63, 65\) cannot .* fsdp=4 devices: 63 and 65 must be"),
        ((1,), r"fsdp=4 devices: 65 must be a multiple of it. Choose an fsdp"),
    ],
)
def test_a_weight_that_cannot_be_divided(dims, match):
    with pytest.raises(ValueError, match=match):
        shard_dim("w", (63, 65), 4, dims=dims)


def test_placements():
    assert weight_spec(None) == PartitionSpec()
    assert weight_spec(0) == PartitionSpec("fsdp")
    assert weight_spec(1) == PartitionSpec(None, "fsdp")
    assert weight_spec(None, 1) == PartitionSpec(None, "tensor")
    assert weight_spec(0, 1) == PartitionSpec("fsdp", "tensor")
    assert weight_spec(0, 0) == PartitionSpec(("tensor", "fsdp"))
