"""Windows of several steps: who leaves in the middle, and plans made ahead."""

import threading

import numpy as np
import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.run.log import read_events
from jaxlora.scheduler.stream import PlanAhead
from jaxlora.train.execute import windows
from jaxlora.train.plan.next_window import (
    JobPosition,
    assign_slots,
    positions_after,
    window_samples,
)
from tests.jaxlora.train.at_window import AtWindow
from tests.jaxlora.train.conftest import folder_of
from tests.jaxlora.train.test_contracts import assert_same_training


def window_events(outcome) -> list[dict]:
    events = read_events(folder_of(outcome) / "metrics.jsonl")
    return [e for e in events if e["event"] == "window"]


def test_a_job_that_fails_in_a_window_moves_no_bit_of_another(train, jobs):
    """Its remaining samples do not run; the rows of other jobs do not move."""

    def with_rate(rate):
        wild = jobs[1].model_copy(
            update={"name": "wild", "learning_rate": rate, "warmup_steps": 0}
        )
        return train([jobs[2], wild])

    calm, failed = with_rate(1e-3), with_rate(1e30)
    assert calm.progress["wild"].status == "finished"
    progress = failed.progress["wild"]
    assert progress.status == "failed" and progress.step < 4
    assert failed.bytes["job2"] == calm.bytes["job2"]
    assert failed.losses["job2"] == calm.losses["job2"]
    # Evaluations are packed with whoever is evaluated then: in another layout.
    assert failed.evals["job2"] == pytest.approx(calm.evals["job2"], rel=1e-6)
    # Two samples a step, in one microbatch. The failed step ran, and the device had the
    # next one's microbatch when it was read.
    left_out = window_events(failed)[0]["left_out"]
    assert left_out == {"wild": 2 * (4 - progress.step - 2)}
    assert window_events(calm)[0]["left_out"] == {}


def test_a_job_that_fails_leaves_nothing_in_its_slot(train, jobs):
    """The microbatch that the device had when it failed goes with it."""
    wild = jobs[1].model_copy(
        update={"name": "wild", "learning_rate": 1e30, "warmup_steps": 0}
    )
    num_left = []

    def on_window(trainer):
        state = trainer.slots.tables[0].state
        assert state.pending.is_finite.all()
        for path, gradients in state.pending.gradients.items():
            assert not gradients.any(), path
            assert np.isfinite(state.params[path]).all(), path
        num_left.append(sum(r.progress.status == "waiting" for r in trainer.jobs))

    settings = {"max_concurrent_jobs": 2}
    outcome = train([jobs[2], wild, jobs[4]], on_window=on_window, **settings)
    assert outcome.progress["wild"].status == "failed"
    assert num_left[0] == 1  # job4 takes the slot that wild has left
    assert_same_training(outcome, train([jobs[4]]), ["job4"])


def test_early_stopping_in_a_window(train, jobs):
    """At the same step, with the same losses, as where each window is one step."""
    job = jobs[0].model_copy(
        update={
            "steps": 20,
            "eval_every": 1,
            "early_stopping": 2,
            "early_stopping_delta": 100.0,  # nothing is gain enough
        }
    )
    one, four = train([job, jobs[2]], window_steps=1), train([job, jobs[2]])
    assert four.progress["job0"].status == "stopped early"
    assert four.progress["job0"].step == one.progress["job0"].step == 2
    assert_same_training(four, one, ["job0", "job2"])
    left_out = window_events(four)[0]["left_out"]
    # An epoch ends with a smaller batch, of 4: the device had it already.
    assert left_out == {"job0": 5}
    assert not any(e["left_out"] for e in window_events(one))


def test_rounds_are_steps(train, jobs):
    """An event's round is that of its step, whatever the window."""
    outcome = train(jobs[:2], window_steps=3)
    events = read_events(folder_of(outcome) / "metrics.jsonl")
    for e in events:
        if e["event"] in ("step", "eval", "job_end"):
            assert e["round"] == max(1, e["step"]), e
    assert [e["round"] for e in window_events(outcome)] == [3, 4]
    assert [e["num_rounds"] for e in window_events(outcome)] == [3, 1]


def test_a_stop_in_a_window_waits_for_the_batch(train, jobs, monkeypatch):
    """A request that comes while a window runs, as from another thread."""
    trainers, note = [], windows.Windows._note

    def note_and_stop(self, run, outcome):
        note(self, run, outcome)
        self._requests.stop("job1", "no longer needed")

    monkeypatch.setattr(windows.Windows, "_note", note_and_stop)
    outcome = train(jobs[:2], on_window=trainers.append)
    assert outcome.progress["job1"].status == "stopped"
    assert 1 <= outcome.progress["job1"].step <= 2
    assert "job1" in outcome.bytes
    assert outcome.progress["job0"].status == "finished"


