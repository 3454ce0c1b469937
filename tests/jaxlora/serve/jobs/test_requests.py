"""Requests for jobs: what is refused, and how jobs pause, stop, copy and restart."""

import asyncio
import contextlib
import pathlib
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxlora.config.serve_config import Quota
from jaxlora.errors import StorageError
from jaxlora.serve.jobs import jobs
from jaxlora.serve.operation import Save
from tests import tiny

LONG = {
    "data": {"path": "rows.jsonl"},
    "rank": 4,
    "batch_size": 4,
    "steps": 5000,
    "eval_fraction": 0.25,
    "learning_rate": 1e-3,
}
SHORT = LONG | {"steps": 12, "eval_every": 4}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    tiny.write_records(path, 24, seed=0)
    return path


@pytest.fixture(scope="module")
def client(serve_in, rows, tmp_path_factory):
    with serve_in(tmp_path_factory.mktemp("requests"), running_jobs=2) as client:
        client.upload(rows)
        pairs = rows.with_name("pairs.jsonl")
        pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
        tiny.write_jsonl(pairs, [pair] * 8)
        client.upload(pairs)
        yield client


# ---- data ----------------------------------------------------------------------------


def test_uploads_are_listed_and_deleted(client, rows):
    other = rows.with_name("other.csv")
    other.write_text("prompt,completion\na,b\n")
    made = client.upload(other)
    assert (made["name"], made["bytes"]) == ("other.csv", other.stat().st_size)
    found = client.ok("GET", "uploads")["uploads"]
    names = [one["name"] for one in found]
    assert names == ["other.csv", "pairs.jsonl", "rows.jsonl"]
    again = client.refused("PUT", "uploads/other.csv", 409, content=b"x")
    assert "you have uploaded other.csv already" in again
    client.ok("DELETE", "uploads/other.csv")
    client.refused("GET", "uploads/other.csv", 404)


def test_an_upload_that_fails_leaves_its_name_free(client, monkeypatch):
    """Also if its file was there already when the database went away."""

    def fails(*_, **__):
        raise StorageError("the database is away")

    data = client.app.state.server.jobs.data
    with monkeypatch.context() as patch:
        patch.setattr(data._registry, "add", fails)
        client.refused("PUT", "uploads/late.csv", 503, content=b"a,b\n")
    client.refused("GET", "uploads/late.csv", 404)
    made = client.ok("PUT", "uploads/late.csv", content=b"prompt,completion\n")
    assert made["bytes"] == 18
    client.ok("DELETE", "uploads/late.csv")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.exe", b"x", "ends with '.exe'"),
        (".rows.jsonl", b"x", "cannot name an upload"),
        ("empty.jsonl", b"", "is empty"),
    ],
)
def test_what_cannot_be_uploaded(client, name, content, text):
    assert text in client.refused("PUT", f"uploads/{name}", content=content)
    client.refused("GET", f"uploads/{name}", 404)


def test_a_preview_shows_what_is_trained_on(client):
    job = {"name": "p", "data": {"path": "rows.jsonl"}}
    (data,) = client.ok("POST", "preview?samples=2", json=job)["data"]
    first, second = data["samples"]
    assert (data["path"], second["record"]) == ("rows.jsonl", 2)
    assert len(first["tokens"]) == first["num_tokens"]
    trained = [text for _, text, is_trained in first["tokens"] if is_trained]
    assert len(trained) == first["num_targets"] > 0
    assert f"[[{''.join(trained)}]]" in first["text"]


def test_errors_name_uploads_and_not_files(client, rows, tmp_path):
    bad = rows.with_name("bad.jsonl")
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    client.upload(bad)
    job = {"name": "bad", "data": {"path": "bad.jsonl"}}
    text = client.refused("POST", "jobs", json=job)
    assert "bad.jsonl" in text and "record 2" in text and "/" not in text, text


