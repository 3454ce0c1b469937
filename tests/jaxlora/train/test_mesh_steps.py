"""On every stage, an optimizer step sees all of its global batch and nothing else."""

from typing import Any

import pytest

from jaxlora import Trainer
from jaxlora.scheduler import Pipeline
from jaxlora.train.execute.executor import Executor
from jaxlora.train.execute.feed import Feed
from tests.jaxlora.train.pass_log import PassLog, RunLog

pytestmark = pytest.mark.needs_devices(3)

STAGES = {"stage=2": {}, "stage=3": {"pipeline_microbatches": 5}}


@pytest.fixture
def logged(meshes, mesh_jobs, monkeypatch):
    """Trains on a mesh; returns the log of its passes, and the number of stages."""

    def run(mesh: str):
        settings: dict[str, Any] = dict(STAGES[mesh])
        if mesh == "stage=3":
            settings["model"] = str(meshes.three_layers)
        trainer = Trainer(meshes.config(mesh, mesh_jobs, **settings))
        log = PassLog(trainer.layout, monkeypatch)
        begin, take = Executor.run, Feed.take

        def begun(self, *args):
            log.runs.append(RunLog())
            return begin(self, *args)

        def taken(self):
            log.runs[-1].ticks.append(self._fetched[0][0])
            return take(self)

        monkeypatch.setattr(Executor, "run", begun)
        monkeypatch.setattr(Feed, "take", taken)
        trainer.train()
        return log, len(trainer.layout.stages)

    return run


@pytest.mark.parametrize(
    "mesh", ["stage=2", pytest.param("stage=3", marks=pytest.mark.grid)]
)
def test_every_pass_reads_the_weights_of_its_batch(logged, mesh, mesh_jobs):
    """Batches of several ticks, and jobs of 3 to 5 steps, without a break."""
    log, num_stages = logged(mesh)
    assert len(log.runs) == 1
    assert log.wrong() == []
    num_steps = sum(len(run.steps) for run in log.runs)
    assert num_steps == num_stages * sum(job.steps for job in mesh_jobs)


@pytest.mark.parametrize(
    "mesh", ["stage=2", pytest.param("stage=3", marks=pytest.mark.grid)]
)
def test_batches_that_are_closer_read_old_weights(logged, mesh, monkeypatch):
    """The negative control: the distance between batches is one tick too small."""

    def closer(num_stages, in_flight=None):
        width = in_flight or num_stages
        return Pipeline(num_stages=num_stages, distance=width - 1, in_flight=in_flight)

    monkeypatch.setattr(Pipeline, "one_f_one_b", closer)
    log, _ = logged(mesh)
    assert any("reads weights of step" in line for line in log.wrong())
