"""A run on a mesh that is interrupted or killed, and continues on any mesh."""

import json
import pathlib
import shutil

import pytest

from jaxlora import Trainer
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.run.log import read_events
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.mesh_runs import assert_same_on_meshes
from tests.jaxlora.train.outcome import Outcome
from tests.jaxlora.train.test_resume import killed

pytestmark = pytest.mark.needs_devices(2)

MESH = "stage=2"


@pytest.fixture(scope="module")
def interrupted(meshes, mesh_jobs):
    """The folder of a run that Ctrl-C has ended in the middle of batches."""
    config = meshes.config(MESH, mesh_jobs, window_steps=1)
    trainer = Trainer(config)
    result = trainer.train(callbacks=[InterruptAt(1)])
    outcome = Outcome(trainer, result, meshes.model)
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
        trainer = Trainer(config)
        return Outcome(trainer, trainer.train(resume=True), meshes.model)

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
        assert resumed.bytes == whole.bytes
        assert resumed.losses == whole.losses and resumed.evals == whole.evals


@pytest.mark.grid
def test_killed(meshes, mesh_jobs, resume, tmp_path):
    """kill -9 while the second checkpoint is written, so the first is complete."""
    whole = meshes.once(MESH, mesh_jobs, window_steps=1)
    config = meshes.config(MESH, mesh_jobs, checkpoint_every=1, window_steps=1)
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps(config.model_dump(mode="json")))
    events = read_events(whole.result.output_dir / "metrics.jsonl")
    kinds = [event["event"] for event in events]
    second_window = kinds.index("window", kinds.index("window") + 1)
    killed(run_file, str(second_window + 3))
    folder = pathlib.Path(config.output_dir)
    assert newest_checkpoint(folder / CHECKPOINTS) is not None
    resumed = resume(folder, MESH)
    assert resumed.bytes == whole.bytes
    assert resumed.losses == whole.losses and resumed.evals == whole.evals