# ---- settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lerning_rate": 1}, "learning_rate"),
        ({"rank": 0, "steps": -1}, "rank"),
        ({"rank": 16}, "the slots have 8"),
        ({"dropout": 0.1}, "dropout=0.1 must be 0"),
        ({"optimizer": "lion"}, "optimizer='lion' must be adamw"),
        ({"use_dora": True}, "has use_dora"),
        ({"init_lora_weights": "pissa"}, "has its start"),
        ({"data": {"path": "/etc/passwd"}}, "neither a file that you have uploaded"),
        ({"data": {"path": "rows.jsonl", "chat_template": "/etc/passwd"}}, "chatml"),
        ({"init_from": "/etc"}, "no job of yours that has an adapter"),
        ({"objective": "reward", "data": {"path": "pairs.jsonl"}}, "a score head"),
        ({"continue_from": "/etc"}, "continue_from"),
        ({"clone_of": {"job": "a", "step": 1}}, "clone the other job"),
        ({"max_length": 512, "data": {"path": "long.jsonl"}}, "Lower max_length"),
    ],
)
def test_what_a_job_cannot_have(client, rows, settings, text):
    if settings.get("max_length"):
        long = rows.with_name("long.jsonl")
        tiny.write_jsonl(long, [{"prompt": "a" * 200, "completion": "b"}])
        client.upload(long)
    job = {"name": "bad", "data": {"path": "rows.jsonl"}} | settings
    assert text in client.refused("POST", "jobs", json=job)
    client.refused("GET", "jobs/bad", 404)


# ---- requests for jobs ---------------------------------------------------------------


def test_a_job_pauses_goes_on_and_stops(client):
    client.add(**LONG, name="long")
    client.wait("long", lambda job: job["step"] > 3)
    assert "Stop it first" in client.refused("DELETE", "jobs/long", 409)
    assert "long" in client.refused("DELETE", "uploads/rows.jsonl", 409)
    client.ok("POST", "jobs/long/pause", json={"reason": "lunch"})
    paused = client.wait("long", lambda job: job["status"] == "paused")
    assert paused["reason"] == "lunch"
    assert client.job("long")["step"] == paused["step"]
    client.ok("POST", "jobs/long/resume")
    client.wait("long", lambda job: job["step"] > paused["step"] + 3)
    client.ok("POST", "jobs/long/stop", json={"reason": "enough"})
    ended = client.wait("long")
    assert (ended["status"], ended["reason"]) == ("stopped", "enough")
    assert ended["has_adapter"] and ended["last_eval_step"] == ended["step"]
    assert "ended already" in client.refused("POST", "jobs/long/pause", 409)
    stored = client.app.state.server.registry.stored_bytes
    before = stored("local")
    client.ok("DELETE", "jobs/long")
    client.refused("GET", "jobs/long", 404)
    assert before > stored("local") > 0


def test_a_copy_goes_on_where_its_parent_was(client):
    client.add(**LONG, name="parent")
    client.wait("parent", lambda job: job["step"] > 3)
    wanted = {"name": "copy", "steps": 5001, "learning_rate": 5e-4}
    client.ok("POST", "jobs/parent/clone", json=wanted)
    copied = client.wait("copy", lambda job: job["num_metrics"] > 2)
    origin = copied["settings"]["clone_of"]
    first = client.metrics("copy")[0]
    assert (origin["job"], origin["step"] + 1) == ("parent", first["step"])
    same = client.metrics("parent")[first["step"] - 1]
    assert first["loss"] == pytest.approx(same["loss"], rel=1e-5)
    refused = client.refused("POST", "jobs/parent/clone", json={"rank": 2})
    assert "cannot change in a copy" in refused
    # One that is paused can be copied, too.
    client.ok("POST", "jobs/parent/pause")
    paused = client.wait("parent", lambda job: job["status"] == "paused")
    client.ok("POST", "jobs/parent/clone", json=wanted | {"name": "second"})
    client.wait("second", lambda job: job["step"] > paused["step"])
    assert client.job("parent")["status"] == "paused"
    for name in ("copy", "second", "parent"):
        client.ok("POST", f"jobs/{name}/stop")
        assert client.wait(name)["status"] == "stopped"


