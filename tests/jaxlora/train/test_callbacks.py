"""Callbacks receive every event with what it carries, and may steer the run."""

import pytest

from jaxlora import Callback, RunConfig, Trainer
from tests.jaxlora.train.runs import adapter_bytes, events_of, two_slots

pytestmark = pytest.mark.usefixtures("no_device")


@pytest.fixture
def config(model, jobs, tmp_path) -> RunConfig:
    """Three jobs in two slots."""
    return two_slots(
        model,
        tmp_path / "run",
        [jobs[0], jobs[1].replace(steps=6), jobs[2]],
        checkpoint_every=4,
    )


class Recorder(Callback):
    """Keeps all events."""

    def __init__(self):
        self.events = []

    def on_event(self, event):
        super().on_event(event)
        self.events.append(event)

    def kinds(self, job: str | None = None) -> list[str]:
        found = [e for e in self.events if job in (None, getattr(e, "job", None))]
        return [event.kind for event in found]


def test_events_carry_what_happened(config, model):
    recorder = Recorder()
    result = Trainer(config, model).train(callbacks=[recorder])
    events = recorder.events
    assert recorder.kinds()[0] == "run_start" and recorder.kinds()[-1] == "run_end"
    assert [i.settings for i in events[0].jobs] == list(config.jobs)
    assert recorder.kinds("job2")[:2] == ["job_start", "eval"]
    assert recorder.kinds("job2")[-2:] == ["job_end", "export"]
    for job in result.jobs:
        mine = [e for e in events if getattr(e, "job", None) == job.name]
        assert mine.pop().step == job.progress.step  # its adapter is written
        assert mine[-1].progress == job.progress
        steps = [e for e in mine if e.kind == "step"]
        assert [e.step for e in steps] == list(range(1, job.num_steps + 1))
        assert steps[-1].loss == job.progress.last_loss
        assert sum(e.num_tokens for e in steps) == job.progress.num_tokens
        assert {e.num_steps for e in mine} == {job.num_steps}
        best = min((e for e in mine if e.kind == "eval"), key=lambda e: e.eval_loss)
        assert best.is_best and best.step == job.progress.best_step
    folders = [e.folder for e in events if e.kind == "checkpoint"]
    assert all(folder.parent.name == "checkpoints" for folder in folders)
    assert folders[-1].is_dir() and folders[-1].name == str(events[-1].round)
    assert not events[-1].is_interrupted
    # The log has the same events, in the same order.
    logged = events_of(config.output_dir)
    assert [e["event"] for e in logged] == [e.kind for e in events if e.is_logged]


def test_checkpoints_go_by_the_clock(config, two_layers, tmp_path):
    """A short run writes the last one only. A pipeline counts rounds instead."""

    def rounds(name, **settings):
        jobs = config.jobs[:1]
        found = two_slots(two_layers, tmp_path / name, jobs, **settings)
        recorder = Recorder()
        Trainer(found, two_layers).train(callbacks=[recorder])
        saved = [e.folder.name for e in recorder.events if e.kind == "checkpoint"]
        return [int(name) for name in saved], recorder.events[-1].round

    saved, last = rounds("default")
    assert saved == [last]
    saved, last = rounds("often", checkpoint_seconds=1e-6)
    assert saved == list(range(1, last + 1))
    saved, last = rounds("stages", checkpoint_seconds=1e-6, mesh="stage=2")
    assert saved == [last]


class StopAt(Callback):
    """Stops a job at a step, and pauses another."""

    def on_step(self, event):
        if (event.job, event.step) == ("job0", 2):
            self.trainer.stop_job("job0", f"loss {event.loss:.1f} is good")
            self.trainer.pause_job("job1")


def test_a_callback_stops_and_pauses_jobs(config, model):
    result = Trainer(config, model).train(callbacks=[StopAt()])
    first, second, _ = (job.progress for job in result.jobs)
    assert (first.status, first.step) == ("stopped", 2)
    assert first.reason.endswith("is good") and second.status == "paused"


class FailsAt(Callback):
    """Raises an exception in the middle of a round."""

    def on_step(self, event):
        if event.step == 2:
            raise LookupError("not in my table")


def test_a_callback_that_fails_loses_no_step(config, model, tmp_path):
    """What is in flight is saved; a resumed run ends like one without a failure."""
    recorder = Recorder()
    with pytest.raises(LookupError, match="not in my table") as raised:
        Trainer(config, model).train(callbacks=[FailsAt(), recorder])
    assert raised.value.__notes__ == ["It was raised by FailsAt.on_step."]
    kinds = [kind for kind in recorder.kinds() if kind != "export"]
    assert kinds[-3:] == ["window", "checkpoint", "run_end"]
    assert recorder.events[-1].is_interrupted and recorder.events[-1].round < 6
    resumed = Trainer(config, model).train(resume=True)
    whole = config.replace(output_dir=str(tmp_path / "whole"))
    calm = Trainer(whole, model).train()
    for ours, wanted in zip(resumed.jobs, calm.jobs, strict=True):
        assert ours.progress == wanted.progress
    assert adapter_bytes(resumed.output_dir) == adapter_bytes(calm.output_dir)
