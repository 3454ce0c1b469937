"""`jaxlora status` shows the state that a run has written, and whether it is alive."""

import json

import pytest

from jaxlora.cli.main import main
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.run.live import status_file
from jaxlora.run.live.status_file import StatusFile, read_status
from jaxlora.run.lock import RunLock
from jaxlora.run.status import StatusTracker
from tests.jaxlora.run import made_events

EVENTS = [
    made_events.run_start(*(made_events.info(name) for name in "abcd")),
    made_events.evaluation("b", 0, loss=2.25),
    made_events.step("c", 4, loss=1.5),
    made_events.window(4),
    made_events.job_end("a", 10),
]


@pytest.fixture
def folder(tmp_path):
    tracker = StatusTracker()
    file = StatusFile(tmp_path, tracker)
    for event in EVENTS:
        tracker.on_event(event)
        file.on_event(event)
    file.close()
    return tmp_path


def test_a_run_that_trains(folder, capsys):
    with RunLock(folder):
        assert main(["status", str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert lines[0].startswith("trained by process ")
    assert "200 tok/s" in lines[1] and "left" in lines[1]
    assert lines[2].endswith("round 4, 2 running, 1 waiting, 1 finished")
    jobs = [line.split() for line in lines[3:] if "/" in line]
    assert [cells[0] for cells in jobs] == ["b", "c", "d", "a"]
    assert jobs[0][-3:] == ["2.250", "at", "0"] and jobs[1][-3:] == [
        "4/10",
        "1.500",
        "-",
    ]
    assert found["process"]["pid"] and found["run"]["tokens_per_second"] == 200
    assert found["run"]["jobs"][0]["progress"]["status"] == "finished"


def test_a_run_that_compiles(tmp_path, capsys):
    with RunLock(tmp_path):
        assert main(["status", str(tmp_path)]) == 0
        assert "is compiling; no job has begun" in capsys.readouterr().out
        assert main(["status", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["process"]["pid"] and found["run"] is None
        assert main(["stop", str(tmp_path), "a"]) == 1
        assert "is still compiling. Make the request" in capsys.readouterr().err


def test_a_run_that_has_ended(folder, capsys):
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not running; `jaxlora train --resume`")
    # The process was killed, so that the file says that jobs are running.
    assert lines[1].endswith("round 4, 2 interrupted, 1 waiting, 1 finished")
    jobs = [line.split()[:2] for line in lines if "/" in line and "train" not in line]
    assert jobs[:2] == [["b", "interrupted"], ["c", "interrupted"]]
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    statuses = [job["progress"]["status"] for job in found["run"]["jobs"]]
    assert statuses == ["finished", "interrupted", "interrupted", "waiting"]
    assert main(["stop", str(folder), "b"]) == 1
    assert "takes no requests" in capsys.readouterr().err


def test_nothing_is_left_of_a_run_whose_jobs_have_ended(tmp_path, capsys):
    tracker = StatusTracker()
    file = StatusFile(tmp_path, tracker)
    start = made_events.run_start(made_events.info("a"))
    for event in (start, made_events.job_end("a", 10)):
        tracker.on_event(event)
        file.on_event(event)
    file.close()
    assert main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "not running" in text and "--resume" not in text


def test_events_are_written_every_two_seconds_and_at_the_end(tmp_path, monkeypatch):
    written, now = [], 100.0

    def write(path, text):
        jobs = json.loads(text)["run"]["jobs"]
        written.append(sum(j["progress"]["status"] == "finished" for j in jobs))
        path.touch()

    monkeypatch.setattr(status_file, "write_text", write)
    monkeypatch.setattr(status_file.time, "monotonic", lambda: now)
    names = [f"j{i}" for i in range(6)]
    tracker = StatusTracker()
    file = StatusFile(tmp_path, tracker)
    ends = [made_events.job_end(name, 10) for name in names]
    for event in (made_events.run_start(*map(made_events.info, names)), *ends):
        tracker.on_event(event)
        file.on_event(event)
        now += 0.7
    assert written == [0, 3, 6]
    file.close()
    assert written == [0, 3, 6]  # it has all
    now -= 0.7
    file.on_event(ends[0])
    file.close()
    assert written == [0, 3, 6, 6]


def test_a_folder_that_is_removed_is_not_made_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    tracker = StatusTracker()
    file = StatusFile(folder, tracker)
    for event in EVENTS[:2]:
        tracker.on_event(event)
        file.on_event(event)
    folder.rename(tmp_path / "moved")
    file.close()
    assert not folder.exists()


def test_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run that has begun to train"):
        read_status(tmp_path)
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"status\.json: written: "):
        read_status(tmp_path)
