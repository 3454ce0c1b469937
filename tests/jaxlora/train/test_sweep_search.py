"""A sweep whose configurations are suggested while it trains, and stops on the way."""

import json
import pathlib
import random
import shutil

import pytest

from jaxlora import RunConfig, Sweep, Trainer
from jaxlora.sweeps import suggesting
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from tests.jaxlora.train.runs import (
    InterruptAt,
    Killed,
    Outcome,
    events_of,
    outcome,
    run_of,
    write_swept_job,
)


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    """Suggests by a function of all that was tried; Optuna is an extra."""

    def suggest(axes, seed, number, tried):
        seen = [(t.state, t.step, t.cost, sorted(t.place.items())) for t in tried]
        rng = random.Random(repr((seed, number, seen)))
        while True:
            yield {axis.name: rng.random() for axis in axes}

    monkeypatch.setattr(suggesting, "suggestions", suggest)
    monkeypatch.setattr(suggesting, "check_installed", lambda: None)


@pytest.fixture
def make(model, tmp_path):
    """Returns a function that makes a search; jobs never share a microbatch."""
    number, job = iter(range(100)), write_swept_job(tmp_path).replace(steps=4)
    space = {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1}

    def run() -> RunConfig:
        sweep = Sweep(
            method="optuna",
            count=5,
            initial=2,
            parameters={"learning_rate": space},
            early_exit={"type": "asha", "first": 0.5},
        )
        return run_of(
            model,
            tmp_path / f"run{next(number)}",
            [job],
            sweep=sweep,
            max_concurrent_jobs=2,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            checkpoint_every=2,
            keep_checkpoints=9,
        )

    return run


change = JobLifecycle.change


def dies(self, at_border) -> None:
    """Ends the run behind the second suggestion, which no checkpoint has."""
    if len(self.jobs) > 3:
        raise Killed
    change(self, at_border)


def test_a_search_that_stops_suggests_the_same(make, model, monkeypatch):
    whole = outcome(make(), model)
    assert len(whole.progress) == 5
    rates = {j.name: j.settings.learning_rate for j in whole.trainer.jobs}
    assert len(set(rates.values())) == 5
    assert {p.status for p in whole.progress.values()} <= {"finished", "stopped early"}
    assert len(whole.result.sweep.trials) == 5

    config = make()
    Trainer(config, model).train(callbacks=[InterruptAt(4)])
    resumed = outcome(config, model, resume=True)

    killed = make()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(JobLifecycle, "change", dies)
        Trainer(killed, model).train()
    record = json.loads((pathlib.Path(killed.output_dir) / "run.json").read_text())
    assert len(record["suggested"]) == 2
    after = outcome(killed, model, resume=True)

    for other in (resumed, after):
        assert {j.name: j.settings.learning_rate for j in other.trainer.jobs} == rates
        assert other.progress == whole.progress
        assert other.bytes == whole.bytes
    events = events_of(killed.output_dir)
    assert {e["job"] for e in events if e["event"] == "eval"} == set(rates)

    # A trainer that trains again begins with the draws alone.
    shutil.rmtree(whole.trainer.output_dir)
    again = Outcome(whole.trainer, whole.trainer.train())
    assert again.progress == whole.progress and again.bytes == whole.bytes
