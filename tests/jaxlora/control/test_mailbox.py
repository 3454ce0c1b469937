"""Requests and answers are files that only the owner of a run can write."""

import json
import os

import pytest

from jaxlora.config.run_file import RunFile
from jaxlora.errors import ConfigError
from jaxlora.run.live import client, mailbox
from jaxlora.run.live.mailbox import Answer, ControlRequest, Mailbox
from jaxlora.run.live.status_file import StatusFile
from jaxlora.run.lock import Owner, RunLock
from jaxlora.run.status import StatusTracker
from tests.jaxlora.run import made_events
from tests.jaxlora.train import made_run

STOP = ControlRequest(action="stop", job="a", reason="enough")


@pytest.fixture
def box(tmp_path) -> Mailbox:
    box = Mailbox(tmp_path)
    box.create()
    return box


def test_a_request_and_its_answer(box, tmp_path):
    first = box.post(STOP)
    second = box.post(ControlRequest(action="resume", job="a"))
    assert box.names() == [first, second] and box.read(first) == STOP
    assert box.take_answer(first) is None
    answer = Answer(is_accepted=True, text="it stops")
    box.answer(first, answer)
    box.answer(first, Answer(is_accepted=False, text="twice"))  # it is answered already
    assert box.names() == [second]
    assert box.take_answer(first) == answer and box.take_answer(first) is None
    assert box.withdraw(second) and not box.withdraw(second)
    assert not list((tmp_path / "control").iterdir())


def test_only_the_owner_may_enter(box, tmp_path):
    folder = tmp_path / "control"
    name = box.post(STOP)
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    folder.chmod(0o770)
    for use in (box.check, box.create):
        with pytest.raises(ConfigError, match=r"other users \(mode 770\).*chmod 700"):
            use()
    folder.chmod(0o700)
    box.create()
    assert box.names() == [name]


def test_another_user_is_refused(box, monkeypatch):
    name = box.post(STOP)
    monkeypatch.setattr(mailbox.os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="only its owner may send"):
        box.check()
    with pytest.raises(ConfigError, match="is not a file of this user"):
        box.read(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "has another form"),
        (json.dumps({"action": "run", "job": "a"}), "has another form"),
        (json.dumps({"action": "stop", "job": "../a"}), "has another form"),
        (json.dumps({"action": "stop", "job": "a", "then": 1}), "has another form"),
        (json.dumps({"action": "add", "job": "a"}), "settings contradict"),
        (" " * ((1 << 20) + 1), "more than 1,048,576 bytes"),
    ],
)
def test_files_of_another_form_are_refused(box, tmp_path, text, message):
    name = box.post(STOP)
    (tmp_path / "control" / f"{name}.request.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        box.read(name)


def test_links_pipes_and_folders_are_ignored(box, tmp_path, caplog):
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"action": "stop", "job": "a"}))
    for make in (lambda path: path.symlink_to(secret), os.mkfifo, os.mkdir):
        name = box.post(STOP)
        path = tmp_path / "control" / f"{name}.request.json"
        path.unlink()
        make(path)
        with pytest.raises(ConfigError, match="cannot be read: it is not a regular"):
            box.read(name)
        for _ in range(2):
            assert not box.names()
        assert caplog.text.count(f"{name}.request.json is ignored") == 1
        assert os.path.lexists(path)


def test_answers_that_nobody_reads_are_removed(box, tmp_path):
    """A folder with the name of one stays, and a kill's leftovers do not."""
    folder = tmp_path / "control"
    old, kept = (f"{i:020d}-{'0' * 16}.answer.json" for i in (1, 2))
    (folder / old).write_text("{}")
    (folder / kept).mkdir()
    (folder / "my.answer.json").write_text("{}")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    box.create()
    assert sorted(p.name for p in folder.iterdir()) == [kept, "my.answer.json"]


def test_a_run_that_does_not_train_takes_no_request(tmp_path):
    with pytest.raises(ConfigError, match="it has no folder control"):
        client.send(tmp_path, "stop", "a")
    box = Mailbox(tmp_path)
    box.create()
    with pytest.raises(ConfigError, match=r"no process trains .* Continue the run"):
        client.send(tmp_path, "stop", "a")
    with pytest.raises(ConfigError, match=r"no process trains .* to the run file"):
        client.send(tmp_path, "add", "a", settings={"name": "a"})
    assert not box.names()


