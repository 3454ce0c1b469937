"""Jobs that are paused keep their whole state, and end as if they had never been."""

import pathlib

import pytest

from jaxlora import RunConfig, Trainer, import_peft
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.forecast import plan_run
from jaxlora.models.structure import linear_shapes
from jaxlora.train.execute.job_lifecycle import JobLifecycle
from jaxlora.train.loop import Loop
from jaxlora.train.run import Run
from tests.jaxlora.train.runs import (
    AtWindow,
    InterruptAt,
    Killed,
    adapter_bytes,
    events_of,
    one_slot,
)
from tests.oracle import relative_error

pytestmark = pytest.mark.usefixtures("no_device")


@pytest.fixture(scope="module")
def low(jobs):
    """A job of eight steps, in windows of two."""
    return jobs[0].replace(name="low", steps=8)


@pytest.fixture
def high(jobs):
    return jobs[3].replace(name="high", steps=3, priority=1)


@pytest.fixture
def config(model, low, tmp_path):
    """A run of one slot; settings may be changed."""

    def make(name="run", jobs=(low,), **settings) -> RunConfig:
        return one_slot(model, tmp_path / name, jobs, **settings)

    return make


def changes(config: RunConfig) -> list[tuple]:
    """Returns the kind, job and step of each event."""
    events = events_of(config.output_dir, "job_pause", "job_resume", "job_end")
    return [(e["event"], e["job"], e["step"]) for e in events]


def losses(config: RunConfig) -> list[float]:
    steps = events_of(config.output_dir, "step")
    return [event["loss"] for event in steps if event["job"] == "low"]


def weights(config: RunConfig) -> dict[str, bytes]:
    return adapter_bytes(config.output_dir)


def steps_of(config: RunConfig) -> list[str]:
    """Returns the job of each optimizer step."""
    return [event["job"] for event in events_of(config.output_dir, "step")]


def at_round(number, call):
    """Returns a callback that calls a function with the trainer after a round."""

    def on_window(trainer):
        if trainer.round == number:
            call(trainer)

    return AtWindow(on_window)


@pytest.fixture(scope="module")
def alone(model, low, tmp_path_factory):
    """The low job's run when nothing comes between; no test changes it."""
    config = one_slot(model, tmp_path_factory.mktemp("alone"), (low,))
    Trainer(config, model).train()
    return config


def test_a_higher_priority_takes_the_slot(config, model, high, alone):
    """The paused job ends in the same bits, as both ran in windows of their own."""
    with_high = config()
    add = at_round(2, lambda trainer: trainer.add_job(high))
    result = Trainer(with_high, model).train(callbacks=[add])
    assert changes(with_high) == [
        ("job_pause", "low", 2),
        ("job_end", "high", 3),
        ("job_resume", "low", 2),
        ("job_end", "low", 8),
    ]
    assert weights(with_high)["low"] == weights(alone)["low"]
    assert losses(with_high) == losses(alone)
    assert {job.progress.status for job in result.jobs} == {"finished"}
    assert result.num_compilations == 0  # the run before has compiled the programs


@pytest.mark.parametrize(("preempts", "priority"), [(False, 1), (True, 0)])
def test_it_waits_without_preemption_or_a_higher_priority(
    config, model, high, preempts, priority
):
    waits, other = config(preempt=preempts), high.replace(priority=priority)
    add = at_round(2, lambda trainer: trainer.add_job(other))
    Trainer(waits, model).train(callbacks=[add])
    assert changes(waits) == [("job_end", "low", 8), ("job_end", "high", 3)]


@pytest.mark.parametrize("priority", [0, 1])
def test_a_higher_priority_on_resume_comes_first(config, model, low, priority):
    """Two jobs that both have slots, and whose batches fill a microbatch each."""
    second = low.replace(name="second")
    two = {"max_concurrent_jobs": 2, "microbatch_tokens": 128}
    run = config(jobs=(low, second), **two)
    Trainer(run, model).train(callbacks=[InterruptAt(2)])
    done = len(steps_of(run))
    second = second.replace(priority=priority)
    Trainer(config(jobs=(low, second), **two), model).train(resume=True)
    after = steps_of(run)[done:]
    assert (after[:4] == ["second"] * 4) == bool(priority)


def killed_at(number: int, monkeypatch) -> None:
    """Makes the next run end after a round and what is due at its border."""
    change = JobLifecycle.change

    def change_or_end(self, at_border):
        if self._run.round >= number:
            raise Killed
        return change(self, at_border)

    monkeypatch.setattr(JobLifecycle, "change", change_or_end)
    monkeypatch.setattr(JobLifecycle, "is_settled", lambda self: False)


