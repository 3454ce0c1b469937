"""A worker follows its driver; here without a model."""

import pathlib
import signal
import types

import pytest

from jaxlora import LoraJob, Trainer
from jaxlora.common.background import StopRequest
from jaxlora.errors import ConfigError
from jaxlora.run.events import ExportEvent, JobEndEvent, RunStartEvent
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine import worker
from jaxlora.sweeps.engine.group_control import GroupControl
from jaxlora.sweeps.engine.transport import Link
from jaxlora.train.job_state import JobState


class Job(JobState):
    """A job of a run, as far as a worker looks at it."""

    def __init__(self, name: str):
        settings = LoraJob(name=name, data={"path": "a"}, eval_fraction=0.1)
        self.prepared = types.SimpleNamespace(
            settings=settings, num_steps=4, batch_tokens=9.0, eval_data=object()
        )
        modules = {"q_proj": types.SimpleNamespace(rank=4)}
        rank_of = lambda weights: weights.rank
        self.like = types.SimpleNamespace(modules=modules, trained_rank=rank_of)
        self.progress, self.parked = JobProgress(), None


class Run(Trainer):
    """Takes note of what it is asked; a job that is added joins when a test says so."""

    def __init__(self, *names: str):
        self.jobs, self.asked = [Job(name) for name in names], []
        self.output_dir = pathlib.Path("here")

    def add_job(self, job: LoraJob) -> None:
        if "bad" in job.name:
            raise ConfigError("it is bad")

    def stop_job(self, name: str, reason: str = "") -> None:
        assert name in {job.name for job in self.jobs}
        self.asked.append(("stop", name))

    def pause_job(self, name: str, reason: str = "") -> None:
        assert name in {job.name for job in self.jobs}
        self.asked.append(("pause", name))

    def resume_job(self, name: str) -> None:
        self.asked.append(("resume", name))


class Sent(Link):
    """Keeps what a worker sends."""

    def __init__(self):
        self.messages = []

    def send(self, message) -> None:
        self.messages.append(message)


@pytest.fixture
def control():
    """A worker that has c0 and c1."""
    made = GroupControl(Sent(), ())
    made.trainer = Run("c0", "c1")
    made.review(made.trainer.jobs)
    return made


def receive(control: GroupControl, *messages) -> None:
    for message in messages:
        control.receive(message)
    control.review(control.trainer.jobs)


def refused(name: str, reason: str) -> m.Ended:
    progress = JobProgress(status="failed", reason=reason)
    return m.Ended(name=name, progress=progress)


def settings(name: str, **changes) -> LoraJob:
    return LoraJob(name=name, data={"path": "a"}, eval_fraction=0.1, **changes)


def test_requests_wait_until_a_configuration_has_joined(control):
    late = [
        m.Give(name="late", settings=settings("late")),
        m.Ask(action="pause", name="late", reason="enough"),
    ]
    bad = [
        m.Give(name="bad", settings=settings("bad")),
        m.Ask(action="stop", name="bad", reason="enough"),
    ]
    receive(control, *late, *bad, m.Ask(action="stop", name="c0", reason="enough"))
    control._opener.shutdown()  # waits until both are read; none is read twice
    receive(control)
    assert control.trainer.asked == [("stop", "c0")]
    assert control._link.messages == [refused("bad", "it is bad")]
    control.trainer.jobs.append(Job("late"))
    receive(control)
    assert control.trainer.asked == [("stop", "c0"), ("pause", "late")]
    receive(control)
    assert len(control.trainer.asked) == 2 and not control._asks


def test_a_configuration_without_a_state_is_released_at_once(control):
    receive(control, m.Give(name="c0"), m.Give(name="c1"))
    control.trainer.jobs[1].update(status="running", slot=0)
    receive(
        control, m.Ask(action="release", name="c0"), m.Ask(action="release", name="c1")
    )
    assert control._link.messages == [m.Saved(name="c0", is_released=True)]
    assert not control.wants_checkpoint()
    assert all(map(control.waiting_reason, control.trainer.jobs))
    control.trainer.jobs[1].parked = object()
    assert control.wants_checkpoint() and not control.wants_checkpoint()
    # It may come back, also if it was paused on the way.
    receive(control, m.Give(name="c0"))
    assert control.waiting_reason(control.trainer.jobs[0]) is None
    assert control.trainer.asked == [("resume", "c0")]


