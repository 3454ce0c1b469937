"""A server of the tiny model, and a client of its routes in this process."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zstandard
from fastapi import FastAPI
from fastapi.testclient import TestClient

from jaxlora.config.serve_config import ServeConfig, ServerSession
from jaxlora.hf.load import load_model
from jaxlora.serve.app import make_app, make_server
from jaxlora.serve.server import Server
from jaxlora.serve.tinker import messages
from tests import tiny
from tests.jaxlora.session.conftest import SETTINGS

NAME = "meta-llama/Llama-3.2-1B"
KEYS = {name: {"X-API-Key": ""} for name in ("alice", "bob")}
ADAM = {"learning_rate": 1e-3}


def make(folder, model, **settings: Any) -> tuple[Server, FastAPI]:
    """A server of a model, which demands keys, and its app."""
    config = ServeConfig(
        model="tiny",
        model_name=NAME,
        folder=str(folder),
        keys=True,
        train_unembed="ignore",
        session=ServerSession(**SETTINGS),
        **settings,
    )
    server = make_server(config, model)
    return server, make_app(server)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("tinker") / "model"))


@contextlib.contextmanager
def serving(folder, model, **settings: Any) -> Iterator["Api"]:
    """Serves a model; gives the routes of its tenant alice."""
    server, app = make(folder, model, **settings)
    key = {"X-API-Key": server.keys.add("alice")}
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Api(server, client, key)


@pytest.fixture(scope="session")
def shared(tiny_model, tmp_path_factory):
    """One server for all tests, each of which uses sessions of its own."""
    with serving(tmp_path_factory.mktemp("tinker") / "serve", tiny_model) as api:
        yield api


@pytest.fixture
def api(shared):
    """The routes; the sessions that a test begins end with it."""
    shared.sessions.clear()
    yield shared
    for session in shared.sessions:
        reason = {"type": "success"}
        shared.post(f"sessions/{session}/finish", reason=reason, detail=None)


class Api:
    """Calls routes as the client does."""

    def __init__(self, server: Server, client: TestClient, key: dict[str, str]):
        self.server, self.client, self.key = server, client, key
        self.sessions: list[str] = []

    def as_tenant(self, tenant: str) -> "Api":
        return Api(
            self.server, self.client, {"X-API-Key": self.server.keys.add(tenant)}
        )

    def send(self, method: str, path: str, **given: Any) -> Any:
        headers = self.key | given.pop("headers", {})
        return self.client.request(
            method, f"/api/v1/{path}", headers=headers, follow_redirects=False, **given
        )

    def get(self, path: str, **params: Any) -> Any:
        return self.good(self.send("GET", path, params=params))

    def post(self, route: str, status: int = 200, /, **body: Any) -> Any:
        return self.good(self.send("POST", route, json=body), status)

    def good(self, response: Any, status: int = 200) -> Any:
        assert response.status_code == status, (response.status_code, response.text)
        return response.json()

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        """The result of a promise in JSON."""
        return self.post("retrieve_future", request_id=promise["request_id"])

    def session(self) -> str:
        made = self.post("create_session", tags=[], user_metadata={}, sdk_version="0")
        self.sessions.append(made["session_id"])
        return made["session_id"]

    def model(self, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """A new model of rank 4."""
        promise = self.post(
            "create_model",
            session_id=session or self.session(),
            model_seq_id=number,
            base_model=NAME,
            lora_config={"rank": 4, "seed": 1} | lora,
        )
        made = self.result(promise)
        assert "error" not in made, made
        return made["model_id"]

    def submit(self, request: Any, *, compressed: bool = True) -> Any:
        """Sends a pass in protobuf; returns the response."""
        body, headers = request.SerializeToString(), {"Content-Type": PROTOBUF}
        if compressed:
            body = zstandard.ZstdCompressor().compress(body)
            headers["Content-Encoding"] = "zstd"
        return self.send("POST", "forward_backward", content=body, headers=headers)

    def output(self, promise: dict[str, Any]) -> Any:
        """The result of a pass in protobuf."""
        response = self.send(
            "POST",
            "retrieve_future",
            json={"request_id": promise["request_id"]},
            headers={"Accept": PROTOBUF},
        )
        assert response.headers["content-type"] == PROTOBUF, response.text
        return messages.ForwardBackwardOutput.FromString(response.content)


PROTOBUF = "application/x-protobuf"


def pass_request(
    model: str,
    seq_id: int,
    data,
    loss: str = "cross_entropy",
    config: dict[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> Any:
    """The message of a pass over datums, as the client makes it."""
    request = messages.ForwardBackwardRequest(
        model_id=model, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for name, value in (config or {}).items():
        request.loss_fn_config[name] = value
        request.loss_fn_config_v2[name].number = value
    for datum in data:
        one = request.data.add()
        tokens = np.asarray(datum.tokens, np.int32)
        one.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name in ("target_tokens", "weights", "logprobs", "advantages"):
            if (values := getattr(datum, name)) is not None:
                is_float = name != "target_tokens"
                array = np.asarray(values, np.float32 if is_float else np.int64)
                tensor = one.loss_fn_inputs[name]
                tensor.dense = array.tobytes()
                tensor.shape.append(len(array))
                tensor.dtype = messages.FLOAT32 if is_float else messages.INT64
    return request


def logprobs_of(output: Any) -> list[np.ndarray]:
    """The log-probabilities of each datum of a result."""
    (record,) = output.loss_fn_outputs
    field = record.fields["logprobs"]
    offsets = np.frombuffer(field.offsets, np.int64) // 4
    return np.split(np.frombuffer(field.data, np.float32), offsets[1:-1])
