"""A job that diverges on one stage fails on all of them, and no other job notices."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.jaxlora.train.mesh_runs import assert_empty_slot

pytestmark = pytest.mark.needs_devices(2)


@pytest.mark.parametrize("number", [0, 3], ids=["first stage", "last stage"])
def test_a_job_on_one_stage_that_diverges(meshes, mesh_jobs, number):
    """All steps are in one window, so the rows of the other jobs do not move."""

    def with_rate(rate, **more):
        changes = {"learning_rate": rate, "steps": 6}
        jobs = list(mesh_jobs)
        jobs[number] = jobs[number].model_copy(update=changes)
        return meshes.train("stage=2", jobs, window_steps=6, **more)

    def on_window(trainer):
        assert_empty_slot(trainer, slots[name])

    name = mesh_jobs[number].name
    slots = {job.name: slot for slot, job in enumerate(mesh_jobs)}
    calm, failed = with_rate(1e-3), with_rate(1e30, on_window=on_window)
    progress = failed.progress.pop(name)
    assert progress.status == "failed" and progress.step < 5
    assert "is not finite; lower learning_rate or set max_grad_norm" in progress.reason
    assert name not in failed.bytes
    for other in failed.progress:
        assert failed.bytes[other] == calm.bytes[other]
        assert failed.losses[other] == calm.losses[other]
        assert failed.norms[other] == calm.norms[other]
        # Evaluations are packed with the jobs that are evaluated then.
        assert failed.evals[other] == pytest.approx(calm.evals[other], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_is_infinite_on_one_stage(meshes, mesh_jobs, stage):
    """The loss is finite: only the norm over all stages tells it."""
    slot, name, spoilt = 1, "job1", []

    def on_window(trainer):
        tables = trainer.slots.tables
        if trainer.round > 3:
            assert_empty_slot(trainer, slot)
            return
        table = tables[stage]
        pending = table.state.pending
        gradients = dict(pending.gradients)
        path, array = next(iter(gradients.items()))
        spoiled = array.at[slot, 0, 0, 0].set(jnp.inf)
        gradients[path] = jax.device_put(spoiled, array.sharding)
        pending = dataclasses.replace(pending, gradients=gradients)
        table.state = dataclasses.replace(table.state, pending=pending)
        spoilt.append(path)

    calm = meshes.once("stage=2", mesh_jobs, window_steps=3)
    failed = meshes.train("stage=2", mesh_jobs, window_steps=3, on_window=on_window)
    assert len(spoilt) == 1
    progress = failed.progress.pop(name)
    assert (progress.status, progress.step) == ("failed", 3)
    assert "with gradient norm inf in step 4 is not finite" in progress.reason
    assert "loss nan" not in progress.reason and "loss inf" not in progress.reason
    for other in failed.progress:
        assert failed.bytes[other] == calm.bytes[other]
        assert failed.losses[other] == calm.losses[other]
