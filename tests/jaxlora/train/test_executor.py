"""A stream keeps its promises with any executor that keeps the contract."""

import contextlib
import functools
import math
from unittest import mock

import jax.numpy as jnp
import pytest

from jaxlora import LoraJob, RunConfig
from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.targets import ModuleLora
from jaxlora.common.background import StopRequest
from jaxlora.models.registry import model_config
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.resolve import resolve
from jaxlora.run.callback import Listeners
from jaxlora.run.lock import RunLock
from jaxlora.run.log import RunLog
from jaxlora.train.control import Control
from jaxlora.train.execute.draw_ahead import DrawAhead
from jaxlora.train.inbox import Inbox
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.loop import Loop
from jaxlora.train.report.stopwatch import Stopwatch
from jaxlora.train.run import Run
from tests import tiny
from tests.jaxlora.train.host_executor import HostExecutor, HostSlots
from tests.jaxlora.train.runs import data_of, events_of, samples_of


def job_run(name: str, lengths, **settings) -> JobState:
    """A job with two samples per step, and one held-out sample."""
    data = {"path": "none"}
    job = LoraJob(name=name, data=data, eval_data=data, batch_size=2, **settings)
    samples = samples_of(lengths)
    name = "model.layers.0.mlp.down_proj"
    prepared = PreparedJob(
        settings=job,
        modules={name: ModuleLora(rank=4, lora_alpha=4.0, scaling=1.0)},
        start=None,
        train_data=data_of(samples, 64),
        eval_data=data_of(samples[:1], 64),
    )
    return JobState(prepared, Adapter(modules={}))


def make_runs() -> list[JobState]:
    return [
        job_run("calm", [20, 30] * 6, steps=12, eval_every=3),
        job_run("wild", [30, 20] * 6, steps=12),
        job_run("stalls", [25] * 12, steps=12, eval_every=2, early_stopping=1),
        job_run("asked", [30] * 12, steps=12),
        job_run("waits", [10] * 12, steps=5),
    ]


def loss(name: str, step: int) -> float:
    return math.nan if (name, step) == ("wild", 3) else 1.0 / step


def eval_loss(name: str, step: int) -> float:
    return float(step) if name == "stalls" else 1.0 / (1 + step)


@pytest.fixture
def drive(tmp_path):
    """Runs a stream to its end; returns jobs, executor, exported steps and events."""

    def run(in_flight: int, at_border=lambda jobs, live: None):
        runs = make_runs()
        executor = HostExecutor(HostSlots(), in_flight, loss, eval_loss)
        config = RunConfig(
            model="none",
            jobs=[run.settings for run in runs],
            microbatch_tokens=64,
            block_tokens=8,
            window_steps=6,
            max_concurrent_jobs=4,
        )
        base = PlannedModel(
            config=model_config(tiny.CONFIG),
            dtype=jnp.dtype("float32"),
            base_format=None,
        )
        prepared = [run.prepared for run in runs]
        plan = resolve(config, base, prepared, this_machine())
        folder = tmp_path / str(in_flight)
        folder.mkdir()
        log, exported = RunLog(folder, keep_rounds=None), {}
        live = LiveJobs(runs, (), lambda settings: pytest.fail(settings.name))

        class Driven(Loop):
            def _at_border(self, snapshot, *, ends_round):
                super()._at_border(snapshot, ends_round=ends_round)
                at_border({job.name: job for job in runs}, live)

        def export(job: JobState) -> None:
            exported[job.name] = executor.steps[job.slot]
            if job.name == "stalls":
                live.stop("asked", "enough")  # between two borders

        with contextlib.closing(log):
            run = mock.create_autospec(Run, instance=True, plan=plan, round=0)
            run.live, run.jobs, run.control = live, runs, Control()
            run.sampler = run.meter = None
            run.slots, run.watch = executor.host, Stopwatch()
            run.ahead = DrawAhead(run.slots)
            run.export, run.send = export, log.on_event
            run.send_of = functools.partial(Run.send_of, run)
            run.has_events = False
            run.listeners, run.lock = Listeners([]), mock.create_autospec(RunLock)
            run.store = mock.Mock()
            type(run.store).latest = property(lambda _: run.round)
            inbox = mock.create_autospec(Inbox, instance=True)
            inbox.poll.return_value = inbox.is_due.return_value = False
            Driven(run, executor, inbox, StopRequest("x")).train(None)
        return runs, executor, exported, events_of(folder)

    return run


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_late_reports_change_no_decision(drive, in_flight):
    """A job ends at the same step, however many microbatches are in flight."""
    runs, executor, exported, events = drive(in_flight)
    ends = {run.name: (run.progress.status, run.progress.step) for run in runs}
    asked_at = ends.pop("asked")
    assert ends == {
        "calm": ("finished", 12),
        "wild": ("failed", 2),
        "stalls": ("stopped early", 2),
        "waits": ("finished", 5),
    }
    assert asked_at[0] == "stopped" and 2 <= asked_at[1] <= 3
    assert exported == {"calm": 12, "stalls": 2, "asked": asked_at[1], "waits": 5}
    assert not executor.steps, "all slots are released"
    steps = [e["step"] for e in events if e["event"] == "step" and e["job"] == "calm"]
    assert steps == list(range(1, 13))
    # An evaluation saw the weights of exactly the step that it is logged for.
    for event in (e for e in events if e["event"] == "eval"):
        assert event["eval_loss"] == eval_loss(event["job"], event["step"])


