"""What the real clients have sent is understood, byte for byte."""

import base64
import json
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.jaxlora.serve.tinker.test_bodies import spoilt

FILES = sorted(pathlib.Path(__file__).parent.glob("recorded_*.jsonl"))
SESSION = re.compile(rb"([0-9a-f]{32}):train:0")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recorded_requests(api, file):
    """Each is accepted and done, in the order in which they were sent."""
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    bodies = [base64.b64decode(one["body"]) for one in requests]
    session = SESSION.search(b"".join(bodies)).group(1).decode()
    api.server.registry.add("session", "alice", session)
    api.sessions.append(session)
    done = set()
    for request, body in zip(requests, bodies, strict=True):
        sent = {"content": body, "headers": request["headers"]}
        answer = api.good(api.send("POST", request["path"], **sent))
        if "request_id" in answer:
            result = api.result(answer)
            assert "error" not in result, (request["path"], result)
        done.add(request["path"])
    passes = {"forward_backward"} | ({"forward"} if "0.24" in file.stem else set())
    assert done >= passes | {"create_model", "optim_step", "save_weights"}
    assert done >= {"load_weights", "save_weights_for_sampler", "asample"}


def json_bodies() -> list[tuple[str, dict]]:
    """The recorded requests in JSON."""
    lines = [line for file in FILES for line in file.read_text().splitlines()]
    requests = [json.loads(line) for line in lines]
    return [
        (one["path"], json.loads(base64.b64decode(one["body"])))
        for one in requests
        if one["headers"]["content-type"] == "application/json"
    ]


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
    sent=st.sampled_from(json_bodies()).flatmap(
        lambda one: st.tuples(st.just(one[0]), spoilt(one[1]))
    )
)
def test_spoilt_requests_do_not_fail_the_server(shared, sent):
    """The same requests, in each of which one thing is replaced."""
    path, body = sent
    response = shared.send("POST", path, content=json.dumps(body))
    assert response.status_code < 500, (path, body, response.text)


def test_there_are_recorded_requests():
    assert [file.stem for file in FILES] == ["recorded_0.24.1", "recorded_0.38.0"]
