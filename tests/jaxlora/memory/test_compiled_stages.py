"""The estimate of a mesh's memory beside what XLA reports for H200s."""

import json

import pytest

from tests.deviceless import compile_deviceless

MESHES = ("stage=2", "data=2,stage=2", "stage=2,fsdp=2", "stage=4")


def test_every_stage_is_estimated_within_5_percent(tmp_path):
    """Two layers of Llama-3.1-8B on each stage, microbatches of 8,192 tokens."""
    out = tmp_path / "found.json"
    compile_deviceless("tests.jaxlora.memory.h200_stages", out, "none", *MESHES)
    found = json.loads(out.read_text())
    assert list(found) == list(MESHES)
    for mesh, stages in found.items():
        for number, stage in enumerate(stages):
            near = pytest.approx(stage["compiled"], rel=0.05)
            assert stage["estimated"] == near, f"stage {number} of {mesh}"
