"""No route gives a tenant anything of another, or an error of the server's own.

Each route of the app has its requests in the table below, or the first test fails.
"""

import json
import pathlib
import urllib.parse
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.hf.load import load_model
from jaxlora.serve.guard import PUBLIC
from jaxlora.serve.tinker import training
from tests import tiny
from tests.jaxlora.serve.tinker.conftest import NAME, make

SECRET = "secret-of-alice"
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]},
    },
}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
RUN = "/api/v1/training_runs/{model}"
CHECKPOINT = RUN + "/checkpoints/weights/{name}"
JOB = {
    "data": {"path": "{upload}"},
    "steps": 1,
    "rank": 4,
    "max_length": 32,
    "target_modules": ["q_proj"],
}

# The requests of each route: the path with its parameters, and the body. Texts in
# braces stand for things of a tenant.
REQUESTS: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("GET", "/openapi.json"): [("/openapi.json", None)],
    ("POST", "/api/v1/client/config"): [("/api/v1/client/config", {})],
    ("POST", "/api/v1/client/dynamic_config"): [("/api/v1/client/dynamic_config", {})],
    ("GET", "/api/v1/get_server_capabilities"): [
        ("/api/v1/get_server_capabilities", None)
    ],
    ("POST", "/api/v1/telemetry"): [("/api/v1/telemetry", {"events": []})],
    ("GET", "/page/state"): [("/page/state", None)],
    ("GET", "/metrics"): [("/metrics", None)],
    ("GET", "/api/v1/sessions"): [("/api/v1/sessions", None)],
    ("GET", "/api/v1/sessions/{id}"): [("/api/v1/sessions/{session}", None)],
    ("POST", "/api/v1/sessions/search"): [
        ("/api/v1/sessions/search", {"display_name": SECRET})
    ],
    ("GET", "/api/v1/training_runs"): [("/api/v1/training_runs", None)],
    ("GET", "/api/v1/training_runs/{run}"): [(RUN, None)],
    ("GET", "/api/v1/training_runs/{run}/checkpoints"): [(f"{RUN}/checkpoints", None)],
    ("GET", "/api/v1/checkpoints"): [("/api/v1/checkpoints", None)],
    ("GET", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"): [
        (f"{CHECKPOINT}/archive", None)
    ],
    (
        "GET",
        "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls",
    ): [(f"{CHECKPOINT}/external_weights_urls", None)],
    ("GET", "/api/v1/samplers/{id}"): [("/api/v1/samplers/{sampler}", None)],
    ("POST", "/api/v1/weights_info"): [
        ("/api/v1/weights_info", {"tinker_path": "tinker://{model}/weights/{name}"})
    ],
    ("POST", "/api/v1/get_info"): [("/api/v1/get_info", {"model_id": "{model}"})],
    ("POST", "/api/v1/retrieve_future"): [
        ("/api/v1/retrieve_future", {"request_id": "{promise}"})
    ],
    ("POST", "/api/v1/cancel_future"): [
        ("/api/v1/cancel_future", {"request_id": "{promise}"})
    ],
    ("POST", "/api/v1/session_heartbeat"): [
        ("/api/v1/session_heartbeat", {"session_id": "{session}"})
    ],
    ("POST", "/api/v1/create_session"): [
        ("/api/v1/create_session", {"tags": [], "sdk_version": "0"})
    ],
    ("POST", "/api/v1/create_model"): [
        (
            "/api/v1/create_model",
            {
                "session_id": "{session}",
                "model_seq_id": 7,
                "base_model": NAME,
                "lora_config": {"rank": 4, "seed": 1},
            },
        )
    ],
    ("POST", "/api/v1/load_weights"): [
        (
            "/api/v1/load_weights",
            {
                "session_id": "{session}",
                "model_seq_id": 8,
                "path": "tinker://{model}/weights/{name}",
                "optimizer": True,
            },
        ),
        (
            "/api/v1/load_weights",
            {
                "model_id": "{model}",
                "seq_id": 100,
                "path": "tinker://{model}/weights/{name}",
                "optimizer": True,
            },
        ),
        (
            "/api/v1/load_weights",
            {
                "session_id": "{own session}",
                "model_seq_id": 8,
                "path": "tinker://{model}/weights/{name}",
                "optimizer": True,
            },
        ),
    ],
    ("POST", "/api/v1/create_sampling_session"): [
        (
            "/api/v1/create_sampling_session",
            {
                "session_id": "{session}",
                "sampling_session_seq_id": 7,
                "base_model": NAME,
            },
        ),
        (
            "/api/v1/create_sampling_session",
            {
                "session_id": "{own session}",
                "sampling_session_seq_id": 8,
                "model_path": "tinker://{model}/sampler_weights/{name}",
            },
        ),
    ],
    ("POST", "/api/v1/asample"): [
        (
            "/api/v1/asample",
            {
                "sampling_session_id": "{sampler}",
                "seq_id": 0,
                "prompt": PROMPT,
                "sampling_params": {"max_tokens": 1},
            },
        )
    ],
    ("POST", "/api/v1/forward"): [
        (
            "/api/v1/forward",
            {"model_id": "{model}", "seq_id": 101, "forward_input": PASS},
        )
    ],
    ("POST", "/api/v1/forward_backward"): [
        (
            "/api/v1/forward_backward",
            {"model_id": "{model}", "seq_id": 102, "forward_backward_input": PASS},
        )
    ],
    ("POST", "/api/v1/optim_step"): [
        ("/api/v1/optim_step", {"model_id": "{model}", "seq_id": 103})
    ],
    ("POST", "/api/v1/save_weights"): [
        ("/api/v1/save_weights", {"model_id": "{model}", "seq_id": 104, "path": "b"})
    ],
    ("POST", "/api/v1/save_weights_for_sampler"): [
        (
            "/api/v1/save_weights_for_sampler",
            {"model_id": "{model}", "seq_id": 105, "path": "b"},
        )
    ],
    ("POST", "/api/v1/save_weights_external"): [
        (
            "/api/v1/save_weights_external",
            {"model_id": "{model}", "seq_id": 106, "path": "b"},
        )
    ],
    ("GET", "/v1/models"): [("/v1/models", None)],
    ("GET", "/v1/models/{name:path}"): [
        ("/v1/models/{job}", None),
        ("/v1/models/tinker:%2F%2F{model}/sampler_weights/{name}", None),
    ],
    ("POST", "/v1/chat/completions"): [
        ("/v1/chat/completions", CHAT | {"model": "{job}"}),
        (
            "/v1/chat/completions",
            CHAT | {"model": "tinker://{model}/sampler_weights/{name}"},
        ),
    ],
    ("GET", "/jobs/v1/uploads"): [("/jobs/v1/uploads", None)],
    ("GET", "/jobs/v1/uploads/{name}"): [("/jobs/v1/uploads/{upload}", None)],
    ("GET", "/jobs/v1/jobs"): [("/jobs/v1/jobs", None)],
    ("GET", "/jobs/v1/queue"): [("/jobs/v1/queue", None)],
    ("GET", "/jobs/v1/jobs/{name}"): [("/jobs/v1/jobs/{job}", None)],
    ("GET", "/jobs/v1/jobs/{name}/metrics"): [("/jobs/v1/jobs/{job}/metrics", None)],
    ("GET", "/jobs/v1/jobs/{name}/adapter"): [("/jobs/v1/jobs/{job}/adapter", None)],
    ("POST", "/jobs/v1/preview"): [("/jobs/v1/preview", JOB | {"name": "p"})],
    ("POST", "/jobs/v1/jobs"): [("/jobs/v1/jobs", JOB | {"name": "b"})],
    ("POST", "/jobs/v1/jobs/{name}/clone"): [
        ("/jobs/v1/jobs/{job}/clone", {"name": "c", "learning_rate": 1e-3})
    ],
    ("POST", "/jobs/v1/jobs/{name}/pause"): [("/jobs/v1/jobs/{job}/pause", {})],
    ("POST", "/jobs/v1/jobs/{name}/resume"): [("/jobs/v1/jobs/{job}/resume", {})],
    ("POST", "/jobs/v1/jobs/{name}/stop"): [("/jobs/v1/jobs/{job}/stop", {})],
    ("PUT", "/jobs/v1/uploads/{name}"): [("/jobs/v1/uploads/new.jsonl", {"a": 1})],
    ("PUT", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl"): [
        (f"{CHECKPOINT}/ttl", {"ttl_seconds": 3600})
    ],
    ("POST", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"): [
        (f"{CHECKPOINT}/publish", None)
    ],
    ("DELETE", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"): [
        (f"{CHECKPOINT}/publish", None)
    ],
    ("DELETE", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"): [
        (CHECKPOINT, None)
    ],
    ("DELETE", "/jobs/v1/jobs/{name}"): [("/jobs/v1/jobs/{job}", None)],
    ("DELETE", "/jobs/v1/uploads/{name}"): [("/jobs/v1/uploads/{upload}", None)],
    ("POST", "/api/v1/unload_model"): [
        ("/api/v1/unload_model", {"model_id": "{model}"})
    ],
    ("POST", "/api/v1/sessions/{id}/finish"): [
        ("/api/v1/sessions/{session}/finish", {"reason": {"type": "success"}})
    ],
}
# Routes that always answer that this server has no such thing.
ABSENT = {
    "/api/v1/audit",
    "/api/v1/auth/apikey/me",
    "/api/v1/auth/token",
    "/api/v1/billing/usage/checkpoints/current",
    "/api/v1/billing/usage/events",
    "/api/v1/copy_weights",
    "/api/v1/create_custom_loss",
    "/api/v1/join_sampling_session",
    "/api/v1/retrieve_futures",
    "/api/v1/sessions/{id}/project",
    "/api/v1/sessions/{id}/trace_export",
}


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """The method and path of each route."""
    found = set()
    for route in app.routes:
        some = [route]
        if hasattr(route, "effective_route_contexts"):
            some = route.effective_route_contexts()
        for one in some:
            found |= {(method, one.path) for method in one.methods - {"HEAD"}}
    return found


