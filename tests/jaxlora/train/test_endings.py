"""Ways in which a job ends: its last evaluation, its export, and what is told of it."""

import functools
import io
import math
import os
import pathlib
import signal

import pytest
from rich.console import Console

from jaxlora import RunConfig, Trainer
from jaxlora.errors import JaxloraError
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.files import print_summary
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.report.summary import (
    JobResult,
    RunResult,
    ranked,
    write_report,
)
from jaxlora.train.saved.checkpoint import Checkpoints
from tests.jaxlora.run import made_events
from tests.jaxlora.train.host_executor import HostExecutor
from tests.jaxlora.train.runs import LINEARS, AtWindow, InterruptAt, events_of, run_of
from tests.jaxlora.train.test_contracts import assert_same_training

pytestmark = pytest.mark.usefixtures("no_device")

SHAPE = {"max_concurrent_jobs": 2, "slot_dropout": True}


@pytest.fixture
def train(train):
    return functools.partial(train, **SHAPE)


@pytest.fixture
def long(jobs):
    """A job of many steps that is evaluated at its start and at its end only."""
    return jobs[0].replace(steps=40, eval_every=None, lr_schedule="constant")


def stop(name, at=1):
    """For `AtWindow`: asks for a stop after so many windows."""
    count = iter(range(1, 1000))

    def on_window(trainer):
        if next(count) == at:
            trainer.stop_job(name, "enough")

    return on_window


def evaluated_steps(outcome, name: str) -> list[int]:
    return [event["step"] for event in outcome.of("eval", job=name)]


def test_a_stopped_job_is_evaluated_like_a_finished_one(train, long, jobs):
    stopped = train([long, jobs[2]], on_window=stop("job0"))
    progress = stopped.progress["job0"]
    step = progress.step
    finished = train([long.replace(steps=step), jobs[2]])
    assert progress.status == "stopped" and 4 <= step < 40
    assert evaluated_steps(stopped, "job0") == [0, step]
    # They are packed in another way, as one of them was meant to be longer.
    assert_same_training(stopped, finished, ["job0", "job2"])
    assert progress.last_eval == stopped.evals["job0"][-1] != progress.first_eval
    last = stopped.of(job="job0")[-2:]
    assert [(e["event"], e["step"]) for e in last] == [
        ("eval", step),
        ("job_end", step),
    ]
    assert last[0]["round"] == last[1]["round"] >= 5


def test_a_stop_where_an_evaluation_was_due_needs_no_other(train, long):
    job = long.replace(eval_every=2)
    outcome = train([job], on_window=stop("job0"))
    assert outcome.progress["job0"].status == "stopped"
    assert evaluated_steps(outcome, "job0") == [0, 2, 4]


@pytest.mark.parametrize("is_better", [True, False])
def test_a_stopped_job_keeps_its_best(train, long, monkeypatch, is_better):
    """Its last weights compete, also where no evaluation was due."""
    if not is_better:
        evaluate = HostExecutor.begin_evaluation

        def worse(self, runs):
            found = evaluate(self, runs)()
            losses = {
                slot: {"loss": found[slot]["loss"] + r.progress.step}
                for slot, r in runs.items()
            }
            return lambda: losses

        monkeypatch.setattr(HostExecutor, "begin_evaluation", worse)
    best = long.replace(keep_best=True)
    outcome = train([best], on_window=stop("job0"))
    assert outcome.progress["job0"].best_step == (4 if is_better else 0)
    kept = train([long], on_window=stop("job0")).bytes
    assert (outcome.bytes == kept) == is_better


def test_a_stop_at_any_time(train, long, jobs, monkeypatch):
    """As from another thread: the weights that are evaluated are those exported."""
    note = JobLifecycle.note

    def note_and_stop(self, run, outcome):
        note(self, run, outcome)
        if run.progress.step == 2:
            self._run.live.stop("job0", "enough")

    monkeypatch.setattr(JobLifecycle, "note", note_and_stop)
    outcome = train([long, jobs[2]])
    monkeypatch.undo()
    finished = train([long.replace(steps=2), jobs[2]])
    assert outcome.progress["job0"].step == 2
    assert evaluated_steps(outcome, "job0") == [0, 2]
    assert outcome.evals["job0"] == pytest.approx(finished.evals["job0"], rel=1e-5)
    assert outcome.progress["job2"].status == "finished"


def test_a_stop_during_the_first_evaluation(train, long, monkeypatch):
    evaluate = JobLifecycle.evaluate

    def evaluate_and_stop(self, runs):
        evaluate(self, runs)
        self._run.live.stop("job0", "never mind")

    monkeypatch.setattr(JobLifecycle, "evaluate", evaluate_and_stop)
    outcome = train([long])
    progress = outcome.progress["job0"]
    assert (progress.status, progress.step) == ("stopped", 0)
    assert evaluated_steps(outcome, "job0") == [0]
    assert "job0" in outcome.bytes


def test_a_last_evaluation_that_is_not_finite(train, long, jobs, monkeypatch):
    evaluate = HostExecutor.begin_evaluation

    def infinite(self, runs):
        found = evaluate(self, runs)()
        values = {
            slot: {"loss": math.inf} if r.progress.step else found[slot]
            for slot, r in runs.items()
        }
        return lambda: values

    monkeypatch.setattr(HostExecutor, "begin_evaluation", infinite)
    outcome = train([long], on_window=stop("job0"))
    progress = outcome.progress["job0"]
    assert progress.status == "failed"
    assert progress.reason == "the evaluation loss is not finite"
    assert not outcome.bytes
    assert outcome.of(job="job0")[-1]["status"] == "failed"


