"""A job that diverges on one stage fails on all of them, and no other job notices."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes
from tests.jaxlora.train.runs import Outcome

pytestmark = pytest.mark.needs_devices(2)


def without(outcome: Outcome, name: str) -> Outcome:
    """Returns an outcome without a job."""
    left = copy.copy(outcome)
    for kind in ("progress", "adapters"):
        values = getattr(outcome, kind)
        setattr(left, kind, {n: v for n, v in values.items() if n != name})
    return left


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.grid), 1])
def test_a_gradient_that_is_infinite_on_one_stage(meshes, mesh_jobs, stage):
    """The loss is finite: only the norm over all stages tells it."""
    slot, name, spoilt = 1, "job1", []
    jobs = [job.replace(steps=8) for job in mesh_jobs]

    def on_window(trainer):
        if trainer.round > 1:
            return
        table = trainer.slots.tables[stage]
        pending = table.state.pending
        gradients = dict(pending.gradients)
        path, array = next(iter(gradients.items()))
        spoiled = array.at[slot, 0, 0, 0].set(jnp.inf)
        gradients[path] = jax.device_put(spoiled, array.sharding)
        pending = dataclasses.replace(pending, gradients=gradients)
        table.state = dataclasses.replace(table.state, pending=pending)
        spoilt.append(path)

    calm = meshes.once("stage=2", jobs)
    failed = meshes.train("stage=2", jobs, window_steps=1, on_window=on_window)
    assert len(spoilt) == 1
    assert_empty_slot(failed.trainer, slot)
    progress = failed.progress.pop(name)
    assert progress.status == "failed" and 1 <= progress.step <= 4
    words = f"with gradient norm inf in step {progress.step + 1} is not finite"
    assert words in progress.reason
    assert "loss nan" not in progress.reason and "loss inf" not in progress.reason
    assert_same_on_meshes(without(calm, name), without(failed, name))
