"""The log of a run: nothing in it is lost when a run starts again or resumes."""

import os
import pathlib

import pytest

from jaxlora.errors import CheckpointError
from jaxlora.run.log import RunLog, read_events
from tests.jaxlora.run import made_events


def train(folder: pathlib.Path, keep_rounds: int | None, rounds: range) -> None:
    log = RunLog(folder, keep_rounds=keep_rounds)
    for number in rounds:
        log.on_event(made_events.step("a", number, loss=number + 0.5))
    log.close()


def steps(path: pathlib.Path) -> list[int]:
    return [event["step"] for event in read_events(path)]


def test_events_that_happen_again_are_kept_apart(tmp_path, caplog):
    """After a kill, after older checkpoints, and where checkpoints were removed."""
    log, dropped = tmp_path / "metrics.jsonl", tmp_path / "metrics_dropped.jsonl"
    train(tmp_path, None, range(1, 6))
    assert not dropped.exists()
    train(tmp_path, 5, range(6, 7))
    assert steps(log) == [1, 2, 3, 4, 5, 6] and not dropped.exists()
    train(tmp_path, 4, range(5, 7))
    assert steps(log) == [1, 2, 3, 4, 5, 6] and steps(dropped) == [5, 6]
    before = read_events(log)
    train(tmp_path, None, range(1, 3))
    assert steps(log) == [1, 2]
    assert read_events(dropped)[2:] == before
    assert "6 events from round 1 on go to metrics_dropped.jsonl" in caplog.text


def test_a_pipe_in_the_place_of_dropped_events(tmp_path):
    train(tmp_path, None, range(1, 3))
    os.mkfifo(tmp_path / "metrics_dropped.jsonl")
    with pytest.raises(CheckpointError, match=r"not a regular file\. Move it away"):
        RunLog(tmp_path, keep_rounds=None)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
