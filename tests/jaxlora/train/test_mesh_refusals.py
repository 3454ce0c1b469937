"""Meshes that a run cannot have are refused before anything is written."""

import json
import pathlib

import pytest

from jaxlora import Trainer, load_run
from jaxlora.errors import ConfigError

pytestmark = pytest.mark.needs_devices(8)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fsdp=16", r"mesh: .* needs 16 devices and this machine has 8"),
        ("data=2,stage=3,fsdp=2", r"mesh: .* = 12 devices and this machine has 8"),
        ("stage=4", "mesh: stage=4 needs a layer for each stage, and the model has 2"),
        ("fsdp=5", "mesh: .* cannot be divided among fsdp=5 devices"),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_mesh_that_does_not_fit(meshes, mesh_jobs, mesh, message, is_loaded):
    """Whether the weights are read for this run or were loaded before."""
    config = meshes.config(mesh, mesh_jobs)
    with pytest.raises(ConfigError, match=message):
        Trainer(config, meshes.model if is_loaded else None)
    assert not pathlib.Path(config.output_dir).exists()


def test_too_few_microbatches_in_flight(meshes, mesh_jobs, tmp_path):
    config = meshes.config("stage=2", mesh_jobs, pipeline_microbatches=2)
    settings = config.model_dump(mode="json") | {"pipeline_microbatches": 1}
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps(settings))
    message = "pipeline_microbatches=1 is less than the 2 stages of mesh stage=2"
    with pytest.raises(ConfigError, match=message):
        load_run(run_file)
    assert not pathlib.Path(config.output_dir).exists()


def test_a_refused_resume_leaves_the_run_as_it_is(meshes, mesh_jobs):
    done = meshes.once("stage=2", mesh_jobs)
    folder = done.result.output_dir
    before = files(folder)
    config = meshes.config("stage=4", mesh_jobs, output_dir=str(folder))
    with pytest.raises(ConfigError, match="stage=4 needs a layer for each stage"):
        Trainer(config).train(resume=True)
    assert files(folder) == before


def files(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