def test_a_job_that_is_exported_is_not_copied(client, monkeypatch):
    """Its last operations have their numbers, with no room for those of a copy."""
    hub, is_ending = client.app.state.server.hub, threading.Event()

    def submit(tenant, model, seq_id, operation, real=hub.submit):
        if isinstance(operation, Save):
            hold.enter_context(frozen(hub))
            is_ending.set()
        return real(tenant, model, seq_id, operation)

    with contextlib.ExitStack() as hold:
        monkeypatch.setattr(hub, "submit", submit)
        client.add(**SHORT, name="late")
        assert is_ending.wait(600)
        refused = client.refused("POST", "jobs/late/clone", 409, json={"steps": 20})
    assert "is being exported" in refused and "init_from" in refused
    assert client.wait("late")["status"] == "finished"


def test_jobs_wait_for_a_place_by_priority(client):
    for name in ("a", "b", "c"):
        client.add(**LONG, name=name)
    client.add(**LONG | {"priority": 1}, name="first")
    found = client.ok("GET", "queue")
    assert (found["all_running"], found["places"]) == (2, 2)
    names = [one["name"] for one in found["waiting"]]
    assert names == ["first", "c"]
    listed = client.ok("GET", "jobs?status=waiting&limit=1")
    (job,) = listed["jobs"]
    assert (listed["total"], job["name"], job["place"]) == (2, "first", 1)
    assert (client.job("c")["place"], client.job("a")["place"]) == (2, None)
    assert "'stopped early'" in client.refused("GET", "jobs?status=done", 422)
    ended = client.ok("POST", "jobs/c/stop")
    assert (ended["status"], ended["has_adapter"]) == ("stopped", False)
    client.ok("POST", "jobs/a/stop")
    client.wait("first", lambda job: job["status"] == "running")
    for name in ("b", "first"):
        client.ok("POST", f"jobs/{name}/stop")
        client.wait(name)


def test_jobs_that_are_added_at_once_keep_to_the_quota(client, monkeypatch):
    jobs, both = client.app.state.server.jobs, asyncio.Barrier(2)

    async def made(*given, real=jobs._made):
        await both.wait()
        return await real(*given)

    def add(name):
        return client.post("/jobs/v1/jobs", json=SHORT | {"name": name})

    monkeypatch.setattr(jobs._limits, "quota", lambda tenant: Quota(models=1))
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(jobs, "_made", made)
        added = {one.status_code: one.json() for one in threads.map(add, "de")}
    assert added.keys() == {201, 429} and "your quota is 1" in added[429]["detail"]
    client.wait(added[201]["name"])
    client.add(**SHORT, name="f")  # there is room as soon as one has ended
    client.wait("f")


def test_a_job_starts_from_the_adapter_of_another(client):
    client.add(**SHORT, name="before")
    before = client.wait("before")
    client.add(**SHORT | {"steps": 1}, name="after", init_from="before")
    after = client.wait("after")
    assert after["first_eval"] == pytest.approx(before["last_eval"], rel=1e-5)


def test_the_best_evaluation_is_kept(client):
    """Of equal ones the later."""
    settings = SHORT | {"learning_rate": 0, "keep_best": True, "early_stopping": 1}
    client.add(**settings, name="best")
    ended = client.wait("best")
    assert (ended["status"], ended["step"]) == ("stopped early", 4)
    assert (ended["best_step"], ended["has_adapter"]) == (4, True)


def test_jobs_of_other_tenants_do_not_exist(serve_in, rows, tmp_path):
    with serve_in(tmp_path, keys=True) as client:
        keys = client.app.state.server.keys
        for tenant in ("one", "two"):
            client.headers["x-api-key"] = keys.add(tenant)
            assert client.ok("GET", "uploads")["uploads"] == []
            assert client.ok("GET", "jobs")["jobs"] == []
            client.refused("GET", "jobs/mine", 404)
            client.refused("POST", "jobs/mine/stop", 404)
            client.upload(rows)
            client.add(**SHORT | {"steps": 1}, name="mine")
            client.wait("mine")


