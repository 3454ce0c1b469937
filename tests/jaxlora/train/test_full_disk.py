"""A disk that fills up: errors in words, no traces of threads, nothing half written."""

import errno
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxlora.errors import CheckpointError, StorageError
from jaxlora.run import log as run_log
from jaxlora.run.log import RunLog, read_events
from jaxlora.trackers import tensorboard
from jaxlora.trackers.table import open_trackers
from jaxlora.train.report.summary import RunResult, write_report
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest
from tests.jaxlora.run import made_events
from tests.jaxlora.train import made_run
from tests.jaxlora.train.runs import events_of

FULL = """
import json, logging, pathlib, resource, sys
logging.getLogger("absl").setLevel(logging.ERROR)  # as `jaxlora.cli.main` does
from jaxlora.errors import CheckpointError
from jaxlora.train.saved.checkpoint import Checkpoints
from tests.jaxlora.train import made_run
for num_bytes in map(int, sys.argv[2:]):
    folder = pathlib.Path(sys.argv[1]) / str(num_bytes)
    made_run.write_checkpoints(folder, (1,))
    checkpoints = Checkpoints(folder / "checkpoints", keep=9)
    limit = num_bytes, resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = ""
    try:
        checkpoints.save(2, made_run.states(2), made_run.saved_run())
    except CheckpointError as found:
        error = str(found)
    checkpoints.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(json.dumps(error))
"""
SIZES = 0, 2000  # the metadata of orbax; the tensors


def test_checkpoints(tmp_path):
    command = [sys.executable, "-c", FULL, tmp_path, *SIZES]
    command = list(map(str, command))
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    errors = map(json.loads, ended.stdout.splitlines())
    for num_bytes, error in zip(SIZES, errors, strict=True):
        assert "could not be written to" in error
        assert "File too large" in error and "mend the cause" in error
        folder = tmp_path / str(num_bytes) / "checkpoints"
        checkpoints = Checkpoints(folder, keep=9)  # starts again, with room
        number = read_newest(folder, has_tensors=True).number
        checkpoints.save(2, made_run.states(2), made_run.saved_run())
        checkpoints.close()
        assert (number, newest_checkpoint(folder)) == (1, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_log(tmp_path, monkeypatch):
    """An event that has no room is left out whole, also if a part of it had room."""
    log = RunLog(tmp_path, keep_rounds=None)
    log.on_event(made_events.window(1))
    write = os.write

    def partly(handle, data):
        if len(data) > 9:
            return write(handle, data[:9])
        return no_space()

    with monkeypatch.context() as patched:
        patched.setattr(run_log.os, "write", partly)
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: No"):
            log.on_event(made_events.window(2))
    log.on_event(made_events.window(3))
    log.close()
    assert [e["round"] for e in events_of(tmp_path)] == [1, 3]


@pytest.mark.parametrize("at", ["write", "flush"])
def test_tensorboard(tmp_path, monkeypatch, capfd, caplog, at):
    (board,) = open_trackers(["tensorboard"], tmp_path)
    monkeypatch.setattr(tensorboard.RecordWriter, at, no_space)
    match = r"tensorboard/events.* cannot be written: No space"
    if at == "write":
        with pytest.raises(StorageError, match=match):
            board.on_event(made_events.window(1))
    else:
        board.on_event(made_events.window(1))
        board.close()
        assert re.search(match, caplog.text)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("name", ["summary.json", "losses.png"])
def test_the_report(tmp_path, monkeypatch, name):
    result = RunResult(
        jobs=(), output_dir=tmp_path, interrupted=False, num_compilations=0
    )
    write_report(result)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replace = os.replace

    def full(source, target):
        if pathlib.Path(target).name == name:
            no_space()
        replace(source, target)

    monkeypatch.setattr("jaxlora.common.atomic.os.replace", full)
    with pytest.raises(StorageError, match=f"{name} cannot be written: No space left"):
        write_report(result)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys() and after[name] == before[name]


LINES = [b'{"event": "step", "round": 1, "job": "a", "step": 1, "loss": 2.5}']


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff", "is not an event of a run: 'utf-8' codec"),
        (b"", "is not an event of a run: Expecting value"),
        (b'{"event": "st', "is not an event of a run"),
        (b"[1]", "it is a list, not an object"),
        (b'{"event": "window"}', "round is missing or not a count"),
        (b'{"event": "window", "round": "1"}', "round is missing or not a count"),
        (b'{"event": "window", "round": true}', "round is missing or not a count"),
        (b'{"event": "window", "round": -1}', "round is missing or not a count"),
        (b'{"round": 1}', "event is missing or not a string"),
        (
            b'{"event": "job_end", "round": 1, "job": "a"}',
            "step is missing or not a count",
        ),
        (
            b'{"event": "job_end", "round": 1, "job": ["a"]}',
            "job is missing or not a string",
        ),
        (LINES[0].replace(b"2.5", b"NaN"), "NaN is not a number"),
        (LINES[0].replace(b"2.5", b"1e999"), "loss is missing or not a number"),
        (LINES[0].replace(b"2.5", b"9" * 999), "int too large"),
        (LINES[0].replace(b"2.5", b"9" * 5000), "Exceeds the limit"),
        (LINES[0].replace(b"2.5", b"null"), "loss is missing or not a number"),
        (b"[" * 100_000, "maximum recursion"),
    ],
)
def test_damaged_lines_of_the_log(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    data = b"\n".join([LINES[0], line, LINES[0], b""])
    path.write_bytes(data)
    match = f"metrics.jsonl, line 2 .*{message}.*Remove the line, or move the file away"
    with pytest.raises(CheckpointError, match=match):
        RunLog(tmp_path, keep_rounds=3)
    assert path.read_bytes() == data
    path.write_bytes(LINES[0] + b"\n" + line)  # the last line, cut short by a kill
    assert len(read_events(path)) == 1