def test_a_stop_while_waiting(train, long, jobs):
    """It never runs: no evaluation, no adapter, but the log knows how it ended."""
    late = jobs[3].replace(name="late")
    outcome = train([*jobs[1:3], late], on_window=stop("late"))
    assert outcome.progress["late"] == JobProgress(status="stopped", reason="enough")
    (event,) = outcome.of(job="late")
    assert (event["event"], event["status"]) == ("job_end", "stopped")
    assert list(outcome.bytes) == ["job1", "job2"]


@pytest.fixture
def config(model, long, jobs, tmp_path) -> RunConfig:
    """Two slots: two jobs train, and one waits."""
    return run_of(
        model,
        tmp_path / "run",
        [long, long.replace(name="other"), jobs[3]],
        slot_rank=8,
        slot_targets=LINEARS,
        **SHAPE,
        microbatch_tokens=512,
        block_tokens=16,
    )


def stop_all(trainer: Trainer) -> None:
    """For `AtWindow`: asks for all jobs to stop."""
    for run in trainer.jobs:
        trainer.stop_job(run.name, "enough")


@pytest.mark.parametrize("when", ["before the interrupt", "before the resume"])
def test_a_stop_and_a_resume(model, config, when):
    """Asked for in the process that was interrupted, or in the one that resumes."""
    first = Trainer(config, model)
    if when == "before the interrupt":
        # The jobs may end before the run does.
        first.train(callbacks=[InterruptAt(1, stop_all)])
    else:
        assert first.train(callbacks=[InterruptAt(1)]).interrupted
    second = Trainer(config, model)
    if when == "before the resume":
        for job in config.jobs:
            second.stop_job(job.name, "enough")
    result = second.train(resume=True)
    progress = {job.name: job.progress for job in result.jobs}
    assert [p.status for p in progress.values()] == ["stopped"] * 3
    assert 4 <= progress["job0"].step == progress["job0"].last_eval_step < 40
    assert progress["job3"].first_eval is None
    # A third process knows of it too, and does nothing.
    again = Trainer(config, model).train(resume=True)
    assert {job.name: job.progress for job in again.jobs} == progress
    events = events_of(result.output_dir)
    ended = [e["job"] for e in events if e["event"] == "job_end"]
    assert sorted(ended) == ["job0", "job3", "other"]


def test_an_interrupt_while_the_last_checkpoint_is_written(model, config, monkeypatch):
    """It was asked for once, so that nothing is broken off."""
    close = Checkpoints.close

    def interrupted_close(self):
        os.kill(os.getpid(), signal.SIGINT)
        close(self)

    monkeypatch.setattr(Checkpoints, "close", interrupted_close)
    result = Trainer(config, model).train(callbacks=[AtWindow(stop_all)])
    assert {job.progress.status for job in result.jobs} == {"stopped"}
    assert (result.output_dir / "checkpoints" / "5").is_dir()


def test_the_summary_is_written_before_the_picture(tmp_path, pictures):
    """The latter reads the events of the run, and may fail."""
    (tmp_path / "metrics.jsonl").mkdir()
    result = RunResult(
        jobs=(), output_dir=tmp_path, interrupted=False, num_compilations=0
    )
    with pytest.raises((OSError, JaxloraError)):
        write_report(result)
    assert (tmp_path / "summary.json").exists()


# ---- the summary ---------------------------------------------------------------------


def printed(progress: JobProgress, name: str = "a", width: int = 120) -> str:
    job = made_events.result(name, progress)
    result = RunResult(
        jobs=(job,),
        output_dir=pathlib.Path("run"),
        interrupted=False,
        num_compilations=0,
    )
    text = io.StringIO()
    print_summary(result, Console(file=text, width=width))
    return text.getvalue()


BEGUN = {
    "status": "running",
    "first_eval": 4.0,
    "last_eval": 4.0,
    "last_eval_step": 0,
    "best_eval": 4.0,
    "best_step": 0,
}
STEPPED = BEGUN | {"first_loss": 3.0, "last_loss": 3.0, "step": 1, "num_tokens": 10}
STOPPED = STEPPED | {
    "status": "stopped",
    "step": 2,
    "last_loss": 2.5,
    "last_eval": 3.6,
    "last_eval_step": 2,
    "best_eval": 3.5,
    "best_step": 1,
}
UNCHANGED = STEPPED | {"status": "finished", "step": 2, "last_eval_step": 2}


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        ({}, "0 - - waiting"),
        (BEGUN, "0 - 4.000 → - interrupted"),
        (STEPPED, "10 3.000 → - 4.000 → - interrupted"),
        (STOPPED, "10 3.000 → 2.500 4.000 → 3.500 at 1 stopped"),
        (UNCHANGED, "10 3.000 → 3.000 4.000 → 4.000 at 0 finished"),
    ],
)
def test_a_loss_is_shown_once(progress, shown):
    """A dash where there is no later one; equal losses of two steps are shown."""
    assert shown in " ".join(printed(JobProgress(**progress)).split())


def test_numbers_are_whole_on_eighty_columns():
    """A long name and a long status are folded instead."""
    lines = printed(
        JobProgress(**STOPPED | {"status": "stopped early"}), "a-long-name" * 3, 80
    ).splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if " 2/10 " in line)
    assert "3.000 → 2.500  4.000 → 3.500 at 1" in row


def test_the_lowest_held_out_loss_comes_first():
    def result(name: str, best: float | None) -> JobResult:
        return made_events.result(name, JobProgress(best_eval=best))

    jobs = [result("none", None), result("worse", 3.0), result("best", 2.0)]
    assert [job.name for job in ranked(jobs)] == ["best", "worse", "none"]
