"""Jobs that leave a stream in the middle, plans made ahead, and who runs."""

import threading

import pytest

from jaxlora.scheduler.stream import stream
from jaxlora.train.execute.executor import Executor
from tests.jaxlora.train.test_contracts import assert_same_training


def test_a_job_that_fails_in_a_window_moves_no_bit_of_another(train, jobs):
    """Its remaining samples do not run; the rows of other jobs do not move."""

    def with_rate(rate):
        wild = jobs[1].replace(name="wild", learning_rate=rate, warmup_steps=0)
        return train([jobs[2], wild])

    calm, failed = with_rate(1e-3), with_rate(1e30)
    assert calm.progress["wild"].status == "finished"
    progress = failed.progress["wild"]
    assert progress.status == "failed" and progress.step < 4
    assert failed.bytes["job2"] == calm.bytes["job2"]
    assert failed.losses["job2"] == calm.losses["job2"]
    # Evaluations are packed with whoever is evaluated then: in another layout.
    assert failed.evals["job2"] == pytest.approx(calm.evals["job2"], rel=1e-6)


def test_a_job_that_fails_leaves_nothing_in_its_slot(train, jobs, monkeypatch):
    """The microbatch that the device had when it failed goes with it."""
    wild = jobs[1].replace(name="wild", learning_rate=1e30, warmup_steps=0)
    num_left = []

    def release(self, slot):
        left = self._jobs[slot].name
        original(self, slot)
        state = self.slots.tables[0].state
        assert state.pending.is_finite[..., slot].all()
        for path, gradients in state.pending.gradients.items():
            assert not gradients[slot].any(), path
            assert not state.params[path][slot].any(), path
        num_left.append(left)

    original = Executor.release
    monkeypatch.setattr(Executor, "release", release)
    outcome = train([jobs[2], wild, jobs[4]], max_concurrent_jobs=2)
    assert outcome.progress["wild"].status == "failed"
    assert num_left[0] == "wild"  # job4 takes the slot that it has left
    assert_same_training(outcome, train([jobs[4]]), ["job4"])


def test_early_stopping(train, jobs):
    """At the same step, with the same losses, however often it is reported."""
    job = jobs[0].replace(
        steps=20, eval_every=1, early_stopping=2, early_stopping_delta=100.0
    )
    one, four = train([job, jobs[2]], window_steps=1), train([job, jobs[2]])
    assert four.progress["job0"].status == "stopped early"
    assert four.progress["job0"].step == one.progress["job0"].step == 2
    assert four.bytes == one.bytes and four.losses == one.losses
    assert len(one.of("window")) > len(four.of("window"))


def test_a_round_ends_when_all_jobs_have_stepped(train, jobs):
    """Events come in the order of their rounds; jobs take as many steps as fit."""
    outcome = train(jobs[:3], window_steps=2)
    events = outcome.events
    rounds = [e["round"] for e in events]
    assert rounds == sorted(rounds)
    steps, ends = {}, {}
    for e in events:
        if e["event"] == "step":
            steps.setdefault(e["round"], set()).add(e["job"])
        if e["event"] == "job_end":
            ends[e["job"]] = e["round"]
    last = max(steps)
    for number in range(1, last + 1):
        running = {name for name, end in ends.items() if end >= number}
        assert steps[number] == running, number
    windows = outcome.of("window")
    assert [e["round"] for e in windows] == [*range(2, last, 2), last]
    assert sum(e["num_rounds"] for e in windows) == last


# ---- plans made ahead ----------------------------------------------------------------


@pytest.fixture
def busy(jobs):
    """Five jobs through two slots; one ends early, which no plan expects."""
    wild = jobs[1].replace(name="wild", learning_rate=1e30, warmup_steps=0, steps=50)
    return [jobs[0], wild, *jobs[2:5]]


def plan_only_when_asked(monkeypatch):
    """No plan is ready when it is needed."""
    asked = threading.Event()
    names = "__init__", "prepare", "take", "close"
    original = {name: getattr(stream.PlanAhead, name) for name in names}

    def init(self, plan):
        def plan_when_asked(state):
            asked.wait()
            return plan(state)

        original["__init__"](self, plan_when_asked)

    def prepare(self, state):
        asked.clear()
        original["prepare"](self, state)

    def take(self, state):
        asked.set()
        return original["take"](self, state)

    def close(self):
        asked.set()
        original["close"](self)

    changed = {"__init__": init, "prepare": prepare, "take": take, "close": close}
    for name, function in changed.items():
        monkeypatch.setattr(stream.PlanAhead, name, function)


def plan_never_ahead(monkeypatch):
    monkeypatch.setattr(stream.PlanAhead, "prepare", lambda self, state: None)


def test_when_plans_are_made_changes_nothing(train, busy, monkeypatch):
    settings = {"max_concurrent_jobs": 2, "window_steps": 1}
    # So short stretches that there are several between two jobs that come or go.
    monkeypatch.setattr(stream, "_FULL_TICKS", 1)
    usual = train(busy, **settings)
    ahead = [e["planned_ahead"] for e in usual.of("window")]
    assert not ahead[0]  # nothing was known before
    assert ahead.count(True) > 4
    for plan_otherwise in (plan_never_ahead, plan_only_when_asked):
        with pytest.MonkeyPatch.context() as patch:
            plan_otherwise(patch)
            other = train(busy, **settings)
        assert other.bytes == usual.bytes
        assert other.losses == usual.losses
        assert other.evals == usual.evals


# ---- who runs ------------------------------------------------------------------------


def test_higher_priorities_start_first(train, jobs):
    order = []
    ranked = [
        job.replace(priority=p, steps=1)
        for job, p in zip(jobs[:4], (0, 5, -1, 5), strict=True)
    ]

    def on_window(trainer):
        order.extend(
            run.name
            for run in trainer.jobs
            if run.progress.status == "finished" and run.name not in order
        )

    train(ranked, max_concurrent_jobs=1, window_steps=1, on_window=on_window)
    assert order == ["job1", "job3", "job0", "job2"]
