"""Tests requests to stop, pause and resume jobs."""

import types

import pytest

from jaxlora import LoraJob
from jaxlora.run.saved_run import SavedRequests
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs


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
    saved = SavedRequests(stopping={"old": "then"}, pausing={"idle": "then"})
    live.restore_requests(saved)
    assert live.stop_reason("old") == live.pause_reason("idle") == "then"
    assert live.saved_requests() == saved
    live.stop("a", "now")
    live.pause("b", "now")
    live.resume("idle")
    assert live.stop_reason("a") == live.pause_reason("b") == "now"
    assert live.pause_reason("idle") is None
    assert live.saved_requests().pausing == {"b": "now"}


def test_requests_made_before_saved_ones_are_restored_take_precedence(live):
    live.stop("a", "new")
    live.resume("b")
    saved = SavedRequests(stopping={"a": "old"}, pausing={"b": "old"})
    live.restore_requests(saved)
    assert live.stop_reason("a") == "new" and live.pause_reason("b") is None