def test_a_configuration_that_is_being_read_may_be_released(control):
    receive(control, m.Give(name="late", settings=settings("late")))
    receive(control, m.Ask(action="release", name="late"))
    assert control._link.messages == [m.Saved(name="late", is_released=True)]
    assert not control.wants_checkpoint()
    control._opener.shutdown()
    control.trainer.jobs.append(Job("late"))
    receive(control)
    assert control.waiting_reason(control.trainer.jobs[-1]) is not None


def copy_settings(name: str, origin: str) -> LoraJob:
    return settings(name, clone_of={"job": origin, "step": 2})


def test_a_copy_comes_after_its_job_and_is_saved_at_once(control):
    receive(
        control,
        m.Give(name="late", settings=settings("late")),
        m.Give(name="copy", settings=copy_settings("copy", "late")),
    )
    assert control._adding.keys() == {"late"}  # the data of the copy are read later
    control._opener.submit(str).result()
    jobs = control.trainer.jobs
    jobs.append(Job("late"))
    receive(control)
    control._opener.shutdown()
    jobs.append(Job("copy"))
    jobs[-1].prepared.settings = copy_settings("copy", "late")
    receive(control)
    assert control.waiting_reason(jobs[-1]) is None and not control.wants_checkpoint()
    jobs[-1].parked = object()  # the state of the other job
    assert control.wants_checkpoint() and not control.wants_checkpoint()
    assert control._unsaved == {"copy"}


def test_a_copy_without_a_state_is_refused_where_its_job_is_not(control):
    receive(control, m.Give(name="copy", settings=copy_settings("copy", "c0")))
    control._opener.shutdown()
    control.trainer.jobs.append(Job("copy"))
    job = control.trainer.jobs[-1]
    job.prepared.settings = copy_settings("copy", "c0")
    receive(control)
    reason = "c0 has ended, and its copy has no state"
    assert control._link.messages[-1] == refused("copy", reason)
    assert control.waiting_reason(job) is not None


def test_a_damaged_checkpoint_ends_the_sweep(control, monkeypatch, tmp_path):
    """Otherwise, one worker after the other would fail at it."""
    place = tmp_path / "checkpoints" / "3" / "run"
    place.mkdir(parents=True)
    (place / "meta.json").write_text("{}")

    def train(begin, link, driver):
        receive(control, m.Give(name="c0", sources=(str(tmp_path),)))

    monkeypatch.setattr(worker, "train", train)
    driver = worker._Driver()
    driver.receive(m.Begin(run={}))
    assert worker.follow(control._link, driver) == 1
    (failed,) = control._link.messages
    assert failed.is_final and "3/run/meta.json" in failed.reason
    assert "remove" in failed.reason


def test_an_end_is_reported_when_the_best_weights_are_there(control):
    """They are those of an evaluation here, which are being written, or came along."""
    (job, other), sent = control.trainer.jobs, control._link.messages
    for one in (job, other):
        one.prepared.settings = one.settings.replace(keep_best=True)
    job.update(status="finished", step=4, best_step=4)
    control._ends.begin("c0", 2, pathlib.Path("there"))
    control.on_job_end(end_of(job))
    assert not sent
    control.on_export(ExportEvent(round=1, job="c0", step=4, folder=pathlib.Path()))
    assert sent.pop().folder == str(pathlib.Path("here/adapters/c0").absolute())
    other.update(status="finished", step=4, best_step=2)
    control._ends.begin("c1", 2, pathlib.Path("there"))
    control.on_job_end(end_of(other))
    assert sent.pop().folder == str(pathlib.Path("there/adapters/c1").absolute())


def test_signals_from_a_scheduler_and_the_driver_let_a_run_end(control, monkeypatch):
    driver, ended = worker._Driver(), []
    monkeypatch.setattr(worker.os, "_exit", ended.append)
    before = signal.signal(signal.SIGTERM, driver.on_signal)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert ended.pop() == 1  # nothing was trained
        driver.attach(control)
        control.on_run_start(
            RunStartEvent(
                round=0,
                jobs=(),
                output_dir=control.trainer.output_dir,
                num_slots=1,
                is_resumed=False,
            )
        )
        with StopRequest("x") as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert not ended
    finally:
        signal.signal(signal.SIGTERM, before)


def end_of(job: Job) -> JobEndEvent:
    return JobEndEvent(
        round=1,
        job=job.name,
        progress=job.progress,
        num_steps=4,
        status=job.progress.status,
        reason="",
    )
