"""Microbatches are as large as jobs can fill; otherwise a warning names the cure."""

import dataclasses
import json

import jax
import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.forecast import plan_run
from jaxlora.plan.memory.bounds import Bounds, low_fill
from tests import tiny
from tests.jaxlora.train.runs import data_of, samples_of


@pytest.fixture
def run(model, tmp_path):
    """Makes a run of one job with default settings, except for those given."""

    def make(num_records: int = 16, length: int = 0, **settings) -> RunConfig:
        path = tiny.write_records(tmp_path / "records.jsonl", num_records, seed=0)
        if length:
            with open(path, "a") as file:
                file.write(json.dumps({"prompt": "a" * length, "completion": "b"}))
        job = LoraJob(name="job", data={"path": path}, **settings.pop("job", {}))
        output_dir = str(tmp_path / "run")
        return RunConfig(
            model=str(model.folder), output_dir=output_dir, jobs=[job], **settings
        )

    return make


def fill(config: RunConfig) -> float:
    planned = plan_run(config)
    capacity = planned.whole.schedule.limits.capacity
    return planned.num_tokens / capacity / len(planned.whole.schedule.microbatches)


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_one_small_job_fills_its_microbatches(run, caplog):
    assert fill(run()) > 0.5
    assert warnings(caplog) == []


def test_microbatches_that_are_too_large(run, caplog):
    assert fill(run(microbatch_tokens=8192)) < 0.1
    [warning] = warnings(caplog)
    assert warning.startswith("low fill: at most ")
    chosen = plan_run(run()).whole.schedule.limits.capacity
    assert f"Set microbatch_tokens to auto, which takes at most {chosen:,}." in warning


def test_one_sample_that_is_much_longer_than_the_others(run, caplog):
    config = run(length=500, job={"batch_size": 2})
    assert fill(config) < 0.5
    [warning] = warnings(caplog)
    assert "The longest sample needs such a microbatch. Raise batch_size" in warning


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
def test_a_cpu_is_as_fast_with_small_microbatches(run):
    many = run(num_records=200, job={"batch_size": 200, "steps": 1})
    assert plan_run(many).whole.schedule.limits.capacity == 4096


def test_a_gpu_gets_all_that_jobs_can_fill(run, monkeypatch):
    many = run(num_records=200, job={"batch_size": 200, "steps": 1})
    job = plan_run(many).jobs[0]
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert Bounds.of(many, many.jobs, [job.train_data]).largest > 4096


@pytest.mark.parametrize("most", [1, 2, 3])
def test_what_limits_a_microbatch_is_named(run, most):
    """With all jobs in a microbatch, the number of adapters limits nothing."""
    config = run(microbatch_tokens=4096)
    job, size = config.jobs[0], {"batch_size": 2}
    config = config.replace(jobs=[job.replace(name=name, **size) for name in "ab"])
    data = data_of(samples_of([32] * 4), 64)
    bounds = Bounds.of(config, config.jobs, [data] * 2, most_jobs=most)
    assert bounds.step_tokens == min(most, 2) * (2 * 32 + 32)
    [note] = low_fill(config, dataclasses.replace(bounds, largest=4096))
    assert ("all jobs that run at once" in note.text) == (most > 1)
    assert ("raise adapters_per_microbatch" in note.text) == (most == 1)
