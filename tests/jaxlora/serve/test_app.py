"""What every request and answer goes through, whatever its route."""

import asyncio
import contextlib
import logging
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from typing import Annotated

import httpx
import numpy as np
import pydantic
import pytest
import yaml
import zstandard
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient

from jaxlora.cli.main import main
from jaxlora.config.serve_config import ServeConfig
from jaxlora.config.session_config import AdamParams
from jaxlora.errors import ConfigError, DeviceError, StorageError
from jaxlora.hf.load import load_model
from jaxlora.serve import listener
from jaxlora.serve.app import (
    delete_expired,
    end_unused,
    make_app,
    make_server,
    park_lapsed,
    serve,
)
from jaxlora.serve.keys import Principal, allowed
from jaxlora.serve.limits import OverQuota
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Pass,
    Save,
    Step,
    Unload,
)
from jaxlora.serve.server import Server
from jaxlora.session.datum import ChosenLoss
from tests import tiny
from tests.jaxlora.serve.running import free_port
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import datums

KEY = "alice/0f:train:0/weights/first"
Trainer = Annotated[Principal, Depends(allowed("train"))]


class Settings(pydantic.BaseModel):
    """The body of a route that the tests add."""

    rank: int


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("app") / "model"))


def make(model, folder: pathlib.Path, **settings) -> tuple[Server, FastAPI]:
    """A server with some more routes, which do what tests ask for."""
    config = ServeConfig(
        model="m", folder=str(folder / "serve"), session=SETTINGS, **settings
    )
    server = make_server(config, model)
    app = make_app(server)

    @app.post("/size")
    async def size(request: Request, who: Trainer):
        return {"size": len(await request.body()), "tenant": who.tenant}

    @app.post("/rank")
    async def rank(settings: Settings):
        return settings

    @app.get("/wait")
    async def wait():
        await asyncio.sleep(3600)

    @app.get("/fail/{how}")
    async def fail(how: str):
        raise {
            "unexpected": RuntimeError("the text of a tenant"),
            "device": DeviceError("memory is full"),
            "quota": OverQuota("wait"),
        }[how]

    return server, app


@pytest.fixture
def local(model, tmp_path):
    with TestClient(make(model, tmp_path)[1], base_url="http://localhost") as client:
        yield client


@pytest.fixture
def server(model, tmp_path):
    limits = {"body_bytes": 1000, "open_bytes": 1500, "body_seconds": 0.05}
    return make(model, tmp_path, keys=True, limits=limits)


@pytest.fixture
def client(server):
    with TestClient(server[1]) as client:
        yield client


def headers(server, *scopes: str) -> dict[str, str]:
    return {"x-api-key": server[0].keys.add("alice", scopes)}


def test_without_a_key_nothing_is_answered(client, server):
    """Not even whether there is such a route, or whether the body is too large."""
    for method, path in (("GET", "/none"), ("POST", "/size"), ("GET", "/fail/device")):
        answer = client.request(method, path, content=bytes(5000))
        assert answer.status_code == 401, path
        assert "this request has no key. Send the key" in answer.json()["detail"]
        assert answer.headers["www-authenticate"] == "Bearer"
    wrong = {"x-api-key": "tml-local"}
    assert "this key is not valid" in client.get("/none", headers=wrong).text
    for host in ("testserver/download/x?", "testserver/healthz?", "testserver/?"):
        assert client.get("/none", headers={"host": host}).status_code == 401, host
    assert client.get("/healthz").json() == {"status": "ok"}


def test_without_a_key_no_body_is_read(client):
    """One of 6 kB may become 64 MB in memory."""
    zstd = {"content-encoding": "zstd"}
    for method, path in (("GET", "/healthz"), ("POST", "/api/v1/healthz")):
        for body in (zstandard.compress(bytes(900)), iter([b"a"])):
            answer = client.request(method, path, content=body, headers=zstd)
            assert answer.status_code == 413, path
            assert "has no body" in answer.text


def test_a_key_is_read_from_either_header_and_has_scopes(client, server):
    key = headers(server, "train")["x-api-key"]
    for given in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
        answer = client.post("/size", headers=given, content=b"123")
        assert answer.json() == {"size": 3, "tenant": "alice"}
    answer = client.post("/size", headers=headers(server, "read", "sample"))
    assert answer.status_code == 403
    assert "this key does not allow train, only read, sample" in answer.text
    assert client.post("/size", headers=headers(server, "admin")).status_code == 200


