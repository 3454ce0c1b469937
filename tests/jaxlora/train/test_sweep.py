"""A sweep in three slots: bad configurations end early, the others as if alone."""

import json
import os
import pathlib
import signal

import pytest

from jaxlora import Callback, LoraJob, RunConfig, Sweep, Trainer, load_run
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.live.mailbox import ControlRequest, Mailbox
from jaxlora.run.log import read_events
from jaxlora.train import inbox
from tests.jaxlora.train.runs import (
    InterruptAt,
    Outcome,
    events_of,
    outcome,
    write_swept_job,
)

RATES = 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> LoraJob:
    """Eight steps of one whole microbatch each, so that jobs never share one."""
    return write_swept_job(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def make(model, job, tmp_path_factory):
    """Returns a function that makes a sweep over six learning rates."""

    def run(**settings) -> RunConfig:
        swept = Sweep(parameters={"learning_rate": list(RATES)})
        return RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path_factory.mktemp("sweep") / "run"),
            **{"jobs": [job], "sweep": swept, "max_concurrent_jobs": 3} | settings,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            checkpoint_every=None,
        )

    return run


def decisions(found: Outcome) -> dict[str, tuple]:
    return {
        name: (p.status, p.step, p.stopped_by, p.reason, p.best_eval)
        for name, p in found.progress.items()
    }


def events(config: RunConfig) -> list[tuple]:
    """Returns what happened, without times."""
    path = pathlib.Path(config.output_dir) / "metrics.jsonl"
    left_out = {"time", "round", "seconds", "tokens_per_second", "planning_seconds"}
    return [
        tuple((k, v) for k, v in event.items() if k not in left_out)
        for event in read_events(path)
        if event["event"] != "window"
    ]


@pytest.fixture(scope="module")
def whole(make, model) -> tuple[RunConfig, Outcome]:
    """The sweep without an interruption; no test changes it."""
    config = make()
    return config, outcome(config, model)


def test_half_of_the_configurations_end_at_each_rung(whole):
    config, found = whole
    assert [job.name for job in config.jobs] == [
        f"c-lr{rate}" for rate in ("0.03", "0.01", "3e-3", "1e-3", "3e-4", "1e-4")
    ]
    by_loss = {
        step: sorted(
            (loss, job.name)
            for job in config.jobs
            if (loss := eval_at(config, job.name, step)) is not None
        )
        for step in (2, 4, 8)
    }
    assert [len(found) for found in by_loss.values()] == [6, 3, 2]
    for name, progress in found.progress.items():
        place = [other for _, other in by_loss[2]].index(name)
        assert progress.step == 2 if place >= 3 else progress.step in (4, 8)
        if progress.step < 8:
            assert progress.status == "stopped early"
            assert progress.stopped_by == "halving"
            assert "the best" in progress.reason and name in found.bytes
        else:
            assert progress.status == "finished" and progress.stopped_by is None
    assert {n for _, n in by_loss[8]} <= {n for _, n in by_loss[4]}


