"""Where a run file may ask for two microbatches side by side."""

import pytest

from jaxlora import DataConfig, LoraJob, RunConfig
from jaxlora.errors import ConfigError


def run(**settings) -> RunConfig:
    job = LoraJob(name="a", data=DataConfig(path="train.jsonl"))
    return RunConfig(model="m", jobs=(job,), **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"overlap_halves": True},
            "overlap_halves is true, and devices of mesh fsdp=1 exchange no hidden "
            "states. Leave overlap_halves out, or set a mesh with tensor=2 or more",
        ),
        (
            {"overlap_halves": True, "mesh": "fsdp=2,tensor=2"},
            "devices of mesh fsdp=2,tensor=2 gather the weights of one microbatch. "
            "Leave overlap_halves out, or set a mesh without fsdp",
        ),
        (
            {"overlap_halves": True, "mesh": "auto"},
            "mesh is auto, which does not compare it",
        ),
        (
            {"overlap_halves": True, "replicas": [{"tensor": 2}, {"count": 2}]},
            "replicas run one microbatch at a time",
        ),
        ({"overlap_halves": 2}, "overlap_halves: "),
    ],
)
def test_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        run(**settings)


def test_a_device_has_two_lanes():
    plain, halves = (run(mesh="tensor=2", overlap_halves=o) for o in ("auto", True))
    assert plain.mesh_sizes.num_lanes == 1 and not plain.may_gather
    assert halves.mesh_sizes.num_lanes == 2 and halves.may_gather
    assert halves.mesh == "tensor=2" and halves.num_devices == 2