def test_a_request_to_resume_waits_for_the_run(tmp_path):
    folder, tracker = tmp_path, StatusTracker()
    tracker.on_event(made_events.run_start(*map(made_events.info, ("now", "over"))))
    tracker.on_event(made_events.job_end("over", 10))
    box = Mailbox(folder)
    box.create()
    answer = client.send(folder, "resume", "any")  # no job has begun
    assert answer.is_accepted and "waits for --resume" in answer.text
    assert box.withdraw(box.names()[0])
    StatusFile(folder, tracker).on_event(made_events.run_start())
    refused = client.send(folder, "resume", "nobody")
    assert not refused.is_accepted and "no job 'nobody'" in refused.text
    refused = client.send(folder, "resume", "over")
    assert not refused.is_accepted
    assert refused.text == "job 'over' has ended already (finished): a reason."
    assert not box.names()
    answer = client.send(folder, "resume", "now")
    assert answer.is_accepted and "train --resume" in answer.text
    (name,) = box.names()
    assert box.read(name) == ControlRequest(action="resume", job="now")


def test_a_run_that_ends_first_takes_no_request(tmp_path, monkeypatch):
    """The request is taken back."""
    folder = made_run.write_run(tmp_path / "run")
    Mailbox(folder).create()
    monkeypatch.setattr(client, "_LIVENESS_SECONDS", 0.0)
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.001)
    owners = iter([Owner.this_process(), None])
    monkeypatch.setattr(client, "find_owner", lambda folder: next(owners))
    with pytest.raises(ConfigError, match="ended before it answered"):
        client.send(folder, "stop", "now")
    assert not Mailbox(folder).names()


def test_no_answer_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.001)
    Mailbox(tmp_path).create()
    with (
        RunLock(tmp_path),
        pytest.raises(ConfigError, match=r"not answered in 0\.01 s"),
    ):
        client.send(tmp_path, "stop", "a", timeout=0.01)
    assert len(Mailbox(tmp_path).names()) == 1


def test_a_job_file(tmp_path, monkeypatch):
    """Paths that exist become absolute; ids on the hub stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\ndata: {path: a.jsonl}\neval_data: {path: nobody/data}\nr: 8\n"
    )
    assert client.job_settings(path, tmp_path) == {
        "name": "a",
        "data": {"path": str(tmp_path / "a.jsonl")},
        "eval_data": {"path": "nobody/data"},
        "rank": 8,
    }
    path.write_text("name: a\n")
    with pytest.raises(ConfigError, match=r"job\.yaml: data: "):
        client.job_settings(path, tmp_path)


def test_a_job_to_add_has_the_defaults_of_the_run(tmp_path):
    """They are those with which it began, by whatever name; the job's come first."""
    run_file, job_file = tmp_path / "mine.yaml", tmp_path / "job.yaml"
    run_file.write_text(
        "model: none\noutput_dir: none\n"
        "defaults: {learning_rate: 1e-2, eval_fraction: 0.1, r: 4}\n"
        "jobs: [{name: a, data: {path: a.jsonl}}]\n"
    )
    overrides = ["defaults.eval_fraction=0.2", "jobs.a.rank=2"]
    copy = tmp_path / "run_file.yaml"
    copy.write_text(RunFile.read(run_file, overrides).kept_text())
    job_file.write_text("{name: b, data: {path: b.jsonl}, rank: 8}")
    found = client.job_settings(job_file, tmp_path)
    assert found == {
        "name": "b",
        "data": {"path": "b.jsonl"},
        "learning_rate": 1e-2,
        "eval_fraction": 0.2,
        "rank": 8,
    }
    copy.write_text("defaults: {lora_r: [4, 8]}")
    assert client.job_settings(job_file, tmp_path)["rank"] == 8
    job_file.write_text("{name: b, data: {path: b.jsonl}}")
    with pytest.raises(
        ConfigError, match=r"job\.yaml: lora_r, from the defaults .*give another"
    ):
        client.job_settings(job_file, tmp_path)
