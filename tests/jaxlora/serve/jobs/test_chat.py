"""Chats with adapters of jobs, in OpenAI's form."""

import json

import pytest

from tests import tiny
from tests.jaxlora.session.test_samples import CONFIG

MESSAGES = [{"role": "user", "content": "Say something."}]
ASKED = {"model": "one", "messages": MESSAGES, "seed": 1, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(serve_in, tmp_path_factory):
    """A client of a server with the adapter of a job."""
    folder = tmp_path_factory.mktemp("chat")
    path = folder / "rows.jsonl"
    tiny.write_records(path, 12, seed=0)
    with serve_in(folder, sampling=CONFIG.model_dump()) as client:
        client.upload(path)
        data = {"path": "rows.jsonl"}
        client.add(name="one", data=data, rank=4, steps=4, learning_rate=0.1)
        client.wait("one")
        yield client


def ask(client, **settings):
    answer = client.post("/v1/chat/completions", json=ASKED | settings)
    assert answer.is_success, answer.text
    return answer.json()


def streamed(client, **settings):
    """Returns the parts of an answer."""
    asked = ASKED | {"stream": True} | settings
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(parts, number=0):
    choices = [choice for part in parts for choice in part["choices"]]
    own = [choice for choice in choices if choice["index"] == number]
    assert own[0]["delta"]["role"] == "assistant"
    assert [one["finish_reason"] for one in own].count(None) == len(own) - 1
    return "".join(one["delta"].get("content", "") for one in own)


def test_an_adapter_answers(client):
    first = ask(client, logprobs=True)
    (choice,) = first["choices"]
    assert choice["message"]["content"]
    usage = first["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    content = choice["logprobs"]["content"]
    assert 0 < len(content) <= 12 and all(one["logprob"] <= 0 for one in content)
    again = ask(client)["choices"][0]
    assert again["message"] == choice["message"] and again["logprobs"] is None
    base = ask(client, model="base")["choices"][0]
    assert base["message"] != choice["message"]


def test_a_stream_is_the_same_answer(client):
    whole = ask(client, n=3, temperature=1.5)
    parts = streamed(
        client, n=3, temperature=1.5, stream_options={"include_usage": True}
    )
    for choice in whole["choices"]:
        assert text_of(parts, choice["index"]) == choice["message"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3
    assert parts[-1]["usage"] == whole["usage"] and not parts[-1]["choices"]


def test_a_stop_text_ends_an_answer(client):
    text = ask(client)["choices"][0]["message"]["content"]
    stop = text[2:4]
    stopped = ask(client, stop=stop)["choices"][0]
    assert stopped["message"]["content"] == text.partition(stop)[0]
    assert stopped["finish_reason"] == "stop"
    assert text_of(streamed(client, stop=[stop])) == text.partition(stop)[0]


def test_models_are_listed(client):
    found = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert found == [client.app.state.server.config.served_name, "one"]
    assert client.get("/v1/models/one").json()["id"] == "one"
    assert client.get("/v1/models/two").status_code == 404


@pytest.mark.parametrize(
    ("settings", "status", "text"),
    [
        ({"model": "two"}, 404, "there is no model 'two'"),
        ({"model": "tinker://a/sampler_weights/b"}, 404, "checkpoint"),
        ({"tools": [{"type": "function"}]}, 400, "tools="),
        ({"top_logprobs": 3}, 400, "top_logprobs=3"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 10_000}, 400, "max_tokens=10000"),
        ({"n": 10_000}, 400, "n=10000"),
        ({"temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, 400, "assistant"),
    ],
)
def test_what_cannot_be_asked(client, settings, status, text):
    answer = client.post("/v1/chat/completions", json=ASKED | settings)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"] == answer.json()["detail"]


def test_what_has_no_effect_is_taken(client):
    ask(client, user="me", presence_penalty=0, tools=None, max_tokens=1, top_p=None)
