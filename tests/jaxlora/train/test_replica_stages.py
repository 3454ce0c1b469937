"""Replicas with pipeline stages train as one device does."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import Trainer
from jaxlora.adapters.exchange import StageRuns
from jaxlora.errors import ConfigError
from jaxlora.hf.load import load_model
from jaxlora.memory.device_memory import DeviceMemory
from jaxlora.plan import plan_run
from jaxlora.train.execute.replica import Replica
from jaxlora.train.plan import prepare_run
from jaxlora.train.plan.auto_mesh.machine import this_machine
from tests import tiny
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.mesh_runs import assert_empty_slot, assert_same_on_meshes
from tests.jaxlora.train.outcome import Outcome
from tests.jaxlora.train.test_replicas import (
    ONE,
    Runs,
    kinds_of_jobs,
    mesh,
    resumed,
    windows,
)

pytestmark = pytest.mark.needs_devices(4)


def staged(stage: int, tensor: int, tokens: int, count: int = 1) -> dict[str, int]:
    return {"stage": stage, **mesh(tensor, tokens, count)}


# A layer for each stage.
STAGES = {"replicas": (mesh(1, 192), staged(3, 1, 96))}
MORE = [
    {"replicas": (mesh(1, 192), staged(2, 2, 96), staged(3, 1, 64))},
    {"replicas": (mesh(2, 192), staged(2, 1, 64, 3))},
    {"replicas": (mesh(2, 192), staged(3, 2, 192))},
]
# Layers adapt different linears, so a stage has runs of many stacks.
TARGETS = r".*down_proj|.*\.0\..*q_proj|.*\.1\..*v_proj|.*\.[02]\..*gate_proj"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("replica_stages")
    config = tiny.CONFIG | {"num_hidden_layers": 3}
    model = load_model(
        tiny.write_model(folder / "three", config=config), dtype="float32"
    )
    return Runs(folder, model)


@pytest.fixture(scope="module")
def unlike_jobs(jobs):
    changes = {"adam_eps": 1e-4, "max_grad_norm": 0.05, "steps": 5}
    changes |= {"target_modules": TARGETS}
    return tuple(job.model_copy(update=changes) for job in (jobs[0], jobs[2], jobs[3]))


def train(runs: Runs, jobs, settings, **more) -> Outcome:
    return runs.train(jobs, **settings, **more, slot_targets=TARGETS)


@pytest.fixture(scope="module")
def one(runs, unlike_jobs) -> Outcome:
    return train(runs, unlike_jobs, ONE)


@pytest.fixture(scope="module")
def whole(runs, unlike_jobs) -> Outcome:
    return train(runs, unlike_jobs, STAGES)


def test_equals_one_device(one, whole):
    assert_same_on_meshes(one, whole)
    tokens = np.zeros(2, int)
    for window in windows(whole):
        tokens += [one["num_tokens"] for one in window["replicas"]]
    assert (tokens > 0.05 * tokens.sum()).all()


@pytest.mark.grid
@pytest.mark.needs_devices(8)
@pytest.mark.parametrize("settings", MORE)
def test_others_equal_one_device(runs, unlike_jobs, one, settings):
    assert_same_on_meshes(one, train(runs, unlike_jobs, settings))


def test_each_stage_keeps_as_many_microbatches_as_stages_behind(
    runs, unlike_jobs, monkeypatch
):
    """Backward passes come late, but before the gradients of a batch are sent."""
    run, part, waiting = Replica.run, Replica.part, []

    def watched(self, *given):
        losses = run(self, *given)
        waiting.append([len(ahead) for ahead in self._ahead])
        return losses

    def sent(self, slot):
        found = part(self, slot)
        assert found is None or not self._in_flight.ticks_of(slot)
        return found

    monkeypatch.setattr(Replica, "run", watched)
    monkeypatch.setattr(Replica, "part", sent)
    train(runs, unlike_jobs, STAGES)
    assert list(np.max(waiting, axis=0)) == [2, 1]


@pytest.mark.grid
def test_a_job_that_diverges_changes_no_other(runs, unlike_jobs):
    """Its gradients that are in flight as it leaves are discarded."""

    def with_rate(rate):
        first = unlike_jobs[0].model_copy(update={"learning_rate": rate, "steps": 2})
        late = unlike_jobs[0].model_copy(update={"name": "late", "steps": 3})
        return train(
            runs, (first, *unlike_jobs[1:], late), STAGES, max_concurrent_jobs=3
        )

    calm, failed = with_rate(1e-3), with_rate(1e30)
    assert failed.progress[unlike_jobs[0].name].status == "failed"
    assert_empty_slot(failed.trainer, 0)
    for name in [job.name for job in unlike_jobs[1:]] + ["late"]:
        assert failed.bytes[name] == calm.bytes[name]
        assert failed.losses[name] == calm.losses[name]


def test_jobs_come_and_go(runs, unlike_jobs, monkeypatch):
    """Some leave a slot while microbatches of their next batch are in flight."""
    stops = {"early_stopping": 2, "early_stopping_delta": 100.0, "eval_every": 1}
    stops |= {"batch_size": 14, "steps": 20}  # batches of several ticks
    late = unlike_jobs[1].model_copy(update={"name": "late", "steps": 6})
    given = [unlike_jobs[0].model_copy(update=stops)]
    given += [job.model_copy(update={"steps": 9}) for job in unlike_jobs[1:]]
    leaving, empty = [], Replica.empty

    def watched(self, slot, table):
        leaving.append(bool(self._in_flight.ticks_of(slot)))
        empty(self, slot, table)
        assert not self._in_flight.ticks_of(slot), "a later job gets their gradients"

    monkeypatch.setattr(Replica, "empty", watched)

    def come_and_go(settings):
        numbers = itertools.count(1)

        def on_window(trainer):
            number = next(numbers)
            if number == 2:
                trainer.add_job(late)
            pausing = given[1 + number // 2 % 2].name
            if 2 < number < 12:
                (trainer.resume_job if number % 2 else trainer.pause_job)(pausing)

        return train(runs, given, settings, on_window=on_window)

    assert_same_on_meshes(come_and_go(ONE), come_and_go(STAGES))
    assert any(leaving)


@pytest.mark.parametrize("after", [STAGES, pytest.param(ONE, marks=pytest.mark.grid)])
def test_a_run_continues(runs, unlike_jobs, whole, after):
    """With the same bits on the same replicas."""
    config = runs.config(unlike_jobs, **STAGES, slot_targets=TARGETS)
    trainer = Trainer(config, runs.model)
    assert trainer.train(callbacks=[InterruptAt(1)]).interrupted
    folder = config.output_dir
    again = resumed(runs, unlike_jobs, folder, **after, slot_targets=TARGETS)
    assert_same_on_meshes(whole, again)
    if after == STAGES:
        assert again.bytes == whole.bytes
        assert (again.losses, again.evals) == (whole.losses, whole.evals)


@pytest.mark.grid
@pytest.mark.needs_devices(8)
def test_kinds_of_jobs(runs, unlike_jobs, tmp_path):
    """Rows of a tied embedding cannot be trained with stages."""
    jobs = kinds_of_jobs(unlike_jobs, tmp_path, rows={})
    pipes = {"replicas": (mesh(1, 192), staged(2, 1, 96), staged(3, 1, 64))}
    one, other = (train(runs, jobs, settings) for settings in (ONE, pipes))
    assert_same_on_meshes(one, other)


def test_rows_of_a_tied_embedding_are_refused(runs, unlike_jobs):
    rows = {"trainable_token_indices": (100,)}
    jobs = [unlike_jobs[0].model_copy(update=rows)]
    config = runs.config(jobs, slot_targets=TARGETS, **STAGES)
    with pytest.raises(ConfigError, match="Set replicas without stage"):
        Trainer(config, runs.model)


@pytest.mark.parametrize("size", [{"microbatch_tokens": 64}, {}])
def test_too_many_stages(runs, unlike_jobs, size):
    config = runs.config(unlike_jobs, replicas=(mesh(1, 192), {"stage": 4, **size}))
    with pytest.raises(ConfigError, match="stage=4 of a replica needs a layer for eac"):
        Trainer(config, runs.model)


@pytest.mark.usefixtures("memory_by_formula")
@pytest.mark.needs_devices(8)
def test_the_size_that_fits(runs, unlike_jobs, monkeypatch):
    """It is no larger than that of the first replica, which has all layers."""
    here = dataclasses.replace(
        this_machine(), memory=DeviceMemory(num_bytes=2**22, source="a test")
    )
    monkeypatch.setattr(prepare_run, "this_machine", lambda *_: here)

    def tokens(*replicas):
        return {
            (one.stage, one.tensor): one.tokens
            for one in plan_run(
                runs.config(unlike_jobs, replicas=replicas, slot_targets=TARGETS)
            ).config.replica_shapes
        }

    found = tokens({"tensor": 2}, {"stage": 2}, {"stage": 2, "tensor": 2})
    assert found[2, 1] < found[2, 2] <= found[1, 2]
    small = tokens({"stage": 2}, mesh(2, found[2, 1] - 16))
    assert small[2, 1] == small[1, 2]


def test_stages_alone_are_refused(runs, unlike_jobs):
    config = runs.config(unlike_jobs, replicas=[{"stage": 2, "count": 2}])
    with pytest.raises(ConfigError, match="Add a replica without stage"):
        Trainer(config, runs.model)


def test_programs_of_some_layers_are_refused(runs, unlike_jobs):
    config = runs.config(unlike_jobs, layers_per_program=1, **STAGES)
    with pytest.raises(ConfigError, match="stages of a replica are programs"):
        Trainer(config, runs.model)


def test_runs_of_stages(whole):
    """Every element of the whole array is in one stage, in the order of its tables."""
    plan = whole.trainer.plan
    for further in plan.stages.further:
        found = StageRuns.of(plan.spec, further.specs)
        size = sum(np.prod(x.shape[1:]) for x in plan.spec.adapter_shapes().values())
        flat = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)
        parts = found.cut(flat)
        for spec, part in zip(further.specs, parts, strict=True):
            shapes = spec.adapter_shapes().values()
            assert part.size == sum(np.prod(x.shape[1:]) for x in shapes)
        joined, is_finite = found.join([(part, jnp.array(True)) for part in parts])
        assert np.array_equal(joined, flat) and is_finite
        _, is_finite = found.join([(p, jnp.array(i > 0)) for i, p in enumerate(parts)])
        assert not is_finite
