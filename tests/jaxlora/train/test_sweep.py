"""A sweep in three slots: bad configurations end early, the others as if alone."""

import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob, RunConfig, Sweep, Trainer, load_run
from jaxlora.errors import ConfigError
from jaxlora.run.log import read_events
from tests.jaxlora.train.at_window import InterruptAt
from tests.jaxlora.train.outcome import Outcome

RATES = 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> LoraJob:
    """Eight steps of one whole microbatch each, so that jobs never share one."""
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("ab "), 15)) for _ in range(32)]  # and an end
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return LoraJob(
        name="c",
        data={"path": str(path)},
        eval_fraction=0.25,
        rank=4,
        target_modules=["q_proj", "v_proj"],
        batch_size=8,
        steps=8,
        lr_schedule="constant",
        dropout=0.1,
        max_length=48,
    )


@pytest.fixture(scope="module")
def make(model, job, tmp_path_factory):
    """Returns a function that makes a sweep over six learning rates."""

    def run(**settings) -> RunConfig:
        swept = Sweep(parameters={"learning_rate": list(RATES)})
        return RunConfig(
            model=str(model.folder),
            output_dir=str(tmp_path_factory.mktemp("sweep") / "run"),
            **{"jobs": [job], "sweep": swept} | settings,
            max_concurrent_jobs=3,
            microbatch_tokens=128,
            block_tokens=16,
            window_steps=2,
            checkpoint_every=2,
        )

    return run


def outcome(config: RunConfig, model, **options) -> Outcome:
    trainer = Trainer(config, model)
    return Outcome(trainer, trainer.train(**options), model)


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
    events = read_events(pathlib.Path(config.output_dir) / "metrics.jsonl")
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


def test_losses_on_different_samples_are_not_compared(make, model, job):
    other = job.replace(name="other", eval_seed=1)
    config = make().replace(jobs=[job, other])
    with pytest.raises(ConfigError, match="'c' and 'other' are evaluated on different"):
        Trainer(config, model)
