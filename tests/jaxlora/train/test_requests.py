"""Tests requests to stop, pause and resume jobs."""

from jaxlora.run.saved_run import SavedRequests
from jaxlora.train.requests import Requests


def test_requests_count_after_saved_ones_are_restored():
    requests = Requests()
    saved = SavedRequests(stopping={"old": "then"}, pausing={"idle": "then"})
    requests.restore(saved)
    assert requests.stop_reason("old") == requests.pause_reason("idle") == "then"
    requests.stop("a", "now")
    requests.pause("b", "now")
    requests.resume("idle")
    assert requests.stop_reason("a") == requests.pause_reason("b") == "now"
    assert requests.pause_reason("idle") is None


def test_requests_made_before_saved_ones_are_restored_take_precedence():
    requests = Requests()
    requests.stop("a", "new")
    requests.resume("b")
    requests.restore(SavedRequests(stopping={"a": "old"}, pausing={"b": "old"}))
    assert requests.stop_reason("a") == "new" and requests.pause_reason("b") is None