def test_a_kill_while_a_job_is_paused(config, model, low, high, alone, monkeypatch):
    """The checkpoint holds the paused job; it continues in another process."""
    killed = config(jobs=(low,), checkpoint_every=1)
    add = at_round(2, lambda trainer: trainer.add_job(high))
    with monkeypatch.context() as patch:
        killed_at(4, patch)  # two of high's steps are done
        with pytest.raises(Killed):
            Trainer(killed, model).train(callbacks=[add])
    assert changes(killed) == [("job_pause", "low", 2)]
    both = config(jobs=(low, high), checkpoint_every=1)
    Trainer(both, model).train(resume=True)
    assert changes(both)[1:] == [
        ("job_end", "high", 3),
        ("job_resume", "low", 2),
        ("job_end", "low", 8),
    ]
    assert weights(both)["low"] == weights(alone)["low"]
    assert losses(both) == losses(alone)


def test_pausing_by_request(config, model, alone):
    """Only a paused job is left, so the run ends; a later process lets it continue."""
    paused = config()
    first = Trainer(paused, model)
    result = first.train(callbacks=[at_round(4, lambda t: t.pause_job("low", "lunch"))])
    (job,) = result.jobs
    assert (job.progress.status, job.progress.reason) == ("paused", "lunch")
    assert not result.interrupted and not weights(paused)
    still = Trainer(paused, model).train(resume=True)
    assert still.jobs[0].progress == job.progress
    last = Trainer(paused, model)
    last.resume_job("low")
    assert last.train(resume=True).jobs[0].progress.status == "finished"
    assert changes(paused) == [
        ("job_pause", "low", 4),
        ("job_resume", "low", 4),
        ("job_end", "low", 8),
    ]
    assert weights(paused) == weights(alone)
    assert losses(paused) == losses(alone)


def test_a_paused_job_gives_its_slot_to_a_waiting_one(config, model, low, high):
    """Then it continues, as soon as it may and a slot is free."""
    waiting = high.replace(priority=-1)
    both = config(jobs=(low, waiting))

    def on_window(trainer):
        if trainer.round == 2:
            trainer.pause_job("low")
        if trainer.round == 4:
            trainer.resume_job("low")

    Trainer(both, model).train(callbacks=[AtWindow(on_window)])
    assert [(kind, name) for kind, name, _ in changes(both)] == [
        ("job_pause", "low"),
        ("job_pause", "high"),  # of lower priority
        ("job_resume", "low"),
        ("job_end", "low"),
        ("job_resume", "high"),
        ("job_end", "high"),
    ]


def test_a_paused_job_that_is_stopped_is_exported(config, model, low, alone):
    """Its weights are those that it was paused with."""
    stopped = config()
    first = Trainer(stopped, model)
    first.train(callbacks=[at_round(2, lambda trainer: trainer.pause_job("low"))])
    second = Trainer(stopped, model)
    second.stop_job("low")
    assert second.train(resume=True).jobs[0].progress.status == "stopped"
    short = config("short")
    Trainer(short, model).train(callbacks=[at_round(2, lambda t: t.stop_job("low"))])
    assert weights(stopped) == weights(short) != {}


def test_requests_outlive_a_kill(config, model, monkeypatch):
    """They are in run.json before the next checkpoint is written."""
    killed = config(checkpoint_every=4)
    with monkeypatch.context() as patch:
        killed_at(6, patch)
        with pytest.raises(Killed):
            stop = at_round(6, lambda trainer: trainer.stop_job("low", "enough"))
            Trainer(killed, model).train(callbacks=[stop])
    (job,) = Trainer(killed, model).train(resume=True).jobs
    assert (job.progress.status, job.progress.reason) == ("stopped", "enough")
    assert job.progress.step == 4  # where the checkpoint was


def test_jobs_may_be_added_at_any_time(config, model, high, monkeypatch):
    """As by another thread, at any time: it joins at the next border."""
    run, trainer, added = config(), None, []
    note_steps = Loop._note_steps

    def note_and_add(self, outcomes):
        before = len(trainer.jobs)
        if not added:
            added.append(high)
            trainer.add_job(high)
            with pytest.raises(ConfigError, match="a job named 'high' is in this run"):
                trainer.add_job(high)
        note_steps(self, outcomes)
        assert len(trainer.jobs) == before

    monkeypatch.setattr(Loop, "_note_steps", note_and_add)
    trainer = Trainer(run, model)
    result = trainer.train()
    assert [job.name for job in result.jobs] == ["low", "high"]
    assert {job.progress.status for job in result.jobs} == {"finished"}


