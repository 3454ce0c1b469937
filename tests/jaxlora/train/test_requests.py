"""Tests requests to stop, pause and resume jobs."""

import types
from unittest import mock

import pytest

from jaxlora import LoraJob
from jaxlora.errors import ConfigError
from jaxlora.train.control import Control
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.loop import Loop
from jaxlora.train.run import Run


class Job(JobState):
    """A job of a run, as far as requests look at it."""

    def __init__(self, name: str):
        self.prepared = types.SimpleNamespace(
            settings=LoraJob(name=name, data={"path": "none"})
        )


@pytest.fixture
def live() -> LiveJobs:
    return LiveJobs([Job(name) for name in ("a", "b", "old", "idle")], (), pytest.fail)


def test_requests_count_after_saved_ones_are_restored(live):
    saved = {"stopping": {"old": "then"}, "pausing": {"idle": "then"}}
    live.restore_requests(saved)
    assert live.stop_reason("old") == live.pause_reason("idle") == "then"
    assert live.saved_requests() == saved
    live.stop("a", "now")
    live.pause("b", "now")
    live.resume("idle")
    assert live.stop_reason("a") == live.pause_reason("b") == "now"
    assert live.pause_reason("idle") is None
    assert live.saved_requests()["pausing"] == {"b": "now"}


def test_requests_made_before_saved_ones_are_restored_take_precedence(live):
    live.stop("a", "new")
    live.resume("b")
    saved = {"stopping": {"a": "old"}, "pausing": {"b": "old"}}
    live.restore_requests(saved)
    assert live.stop_reason("a") == "new" and live.pause_reason("b") is None


def test_a_suggestion_that_does_not_fit_is_left_out(live, caplog):
    """The others are added."""
    suggested = [LoraJob(name=n, data={"path": "none"}) for n in ("wide", "fits")]
    run = mock.create_autospec(Run, instance=True, plan=mock.Mock(num_slots=2))
    run.live, run.jobs, run.control = live, live.jobs, mock.create_autospec(Control)
    run.control.suggest.side_effect = [*suggested, None]
    run.take_added = lambda: live.jobs.append(Job("fits"))
    live.add = mock.Mock(side_effect=[ConfigError("its rank is too large"), None])
    loop = mock.create_autospec(Loop, instance=True)
    loop._run = run
    assert Loop._suggest(loop)
    assert "sweep: wide is left out: its rank is too large" in caplog.text