def test_a_stop_after_a_checkpoint_is_kept(model, jobs, tmp_path):
    """No window follows, yet the checkpoint and the log know of it."""
    config = RunConfig(
        model=str(model.folder),
        output_dir=str(tmp_path / "run"),
        jobs=jobs[1:2],
        microbatch_tokens=512,
        block_tokens=16,
        window_steps=2,
        checkpoint_every=1,
    )
    stop = AtWindow(lambda trainer: trainer.stop_job("job1"))
    Trainer(config, model).train(callbacks=[stop])
    (job,) = Trainer(config, model).train(resume=True).jobs
    assert job.progress.status == "stopped" and job.progress.step == 2
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    assert [e["event"] for e in events].count("job_end") == 1
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 2]


# ---- plans made ahead ----------------------------------------------------------------


@pytest.fixture
def busy(jobs):
    """Five jobs through two slots; one ends early, which no plan expects."""
    wild = jobs[1].model_copy(
        update={"name": "wild", "learning_rate": 1e30, "warmup_steps": 0, "steps": 50}
    )
    return [jobs[0], wild, *jobs[2:5]]


def plan_only_when_asked(monkeypatch):
    """No window's plan is ready when the device is done with the window before."""
    asked = threading.Event()
    names = "_plan", "prepare", "take", "close"
    original = {name: getattr(PlanAhead, name) for name in names}

    def plan(self, samples):
        asked.wait()
        return original["_plan"](self, samples)

    def prepare(self, samples):
        asked.clear()
        original["prepare"](self, samples)

    def take(self, samples):
        asked.set()
        return original["take"](self, samples)

    def close(self):
        asked.set()
        original["close"](self)

    changed = {"_plan": plan, "prepare": prepare, "take": take, "close": close}
    for name, function in changed.items():
        monkeypatch.setattr(PlanAhead, name, function)


def plan_never_ahead(monkeypatch):
    monkeypatch.setattr(PlanAhead, "prepare", lambda self, samples: None)


def test_plans_are_ready_and_when_they_are_made_changes_nothing(train, busy):
    settings = {"max_concurrent_jobs": 2, "window_steps": 2}
    usual = train(busy, **settings)
    ahead = [e["planned_ahead"] for e in window_events(usual)]
    assert not ahead[0]  # nothing was known before
    assert ahead.count(False) == 2  # and once for the job that failed
    assert len(ahead) > 4
    for plan_otherwise in (plan_never_ahead, plan_only_when_asked):
        with pytest.MonkeyPatch.context() as patch:
            plan_otherwise(patch)
            other = train(busy, **settings)
        if plan_otherwise is plan_never_ahead:
            assert not any(e["planned_ahead"] for e in window_events(other))
        assert other.bytes == usual.bytes
        assert other.losses == usual.losses
        assert other.evals == usual.evals


# ---- who runs ------------------------------------------------------------------------


def test_higher_priorities_start_first(train, jobs):
    order = []
    ranked = [
        job.model_copy(update={"priority": p, "steps": 1})
        for job, p in zip(jobs[:4], (0, 5, -1, 5), strict=True)
    ]

    def on_window(trainer):
        order.extend(
            run.name
            for run in trainer.jobs
            if run.progress.status == "finished" and run.name not in order
        )

    train(ranked, max_concurrent_jobs=1, on_window=on_window)
    assert order == ["job1", "job3", "job0", "job2"]


def position(job, *, slot=None, step=0, num_steps=5, priority=0) -> JobPosition:
    return JobPosition(
        job=job, priority=priority, slot=slot, step=step, num_steps=num_steps
    )


def test_the_jobs_of_the_next_windows():
    positions = [
        position(0, slot=1, step=3),
        position(1),
        position(2, priority=1),
        position(3),
    ]
    filled = assign_slots(positions, 3, preempts=False)
    assert [p.slot for p in filled] == [1, 2, 0, None]
    after = positions_after(filled, 2)
    assert [(p.job, p.step) for p in after] == [(1, 2), (2, 2), (3, 0)]
    assert [p.slot for p in assign_slots(after, 3, preempts=False)] == [2, 0, 1]
    samples = window_samples(filled, 4, lambda job, step: [10 * job + step] * 2)
    assert len(samples) == 2 * (2 + 4 + 4)  # job 0 has two steps left
    assert samples[0].owner == 1 and samples[0].batch == 3
    assert {s.num_tokens for s in samples if s.owner == 0} == {20, 21, 22, 23}


def test_higher_priorities_take_slots():
    """The lowest priority gives way, of equals the last; only to a higher one."""
    positions = [
        position(0, slot=1, step=3),
        position(1, slot=0, step=3),
        position(2, slot=2, priority=2),
        position(3, priority=2),
        position(4),
    ]

    def slots(positions, **settings):
        return [p.slot for p in assign_slots(positions, 3, **settings)]

    assert slots(positions, preempts=False) == [1, 0, 2, None, None]
    assert slots(positions, preempts=True) == [1, None, 2, 0, None]
    # Where no job is paused, both settings choose the same jobs and slots.
    waiting = [position(i, priority=i % 3) for i in range(7)]
    assert slots(waiting, preempts=True) == slots(waiting, preempts=False)
    # A paused job continues before those of its priority that came after it.
    later = positions_after(assign_slots(positions, 3, preempts=True), 5)
    assert [p.job for p in later] == [1, 4]
    assert [p.slot for p in assign_slots(later[:1], 3, preempts=True)] == [0]