class World:
    """A server with two tenants. One has something of each kind."""

    def __init__(self, folder, model):
        limits = {"body_bytes": 200_000, "upload_bytes": 300_000}
        self.server, self.app = make(folder, model, limits=limits)
        self.keys = {
            name: {"x-api-key": self.server.keys.add(name)} for name in ("alice", "bob")
        }
        self.client = TestClient(self.app, raise_server_exceptions=False)

    def fill(self) -> None:
        """Makes the things of alice, and a session of bob."""
        session = self.post("alice", "create_session", display_name=SECRET, tags=[])
        self.things = {"session": session["session_id"], "name": SECRET}
        address = {"session_id": self.things["session"], "base_model": NAME}
        made = self.post(
            "alice",
            "create_model",
            **address,
            model_seq_id=0,
            lora_config={"rank": 4, "seed": 1},
            user_metadata={"about": SECRET},
        )
        model = self.things["model"] = self.result(made)["model_id"]
        numbered = lambda number: {"model_id": model, "seq_id": number}
        saved = self.post("alice", "save_weights", **numbered(1), path=SECRET)
        self.things["promise"] = saved["request_id"]
        self.result(saved)
        made = self.post(
            "alice", "save_weights_for_sampler", **numbered(2), path=SECRET
        )
        self.result(made)
        made = self.post(
            "alice", "create_sampling_session", **address, sampling_session_seq_id=0
        )
        self.things["sampler"] = made["sampling_session_id"]
        self.things |= {"upload": f"{SECRET}.jsonl", "job": f"{SECRET}-job"}
        records = tiny.write_records(self.folder / "data.jsonl", 12, 0)
        upload = f"/jobs/v1/uploads/{self.things['upload']}"
        content = pathlib.Path(records).read_bytes()
        sent = self.client.put(upload, headers=self.keys["alice"], content=content)
        assert sent.status_code == 201, sent.text
        sent = self.send("alice", "POST", "/jobs/v1/jobs", JOB | {"name": "{job}"})
        assert sent.status_code == 201, sent.text
        own = self.post("bob", "create_session", tags=[])
        self.own = {"own session": own["session_id"]}
        self.before = self.alices()

    def post(self, tenant: str, route: str, **body: Any) -> dict[str, Any]:
        path = f"/api/v1/{route}"
        answer = self.client.post(path, headers=self.keys[tenant], json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        body = {"request_id": promise["request_id"]}
        while (found := self.post_any("alice", "retrieve_future", body)) is None:
            pass
        assert "error" not in found, found
        return found

    def post_any(self, tenant: str, route: str, body: Any) -> dict[str, Any] | None:
        path = f"/api/v1/{route}"
        answer = self.client.post(path, headers=self.keys[tenant], json=body)
        return answer.json() if answer.status_code == 200 else None

    def send(
        self,
        tenant: str,
        method: str,
        path: str,
        body: Any,
        things: dict[str, str] | None = None,
    ) -> Any:
        """Sends a request in which things stand for the texts in braces."""
        own = {"own session": self.things["session"]} if tenant == "alice" else self.own
        names = (self.things if things is None else things) | own
        text = json.dumps(body)
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", urllib.parse.quote(value))
            text = text.replace(f"{{{name}}}", value)
        content = b"" if body is None else text.encode()
        return self.client.request(
            *(method, path),
            headers=self.keys[tenant] | {"content-type": "application/json"},
            content=content,
            follow_redirects=False,
        )

    def alices(self) -> Any:
        """All that alice has."""
        registry, kinds = self.server.registry, ("session", "model", "sampler")
        kinds += ("checkpoint", "upload")
        entries = [registry.list("alice", kind) for kind in kinds]
        jobs = self.send("alice", "GET", "/jobs/v1/jobs", None).json()["jobs"]
        files = self.server.storage.list("alice")
        files = {key for key in files if self.things["model"] in key}
        return entries, files, [job["name"] for job in jobs]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    made = World(folder / "serve", load_model(tiny.write_model(folder / "model")))
    made.folder = folder
    with made.client, pytest.MonkeyPatch.context() as patch:
        made.fill()
        # Nobody waits here for what does not come.
        patch.setattr(training, "POLL_SECONDS", 0.01)
        yield made


def test_every_route_has_requests_here(world):
    """A new route is to be added above, with things that a tenant might lack."""
    routes = routes_of(world.app)
    absent = {(method, path) for method, path in routes if path in ABSENT}
    public = {(method, path) for method, path in routes if path in PUBLIC}
    assert routes - absent - public == REQUESTS.keys()
    assert {path for _, path in absent} == ABSENT
    assert {path for _, path in public} == PUBLIC


def test_no_route_answers_without_a_key(world):
    for (method, _), requests in REQUESTS.items():
        for path, body in requests:
            answer = world.client.request(method, path, json=body)
            assert answer.status_code == 401, (method, path)


# Statuses of requests about what is missing, where they are not 404.
STATUS = {
    "/api/v1/retrieve_future": 410,  # the client sends the request of the promise again
    "/api/v1/cancel_future": 200,  # it has ended
    "/jobs/v1/preview": 400,  # settings name data that is missing
    "/jobs/v1/jobs": 400,
}
MADE_UP = {
    "session": "0" * 32,
    "model": "1" * 32 + ":train:0",
    "sampler": "2" * 32 + ":sample:0",
    "promise": "3" * 32,
    "upload": "missing.jsonl",
    "job": "missing-job",
    "name": "missing-name",
}


def test_things_of_others_are_missing(world):
    """The answer is that for things that nobody has, and nothing of alice's changes."""
    for (method, route), requests in REQUESTS.items():
        for path, body in requests:
            answer = world.send("bob", method, path, body)
            missing = world.send("bob", method, path, body, MADE_UP)
            text, expected = answer.text, missing.text
            for name in ("model", "sampler", *MADE_UP):  # the longest first
                text = text.replace(world.things[name], f"<{name}>")
                expected = expected.replace(MADE_UP[name], f"<{name}>")
            asks = "{" in path.replace("{own session}", "") or any(
                f"{{{name}}}" in json.dumps(body) for name in MADE_UP
            )
            where = method, route, answer.text
            if asks:
                assert answer.status_code == missing.status_code, where
                assert answer.status_code == STATUS.get(route, 404), where
                assert text == expected, where


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "\0", "..", "../../etc", "a/b", "é", "x" * 600, "{session}"]),
    st.sampled_from([f"{{{name}}}" for name in MADE_UP]),
    st.just([]),
    st.just({}),
    st.just([[1], {"a": [None]}]),
)