@pytest.mark.parametrize("in_flight", [1, 5])
def test_only_what_is_in_flight_runs_for_nothing(drive, in_flight):
    """All samples of a job's steps run, and few beyond the step at which it ends."""
    runs, executor, _, _ = drive(in_flight)
    for run in runs:
        step = run.progress.step + (run.name == "wild")  # whose last step failed
        for_nothing = executor.ran[run.name] - 2 * step
        # A microbatch holds two of its samples.
        assert 0 <= for_nothing <= 2 * (in_flight + 1)
        if run.progress.status == "finished":
            assert for_nothing == 0


def test_a_slot_that_was_left_is_taken_while_others_run(drive):
    """The job that waits starts before those that run have ended."""
    _, _, _, events = drive(2)
    started = [e["job"] for e in events if e["event"] == "job_start"]
    assert started[-1] == "waits"
    kinds = [(e["event"], e.get("job")) for e in events]
    first = kinds.index(("step", "waits"))
    assert kinds.index(("job_start", "waits")) < first
    assert first < kinds.index(("job_end", "calm"))


def test_a_longer_pipeline_runs_more_for_nothing(drive):
    """Microbatches in flight when a job ends have run, and are discarded."""
    counts = []
    for in_flight in (1, 5):
        _, executor, _, _ = drive(in_flight)
        counts.append(executor.ran["wild"])
    assert 2 * 3 <= counts[0] < counts[1]


def test_a_paused_job_continues_where_it_was(drive):
    """It leaves its slot, and takes no step and no evaluation twice."""

    paused = []

    def at_border(jobs, live):
        if jobs["calm"].progress.step == 6 and not paused:
            paused.append("calm")
            live.pause("calm", "later")
        if jobs["waits"].progress.step == 2:
            live.resume("calm")

    runs, executor, exported, events = drive(2, at_border)
    mine = [(e["event"], e["step"]) for e in events if e.get("job") == "calm"]
    changes = [
        change for change in mine if change[0] in ("job_pause", "job_resume", "job_end")
    ]
    assert changes == [("job_pause", 6), ("job_resume", 6), ("job_end", 12)]
    assert mine.index(("job_resume", 6)) == mine.index(("job_pause", 6)) + 1
    assert [step for kind, step in mine if kind == "step"] == list(range(1, 13))
    assert [step for kind, step in mine if kind == "eval"] == [0, 3, 6, 9, 12]
    assert exported["calm"] == 12 and not executor.steps
    assert all(run.parked is None for run in runs)
