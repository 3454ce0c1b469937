"""A run on a mesh that is interrupted or killed, and continues on any mesh."""

import shutil

import pytest

from jaxlora import Trainer
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.train.saved.read_checkpoint import read_newest
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.runs import InterruptAt, Outcome, assert_same_bits, outcome

pytestmark = pytest.mark.needs_devices(2)

MESH = "stage=2"


@pytest.fixture(scope="module")
def interrupted(meshes, mesh_jobs):
    """The folder of a run that Ctrl-C has ended in the middle of batches."""
    config = meshes.config(MESH, mesh_jobs, window_steps=1)
    trainer = Trainer(config)
    result = trainer.train(callbacks=[InterruptAt(1)])
    outcome = Outcome(trainer, result)
    assert outcome.result.interrupted
    found = read_newest(outcome.result.output_dir / CHECKPOINTS)
    assert found.run.stream is not None and found.run.stream.repeated
    return outcome.result.output_dir


@pytest.fixture
def resume(meshes, mesh_jobs):
    """Resumes a run on a mesh."""

    def run(folder, mesh: str) -> Outcome:
        settings = {"output_dir": str(folder), "window_steps": 1}
        config = meshes.config(mesh, mesh_jobs, **settings)
        return outcome(config, resume=True)

    return run


@pytest.mark.parametrize(
    "mesh",
    [
        MESH,
        pytest.param("fsdp=2", marks=pytest.mark.grid),
        "fsdp=1",
        pytest.param("data=2", marks=pytest.mark.grid),
    ],
)
def test_an_interrupted_run_continues_on_any_mesh(
    meshes, mesh_jobs, interrupted, resume, tmp_path, mesh
):
    whole = meshes.once(MESH, mesh_jobs, window_steps=1)
    resumed = resume(shutil.copytree(interrupted, tmp_path / "run"), mesh)
    assert_same_on_meshes(whole, resumed)
    if mesh == MESH:
        assert_same_bits(resumed, whole)