def test_bodies_are_bounded_before_they_are_read(client, server):
    own = headers(server, "train")
    send = lambda body, **more: client.post("/size", headers=own | more, content=body)
    assert send(bytes(1000)).json()["size"] == 1000
    assert send(bytes(1001)).status_code == 413
    assert send(b"", **{"content-length": "9" * 30}).status_code == 413
    assert send(b"", **{"content-length": "-1"}).status_code == 400
    assert send(iter([bytes(600)] * 2)).status_code == 413  # its length is not said
    assert send(iter([bytes(600)])).json()["size"] == 600
    zstd = {"content-encoding": "zstd"}
    assert send(zstandard.compress(bytes(1000)), **zstd).json()["size"] == 1000
    assert send(zstandard.compress(bytes(1001)), **zstd).status_code == 413
    assert send(b"no zstd", **zstd).status_code == 400
    answer = send(b"", **{"content-encoding": "gzip"})
    assert answer.status_code == 415 and "Use zstd or none" in answer.text


def asgi(app: FastAPI, scope: dict, receive) -> list[dict]:
    """Sends a request message by message."""
    sent = []

    async def send(message):
        sent.append(message)

    base = {"type": "http", "method": "POST", "path": "/size", "query_string": b""}
    base |= {"root_path": "", "scheme": "http", "server": ("localhost", 80)}
    asyncio.run(app(base | scope, receive, send))
    return sent


def test_a_body_that_does_not_come_is_given_up(server):
    """As are those beyond what a tenant may have open at once."""
    _, app = server
    key = headers(server, "train")["x-api-key"].encode()
    own = [(b"x-api-key", key), (b"content-length", b"900")]
    statuses = []

    async def never():
        # Another request meanwhile, of the same tenant.
        async def send(message):
            statuses.append(message.get("status"))

        scope = {"type": "http", "method": "POST", "path": "/size", "headers": own}
        scope |= {"query_string": b"", "root_path": "", "scheme": "http"}
        await app(scope, never, send)
        await asyncio.sleep(3600)

    (start, _) = asgi(app, {"headers": own}, never)
    assert start["status"] == 408
    assert statuses[0] == 429


def test_a_long_poll_is_answered_when_the_server_ends(server):
    """By then, uvicorn cancels what still runs."""
    _, app = server
    own = [(b"x-api-key", headers(server, "train")["x-api-key"].encode())]
    scope = {"type": "http", "method": "GET", "path": "/wait", "headers": own}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http"}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    async def poll():
        task = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    asyncio.run(poll())
    assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]
    assert b"Send the request again" in sent[1]["body"]


def test_an_idle_connection_is_closed_by_its_client_or_proxy():
    """nginx keeps those to the server for 60 s, and so do load balancers."""
    config = ServeConfig(model="m", folder="serve")
    config = config.replace(port=free_port())
    with listener.listen(config) as made:
        server = made.server(FastAPI(), lambda: None)
    assert server.config.timeout_keep_alive > 60


