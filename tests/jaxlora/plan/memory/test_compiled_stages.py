"""The estimate of a mesh's memory beside what XLA reports for H200s."""

import json

import pytest

from tests.deviceless import compile_deviceless

MESHES = {
    "none": ("stage=2", "data=2,stage=2", "stage=2,fsdp=2", "stage=4", "tensor=2"),
    "mlp": ("stage=2",),
    "layer": ("stage=2",),
}


@pytest.mark.grid  # half an hour of compiling
@pytest.mark.parametrize("remat", MESHES)
def test_every_stage_is_estimated_within_5_percent(remat, tmp_path):
    """Two layers of Llama-3.1-8B on each stage, microbatches of 8,192 tokens."""
    out = tmp_path / "found.json"
    meshes = MESHES[remat]
    compile_deviceless("tests.jaxlora.plan.memory.h200_stages", out, remat, *meshes)
    found = json.loads(out.read_text())
    assert tuple(found) == meshes
    for mesh, stages in found.items():
        for number, stage in enumerate(stages):
            near = pytest.approx(stage["compiled"], rel=0.05)
            assert stage["estimated"] == near, f"stage {number} of {mesh}"