# ---- restarts ------------------------------------------------------------------------


@contextlib.contextmanager
def frozen(hub):
    """Holds the thread of the engine, when no other writes for it."""
    is_held, may_go_on = threading.Event(), threading.Event()
    hub._tasks.ask(lambda: (is_held.set(), may_go_on.wait()))
    assert is_held.wait(60)
    hub._tasks.wait()
    hub._ledger.flush()
    yield
    may_go_on.set()


def crashed(client, folder):
    """Copies a server's files as a crash would leave them."""
    server, new = client.app.state.server, folder / "serve"
    old = pathlib.Path(server.config.folder)
    new.mkdir()
    with (
        frozen(server.hub),
        contextlib.closing(sqlite3.connect(old / "serve.db")) as source,
        contextlib.closing(sqlite3.connect(new / "serve.db")) as copy,
    ):
        source.backup(copy)
        # A file that vanishes meanwhile is no longer needed.
        with contextlib.suppress(shutil.Error):
            shutil.copytree(old / "files", new / "files")
    return folder


def test_jobs_go_on_after_crashes(serve_in, rows, tmp_path_factory):
    """No step is lost or done twice: all that they report is as without a crash."""
    keys = "step", "loss", "eval_loss", "grad_norm", "learning_rate"
    images = []
    with serve_in(tmp_path_factory.mktemp("whole")) as client:
        client.upload(rows)
        client.add(**SHORT, name="one")
        client.add(**SHORT | {"steps": 400}, name="two")
        for step in (1, 3, 9):
            client.wait("one", lambda job, s=step: job["step"] >= s)
            images.append(crashed(client, tmp_path_factory.mktemp("image")))
        assert client.wait("one")["status"] == "finished"
        lines = client.ok("GET", "jobs/one/metrics")["metrics"]
        client.ok("POST", "jobs/two/stop")
        client.wait("two")
    wanted = [[line.get(key, 0) for key in keys] for line in lines]
    for folder in images:
        with serve_in(folder) as client:
            client.ok("POST", "jobs/two/pause")
            assert client.wait("one")["status"] == "finished"
            lines = client.ok("GET", "jobs/one/metrics")["metrics"]
            assert len(lines) == len(wanted)
            for line, values in zip(lines, wanted, strict=True):
                found = [line.get(key, 0) for key in keys]
                assert found == pytest.approx(values, rel=1e-4)
            paused = client.wait("two", lambda job: job["status"] == "paused")
            client.ok("POST", "jobs/two/stop")
            ended = client.wait("two")
            assert (ended["status"], ended["step"]) == ("stopped", paused["step"])
            steps = [line["step"] for line in client.metrics("two")]
            assert steps == [*range(1, paused["step"] + 1)]


def test_a_request_waits_for_what_a_crash_left(serve_in, rows, tmp_path, monkeypatch):
    """It takes effect after the steps that the log has, not before one of these."""
    monkeypatch.setattr(jobs, "_KEEP_SECONDS", 3600)  # the job is kept as it was new
    with serve_in(tmp_path / "old") as client:
        client.upload(rows)
        client.add(**LONG, name="one")
        before = client.wait("one", lambda job: job["step"] > 3)["step"]
        (tmp_path / "new").mkdir()
        folder = crashed(client, tmp_path / "new")
        client.ok("POST", "jobs/one/stop")
    with serve_in(folder) as client:
        server, is_known = client.app.state.server, threading.Event()

        def knows(model, seq_id, real=server.hub.knows):
            is_known.set()
            return real(model, seq_id)

        # No batch is submitted before the request looks for those of before.
        monkeypatch.setattr(server.hub, "knows", knows)
        monkeypatch.setattr(server.limits, "may_run", lambda tenant: is_known.is_set())
        client.ok("POST", "jobs/one/stop")
        ended = client.wait("one")
        assert ended["status"] == "stopped" and ended["step"] >= before