@st.composite
def changed(draw, value: Any) -> Any:
    """The body of a request, of which parts are something else."""
    if draw(st.integers(0, 7)) == 0:
        return draw(JUNK)
    if isinstance(value, dict):
        kept = {
            k: draw(changed(v)) for k, v in value.items() if draw(st.integers(0, 9))
        }
        if draw(st.integers(0, 9)) == 0:
            kept[draw(st.text(max_size=8))] = draw(JUNK)
        return kept
    if isinstance(value, list):
        return [draw(changed(one)) for one in value]
    return value


@st.composite
def anything(draw) -> tuple[str, str, Any]:
    """A request of a route with other parameters and another body."""
    method, route = draw(st.sampled_from(sorted(REQUESTS)))
    path, body = draw(st.sampled_from(REQUESTS[method, route]))
    if draw(st.booleans()):
        parts = path.split("/")
        some = draw(st.integers(0, len(parts) - 1))
        if parts[some].startswith("{"):
            junk = str(draw(JUNK)).encode(errors="surrogatepass")
            parts[some] = urllib.parse.quote(junk, safe="{}") or "x"
            path = "/".join(parts)
    if draw(st.booleans()):
        name = draw(st.sampled_from(["limit", "offset", "after", "status", "samples"]))
        query = urllib.parse.quote(str(draw(JUNK)).encode(errors="surrogatepass"))
        path += f"?{name}={query}"
    return method, path, draw(changed(body))


