"""Microbatches are as large as jobs can fill; otherwise a warning names the cure."""

import json

import jax
import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.forecast import plan_run
from jaxlora.plan.memory.bounds import Bounds
from tests import tiny


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