def test_more_clients_may_wait_than_a_process_may_usually_have_files(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        made, app = listener.Listener(settings={}), FastAPI()
        server = made.server(app, lambda: None)
        monkeypatch.setattr(server, "run", lambda sockets: None)
        made.run(server, app)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_request_waits_for_no_long_turn_of_the_engine(monkeypatch, tmp_path):
    """It needs several turns of Python's lock, each of which took 5 ms."""
    found, before = [], sys.getswitchinterval()

    def make_server(config, engine):
        found.append(sys.getswitchinterval())
        raise ConfigError("that is all")

    monkeypatch.setattr("jaxlora.serve.app.make_server", make_server)
    with pytest.raises(ConfigError, match="that is all"):
        serve(ServeConfig(model="m", folder=str(tmp_path), port=free_port()))
    assert found[0] <= 0.001 and sys.getswitchinterval() == before


def test_a_server_whose_jobs_cannot_be_read_ends(model, tmp_path, monkeypatch):
    """A thread that runs on would keep its process, which answers nobody."""
    server, app = make(model, tmp_path)

    def start():
        raise StorageError("the database is away")

    monkeypatch.setattr(server.jobs, "start", start)
    with pytest.raises(StorageError, match="is away") as found, TestClient(app):
        pass
    assert app.state.failure is found.value  # which `serve` raises
    assert "engine" not in {thread.name for thread in threading.enumerate()}


def test_pages_of_other_sites_cannot_use_a_local_server(local):
    """Nor can a name that somebody gives to this machine's address."""
    assert local.post("/size").status_code == 200
    assert local.post("/size", headers={"host": "127.0.0.1:8765"}).status_code == 200
    same = {"origin": "http://localhost:8765"}
    assert local.post("/size", headers=same).status_code == 200
    for bad in (
        "https://evil.example",
        "null",
        "http://[",
        "http://localhost.evil.com",
    ):
        answer = local.post("/size", headers={"origin": bad})
        assert answer.status_code == 403, bad
        assert "cannot use this server" in answer.text
    for bad in ("evil.example", "localhost.evil.com", "127.0.0.1.nip.io", "["):
        answer = local.get("/healthz", headers={"host": bad})
        assert answer.status_code == 403, bad
        assert "it answers only as localhost" in answer.text


def test_errors_are_sentences_and_show_nothing_of_the_inside(client, server, caplog):
    own = headers(server, "train")
    logging.getLogger("jaxlora").propagate = True
    answer = client.get("/fail/unexpected", headers=own)
    request_id = answer.headers["x-request-id"]
    assert answer.status_code == 500
    assert answer.json() == {
        "detail": f"an unexpected error; the server's log has it as {request_id}."
    }
    assert request_id in caplog.text and "test_app.py" in caplog.text
    assert "text of a tenant" not in caplog.text
    assert client.get("/fail/device", headers=own).status_code == 503
    assert client.get("/fail/quota", headers=own).json() == {"detail": "wait"}
    answer = client.get("/none", headers=own)
    assert answer.status_code == 404 and "no GET /none" in answer.json()["detail"]
    answer = client.post("/rank", headers=own, json={"rank": "many"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("the request: rank: ")
    assert client.post("/rank", headers=own, content=b"{").status_code == 422


def test_errors_below_v1_are_in_the_form_of_openai(client, server):
    """Also those of before a route: its clients show nothing else."""
    path, keys = "/v1/embeddings", headers(server, "sample")
    wanted = (({}, 401, "has no key"), (keys, 404, "no POST /v1/embeddings"))
    for given, status, text in (*wanted, (keys, 413, "1,000 bytes")):
        content = bytes(5000) if status == 413 else b""
        answer = client.post(path, headers=given, content=content)
        error = answer.json()["error"]
        assert answer.status_code == status and text in error.pop("message")
        assert error == {"type": "invalid_request_error", "param": None, "code": None}


def test_answers_have_headers_for_browsers(client):
    found = client.get("/healthz").headers
    assert found["x-content-type-options"] == "nosniff"
    assert found["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in found["content-security-policy"]
    assert "server" not in found and "access-control-allow-origin" not in found
    preflight = {"origin": "http://testserver", "access-control-request-method": "GET"}
    answer = client.options("/healthz", headers=preflight)
    assert "access-control-allow-origin" not in answer.headers


def test_logs_have_no_keys_queries_or_bodies(client, server, caplog):
    logging.getLogger("jaxlora").propagate = True
    caplog.set_level(logging.DEBUG, "jaxlora")
    own = headers(server, "train")
    client.post("/size?text=private", headers=own, content=b"secret words")
    lines = [
        r.getMessage() for r in caplog.records if r.name.startswith("jaxlora.serve")
    ]
    assert any("POST /size -> 200" in line for line in lines)
    for word in ("private", "secret", own["x-api-key"][24:]):
        assert not any(word in line for line in lines)


def test_a_link_downloads_without_a_key(client, server, tmp_path):
    server, _ = server
    with server.storage.writing(KEY) as path:
        path.mkdir()
        (path / "a.json").write_text("{}")
    answer = client.get(server.links.path(KEY, 60))
    (tmp_path / "a.tar").write_bytes(answer.content)
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getnames() == ["first/a.json"]
    assert answer.headers["content-disposition"] == 'attachment; filename="first.tar"'
    assert client.get(server.links.path(KEY, 60, file="a.json")).text == "{}"
    assert client.get(server.links.path(KEY, 0)).status_code == 403
    assert client.get(server.links.path("alice/none", 60)).status_code == 404
    link = server.links.path(KEY, 60)
    assert client.get(link.replace("first", "other")).status_code == 403
    assert client.get(f"/download/{KEY}").status_code == 422


def test_what_is_over_is_deleted_with_its_files(model, tmp_path):
    server, _ = make(model, tmp_path)
    for name, expires_in in (("over", -1.0), ("there", 1000.0)):
        with server.storage.writing(f"alice/m/weights/{name}") as path:
            path.write_bytes(b"1")
        server.registry.add(
            "checkpoint",
            "alice",
            name,
            expires_in=expires_in,
            key=f"alice/m/weights/{name}",
        )
    # One that cannot be deleted now does not keep the others.
    server.registry.add("checkpoint", "alice", "bad", expires_in=-2.0, key="no key")
    delete_expired(server)
    server.registry.delete("alice", "checkpoint", "bad")
    assert [entry.id for entry in server.registry.list(None, "checkpoint")] == ["there"]
    assert server.storage.list("alice") == {"alice/m/weights/there": 1}
    server.database.close()


def test_models_of_a_client_that_is_gone_leave_their_slots(model, tmp_path):
    """And no others; they are still there."""
    server, app = make(model, tmp_path, retention={"heartbeat_seconds": 100.0})
    create = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
    parked = []
    park = server.hub.engine.park
    server.hub.engine.park = lambda one: (park(one), parked.append(one.name))
    with TestClient(app, base_url="http://localhost"):
        for session in ("gone", "there"):
            server.registry.add("session", "local", session)
            id = server.registry.add("model", "local", f"{session}:1", parent=session)
            server.hub.submit("local", id, 1, create).outcome.result(timeout=60)
        ago = time.time() - 120.0  # not much longer than allowed
        server.registry.update("local", "session", "gone", touched_at=ago)
        park_lapsed(server)
        step = Step(params=AdamParams(learning_rate=1e-3))
        done = server.hub.submit("local", "gone:1", 2, step).outcome.result(timeout=60)
    assert {*parked} == {"gone:1"} and isinstance(done, Done)


def test_clients_that_are_gone_for_good_are_forgotten(model, tmp_path):
    """But for models with checkpoints, which are unloaded."""
    server, app = make(model, tmp_path, retention={"session_seconds": 100.0})
    registry, seconds = server.registry, 120.0
    create = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
    with TestClient(app, base_url="http://localhost") as client:
        for session in ("gone", "saved", "there"):
            registry.add("session", "local", session)
            about = {"base_model": "m", "lora": {"rank": 4}}
            id = registry.add("model", "local", f"{session}:1", parent=session, **about)
            server.hub.submit("local", id, 1, create).outcome.result(timeout=60)
        key = "local/saved:1/weights/one"
        with server.storage.writing(key) as path:
            path.write_bytes(b"1")
        registry.add(
            *("checkpoint", "local", "saved:1/weights/one"), parent="saved:1", key=key
        )
        for session in ("gone", "saved"):
            ago = time.time() - seconds
            registry.update("local", "session", session, touched_at=ago)
            registry.update("local", "model", f"{session}:1", touched_at=ago)
        end_unused(server)
        runs = client.get("/api/v1/training_runs").json()["training_runs"]
        assert {run["training_run_id"] for run in runs} == {"saved:1", "there:1"}
        last = {run["training_run_id"]: run["last_checkpoint"] for run in runs}
        assert last["saved:1"]["checkpoint_id"] == "weights/one"
        found = client.get("/api/v1/sessions").json()["sessions"]
        assert {*found} == {"saved", "there"}
        for id in ("gone:1", "saved:1"):
            again = server.hub.submit_last("local", id, Unload())
            assert isinstance(again.outcome.result(timeout=60), Failed)
        assert [one.id for one in server.hub.status().models] == ["there:1"]


def test_passes_beyond_the_rate_of_a_tenant_wait(model, tmp_path, clock):
    """They are accepted, and run when the tenant has tokens again."""
    slow = {"default": {"tokens_per_second": 0.1}}
    server, app = make(model, tmp_path, quotas=slow)
    server.limits._clock = clock
    create = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
    given = Pass(
        data=tuple(datums(np.random.default_rng(0))),
        loss=ChosenLoss.of("cross_entropy", None),
        is_training=False,
    )
    with TestClient(app, base_url="http://localhost"):
        submit = lambda number, what: server.hub.submit("a", "m", number, what)
        submit(1, create).outcome.result(timeout=60)
        submit(2, given).outcome.result(timeout=60)
        second = submit(3, given)
        second.accepted.result(timeout=60)
        assert server.hub.waiting("a").state == "paused_rate_limit"
        assert server.hub.waiting("b").state == "active"
        with pytest.raises(TimeoutError):
            second.outcome.result(timeout=0.1)
        clock.now += 10 * sum(len(datum.tokens) for datum in given.data)
        assert isinstance(second.outcome.result(timeout=60), Done)


def test_postgres_and_an_object_store_do_the_same(model, tmp_path, postgres_url):
    """A model goes on from its ledger, and from a checkpoint that was stored."""
    settings = {"database": postgres_url, "storage": "memory:///"}
    create = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
    step = Step(params=AdamParams(learning_rate=1e-3))
    save = Save(checkpoint="local/m/weights/one", kind="state")
    load = Load(checkpoint="local/m/weights/one", with_optimizer=True)
    with contextlib.ExitStack() as stack:
        first, app = make(model, tmp_path, **settings)
        stack.enter_context(TestClient(app, base_url="http://localhost"))
        for number, what in enumerate((create, step, save), 1):
            promise = first.hub.submit("local", "m", number, what)
            assert isinstance(promise.outcome.result(timeout=60), Done), what
        with pytest.raises(ConfigError):  # it belongs to one server at a time
            make(model, tmp_path / "other", **settings)
    # The store of the next one is the same, as that of a cloud would be.
    second, app = make(model, tmp_path, **settings)
    second.storage._place._store = first.storage._place._store
    with TestClient(app, base_url="http://localhost"):
        known = second.hub.promise("local", promise.request_id)
        assert known is not None and isinstance(known.outcome.result(timeout=60), Done)
        done = second.hub.submit("local", "n", 1, load).outcome.result(timeout=60)
        assert isinstance(done, Done)
        done = second.hub.submit("local", "n", 2, step).outcome.result(timeout=60)
        assert isinstance(done, Done) and done.result.step == 2


def test_keys_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "folder": str(tmp_path / "serve")}))
    run = lambda *words: main(["keys", words[0], str(file), *words[1:]])
    assert run("add", "alice", "--scopes", "train, read", "--expires", "90d") == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert key.startswith("tml-") and "the server keeps its hash" in said.err
    assert "this server demands no keys" in said.err
    assert run("rotate", key[4:20]) == 0
    new = capsys.readouterr().out.strip()
    assert run("revoke", new[4:20]) == 0
    assert f"revoked key {new[4:20]} of alice" in capsys.readouterr().out
    assert run("list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    rows = [line for line in lines if line[:1] in ([key[4:20]], [new[4:20]])]
    assert [row[1:3] for row in rows] == [["alice", "train,read"]] * 2
    assert "revoked" in rows[1] and "revoked" not in rows[0]
    assert key[24:] not in str(lines)
    assert run("add", "Alice") == 1 and "small letters" in capsys.readouterr().err
    assert run("revoke") == 1
    assert "needs the id of the key at the end" in capsys.readouterr().err


def test_the_extra_that_is_not_installed(tmp_path, capsys, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\n")
    for name in ("sqlalchemy", "jaxlora.serve.database", "jaxlora.serve.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    assert main(["keys", "list", str(file)]) == 1
    said = capsys.readouterr().err
    assert "needs sqlalchemy, which is not installed. Run: pip install" in said


@pytest.mark.grid
def test_a_server_ends_by_a_signal_and_keeps_others_out(tmp_path, capsys):
    """It takes its address first, and says it when it takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = {
        "model": str(tiny.write_model(tmp_path / "model")),
        "folder": str(tmp_path / "serve"),
        "port": port,
        "session": SETTINGS | {"microbatch_tokens": [32, 96]},
    }
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "jaxlora", "serve", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert httpx.get(f"{address}/healthz").json() == {"status": "ok"}
        assert main(["serve", str(file)]) == 1
        assert "Set another port, or host" in capsys.readouterr().err
        assert main(["serve", str(file), f"port={port + 1}"]) == 1
        assert "Stop that, or set another folder" in capsys.readouterr().err
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 0
    assert time.monotonic() - begin < 10
    assert "what it has acknowledged is on the disk" in rest


@pytest.mark.parametrize("host", ["x" * 70, "a..b"])
def test_a_host_that_is_none_is_refused_before_anything_is_loaded(host):
    config = ServeConfig(model="m", host=host, behind_proxy=True)
    with pytest.raises(ConfigError, match=r"cannot listen .* Set another port"):
        listener._bind(config)