# Threads of the server may use it at the same time.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@settings(max_examples=250)
@given(anything())
def test_whatever_is_sent_nothing_breaks_and_nothing_leaks(world, request):
    answer = world.send("bob", *request)
    assert answer.status_code < 500, (request, answer.text)
    assert len(answer.content) < 100_000
    sent, text = json.dumps(request), answer.text
    for name in ("model", "sampler", *MADE_UP):  # the longest first
        if f"{{{name}}}" in sent or world.things[name] in sent:
            text = text.replace(world.things[name], "")
    for name in MADE_UP:
        assert world.things[name] not in text, request
    if answer.status_code >= 400:
        assert isinstance(answer.json()["detail"], str)


@settings(max_examples=60)
@given(st.sampled_from(sorted(REQUESTS)), st.binary(max_size=64), st.booleans())
def test_bodies_that_are_no_json_break_nothing(world, route, body, is_protobuf):
    kind = "application/x-protobuf" if is_protobuf else "application/json"
    path, _ = REQUESTS[route][0]
    for name, value in world.things.items():
        path = path.replace(f"{{{name}}}", urllib.parse.quote(value))
    headers = world.keys["bob"] | {"content-type": kind}
    answer = world.client.request(route[0], path, headers=headers, content=body)
    assert answer.status_code < 500, answer.text


def test_no_body_is_larger_than_it_may_be(world):
    for (method, route), requests in REQUESTS.items():
        path, _ = requests[0]
        most = 300_000 if path.startswith("/jobs/v1/uploads/") else 200_000
        body = bytes(most + 1)
        own = world.keys["bob"]
        answer = world.client.request(method, path, headers=own, content=body)
        assert answer.status_code == 413, route


def test_nothing_of_alice_has_changed(world):
    """The tests above have asked for it with each route."""
    assert world.alices() == world.before
    for name in ("session", "model", "sampler"):
        assert world.server.registry.owned("alice", name, world.things[name])