def test_the_report_ranks_the_configurations(whole):
    config, found = whole
    report, folder = found.result.sweep, pathlib.Path(config.output_dir)
    losses = [trial.loss for trial in report.trials]
    assert losses == sorted(losses) and len(losses) == len(RATES)
    assert report.best.folder is not None and report.best.folder.is_dir()
    assert list(report.varied) == ["learning_rate"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"] == [report.best.settings.name]
    stopped = {n: job["stopped_by"] for n, job in summary["jobs"].items()}
    assert list(stopped.values()).count("halving") == 4
    assert (folder / "sweep.csv").read_text() == report.csv()
    assert report.best.settings.name in (folder / "sweep.html").read_text()
    again = load_run(folder / "settings.yaml")
    assert again.jobs == tuple(j.settings for j in found.trainer.jobs)


def eval_at(config: RunConfig, name: str, step: int) -> float | None:
    events = events_of(config.output_dir)
    found = [e["eval_loss"] for e in events if of(e, name) and e["step"] == step]
    return found[0] if found else None


def of(event: dict, name: str) -> bool:
    return event["event"] == "eval" and event["job"] == name


def test_configurations_train_as_if_alone(whole, make, model):
    """To the bit: those that ended early have made the same steps so far."""
    config, found = whole
    steps = {name: progress.step for name, progress in found.progress.items()}
    chosen = {max(steps, key=steps.__getitem__), min(steps, key=steps.__getitem__)}
    for job in config.jobs:
        if job.name in chosen:
            alone = outcome(make(jobs=[job], sweep=None), model)
            done = steps[job.name]
            assert found.losses[job.name] == alone.losses[job.name][:done]
            if done == 8:
                assert found.bytes[job.name] == alone.bytes[job.name]


@pytest.mark.parametrize("rounds", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_an_interrupted_sweep_decides_the_same(make, model, whole, rounds):
    config = make()
    Trainer(config, model).train(callbacks=[InterruptAt(rounds)])
    resumed = outcome(config, model, resume=True)
    assert decisions(resumed) == decisions(whole[1])
    assert resumed.bytes == whole[1].bytes
    assert resumed.result.num_compilations == 0
    assert sorted(events(config)) == sorted(events(whole[0]))


def test_configurations_wait_in_their_slots(make, model, whole):
    """No state is copied at a rung if nobody needs the slot."""
    config = make(max_concurrent_jobs=len(RATES))
    found = outcome(config, model)
    # Programs for six slots round otherwise than those for three.
    ends = lambda of: {n: made[:3] for n, made in decisions(of).items()}
    assert ends(found) == ends(whole[1])
    every = config.replace(jobs=list(config.jobs), sweep=None)
    plain = outcome(every.replace(output_dir=config.output_dir + "-plain"), model)
    for name, progress in found.progress.items():
        assert found.losses[name] == plain.losses[name][: progress.step]
        assert progress.step < 8 or found.bytes[name] == plain.bytes[name]
    assert not [e for e in events(config) if ("event", "job_pause") in e]
    again = make(max_concurrent_jobs=len(RATES))
    Trainer(again, model).train(callbacks=[InterruptAt(2)])
    resumed = outcome(again, model, resume=True)
    assert resumed.bytes == found.bytes
    assert sorted(events(again)) == sorted(events(config))


def test_other_rungs_are_refused_when_a_sweep_is_resumed(make, model):
    config = make()
    Trainer(config, model).train(callbacks=[InterruptAt(2)])
    assert config.sweep is not None
    rule = {"type": "halving", "first": 0.5}
    changed = config.replace(sweep=config.sweep.replace(early_exit=[rule]))
    with pytest.raises(CheckpointError, match=r"and eta 2 and first 0.5 now"):
        Trainer(changed, model).train(resume=True)
    none = config.replace(sweep=config.sweep.replace(early_exit="none"))
    found = Trainer(none, model).train(resume=True)
    assert "finished" in {job.progress.status for job in found.jobs}


def test_losses_on_different_samples_are_not_compared(make, model, job):
    other = job.replace(name="other", eval_seed=1)
    config = make().replace(jobs=[job, other])
    with pytest.raises(ConfigError, match="'c' and 'other' are evaluated on different"):
        Trainer(config, model)


class CloneAt(Callback):
    """Makes requests to copy the first job after a step of it."""

    def __init__(self, config: RunConfig, step: int, *changes: dict, stops=False):
        self._box, self._step = Mailbox(pathlib.Path(config.output_dir)), step
        self._changes, self._stops = changes, stops
        self.ids: list[str] = []

    def on_step(self, event) -> None:
        if event.step == self._step and not self.ids:
            self.ids = [
                self._box.post(
                    ControlRequest(action="clone", job=event.job, settings=given)
                )
                for given in self._changes
            ]
            if self._stops:
                os.kill(os.getpid(), signal.SIGINT)

    def answers(self) -> list[str]:
        found = [self._box.take_answer(name) for name in self.ids]
        return [f"{answer.is_accepted}: {answer.text}" for answer in found]


@pytest.fixture(scope="module")
def changed(make, model, job) -> tuple[int, bytes, list[float]]:
    """The step at which a job's settings change, its weights and its later losses."""
    changes = {"learning_rate": 1e-3, "lr_schedule": "linear"}
    config = make(jobs=[job.replace(learning_rate=3e-3)], sweep=None)
    half = Trainer(config, model).train(callbacks=[InterruptAt(4)])
    step = half.jobs[0].progress.step
    assert 4 <= step < 8
    config = config.replace(jobs=[config.jobs[0].replace(**changes)])
    found = outcome(config, model, resume=True)
    assert found.progress["c"].step == 8
    return step, found.bytes["c"], found.losses["c"][step:]


def declared(job: LoraJob, step: int = 4) -> list[LoraJob]:
    parent = job.replace(learning_rate=3e-3)
    at = {"job": "c", "step": step}
    copy = parent.replace(name="copy", learning_rate=1e-3, clone_of=at)
    return [parent, copy.replace(lr_schedule="linear")]


def test_a_copy_equals_a_job_whose_settings_change(make, model, job, changed):
    step, weights, losses = changed
    found = outcome(make(jobs=declared(job, step), sweep=None), model)
    assert found.bytes["copy"] == weights
    assert found.losses["copy"] == losses
    assert found.progress["c"].step == found.progress["copy"].step == 8
    alone = outcome(make(jobs=declared(job)[:1], sweep=None), model)
    assert found.bytes["c"] == alone.bytes["c"]


@pytest.mark.parametrize("stops", [pytest.param(False, marks=pytest.mark.grid), True])
def test_a_copy_is_asked_for_in_a_live_run(make, model, job, stops, monkeypatch):
    """It is in the run that resumes, also if the run ends before it has started."""
    monkeypatch.setattr(inbox, "_POLL_SECONDS", 0.0)
    config = make(jobs=declared(job)[:1], sweep=None)
    copy = {"name": "copy", "learning_rate": 1e-3, "lr_schedule": "linear"}
    wrong = {"rank": 8}, {"steps": 2}, {"name": "C", "steps": 9}
    asks = CloneAt(config, 2, copy, *wrong, stops=stops)
    found = outcome(config, model, callbacks=[asks])
    if stops:
        assert found.result.interrupted
        found = outcome(config, model, resume=True)
    (accepted, *refused) = asks.answers()
    assert accepted == "True: job 'copy' is a copy of 'c' after its next batch."
    for text, words in zip(
        refused,
        ("False: the copy: rank: cannot", "have 2. Raise steps", "in this run already"),
        strict=True,
    ):
        assert words in text
    (start,) = [j.clone_of for j in found.result.jobs if j.name == "copy"]
    assert start.job == "c" and 3 <= start.step <= 8
    again = outcome(make(jobs=declared(job, start.step), sweep=None), model)
    assert found.bytes["copy"] == again.bytes["copy"]
    assert found.progress["copy"].status == "finished"


def test_a_copy_of_a_job_that_ends_before(make, model, job):
    parent, copy = declared(job)
    late = copy.replace(clone_of={"job": "c", "step": 6}, steps=9)
    found = outcome(make(jobs=[parent.replace(steps=5), late], sweep=None), model)
    progress = found.progress["copy"]
    assert (progress.status, progress.reason) == (
        "failed",
        "c ended at step 5, and not at 6",
    )


def test_copies_in_a_sweep(make, model, job):
    """They are not compared at rungs before their start, and the report has a tree."""
    parent, copy = declared(job)
    bad = parent.replace(name="bad", learning_rate=1e-5)
    config = make(jobs=[parent, bad, copy], sweep=Sweep())
    found = outcome(config, model)
    assert found.progress["bad"].stopped_by == "halving"
    assert found.progress["copy"].step == 8
    report = found.result.sweep
    assert report.family() == {"c": ["copy"]}
    page = (pathlib.Path(config.output_dir) / "sweep.html").read_text()
    assert "<li>copy from step 4: " in page