def test_rounds_end_while_a_job_waits_in_the_middle_of_a_batch(
    config, model, low, high, monkeypatch
):
    """A job of higher priority that joins then has all microbatches to itself."""
    high, added, rounds = high.replace(steps=8), [], []
    note_steps = Loop._note_steps

    def note_and_add(self, outcomes):
        nonlocal rounds
        note_steps(self, outcomes)
        if self._run.round == 1 and not outcomes.steps and not added:
            added.append(high)
            trainer.add_job(high)
        rounds += [self._run.round for j in self._stepped if j.name == "high"]

    monkeypatch.setattr(Loop, "_note_steps", note_and_add)
    low = low.replace(batch_size=16)
    two = {"max_concurrent_jobs": 2, "microbatch_tokens": 128}
    trainer = Trainer(config(jobs=(low,), **two), model)
    trainer.train()
    assert steps_of(trainer.config)[:9] == ["low"] + ["high"] * 8
    assert len(set(rounds)) == 8  # and so do checkpoints come


@pytest.mark.parametrize("ask", ["preempt", "pause", "stop"])
def test_a_job_that_is_to_leave_does_not_wait_for_higher_priorities(
    config, model, low, high, ask
):
    """It has the microbatches that its batch still needs."""
    first, second = (high.replace(name=n, steps=12) for n in ("first", "second"))
    two = {"max_concurrent_jobs": 2, "microbatch_tokens": 128, "window_steps": 1}
    run = config(jobs=(low.replace(batch_size=16), first), **two)
    calls = {
        "preempt": lambda trainer: trainer.add_job(second),
        "pause": lambda trainer: trainer.pause_job("low"),
        "stop": lambda trainer: trainer.stop_job("low"),
    }
    Trainer(run, model).train(callbacks=[at_round(2, calls[ask])])
    found = changes(run)
    assert found[0][:2] == ("job_end" if ask == "stop" else "job_pause", "low")


def test_a_refused_resume_compiles_nothing(config, model, low, monkeypatch):
    Trainer(config(), model).train(callbacks=[InterruptAt(1)])
    other = low.replace(seed=5)

    def compiles(self, plan):
        raise AssertionError("the training step was compiled")

    monkeypatch.setattr(Run, "compile", compiles)
    with pytest.raises(CheckpointError, match=r"seed is 100 in run\.json and 5"):
        Trainer(config(jobs=(other,)), model).train(resume=True)


def test_a_job_continues_in_another_run(config, model, low, jobs, alone):
    """Among other neighbours: the same updates, and no step is done twice."""
    left = config("left")

    Trainer(left, model).train(callbacks=[InterruptAt(2)])
    step = len(losses(left))
    assert 2 <= step < 8
    changed = low.replace(seed=5, continue_from=left.output_dir)
    with pytest.raises(CheckpointError, match="job 'low': seed is 100 in run"):
        Trainer(config("changed", jobs=(changed,)), model).train()
    here = low.replace(continue_from=left.output_dir)
    there = config("there", jobs=(jobs[1], here)).replace(max_concurrent_jobs=2)
    # On a GPU, the base of a plan would be in bfloat16.
    foretold = plan_run(there.replace(dtype="float32")).samples
    assert {s.batch for s in foretold if s.owner == 1} == set(range(step, 8))
    result = Trainer(there, model).train()
    assert {job.progress.status for job in result.jobs} == {"finished"}
    assert changes(there)[0] == ("job_resume", "low", step)
    assert losses(left) + losses(there) == pytest.approx(losses(alone), rel=1e-5)
    shapes = linear_shapes(model.config)
    ours, wanted = (
        import_peft(pathlib.Path(c.output_dir) / "adapters" / "low", shapes).by_path()
        for c in (there, alone)
    )
    for path, tensor in wanted.items():
        assert relative_error(ours[path], tensor) < 2e-4


def test_a_job_that_has_ended_elsewhere_cannot_continue(config, model, low, alone):
    here = low.replace(continue_from=alone.output_dir)
    with pytest.raises(CheckpointError, match="has the states of no jobs"):
        Trainer(config(jobs=(here,)), model).train()
