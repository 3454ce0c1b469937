"""Sampling by the routes."""

import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.serve.tinker import messages
from tests.jaxlora.serve.tinker.conftest import (
    ADAM,
    NAME,
    PROTOBUF,
    logprobs_of,
    pass_request,
)
from tests.jaxlora.session.test_losses import datums

PROMPT = [5, 6, 7, 8, 9]
GREEDY = {"max_tokens": 4, "seed": 3, "temperature": 0.0}


def ask(api, sampler: str, seq_id: int, params=GREEDY, **given):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    body = {"prompt": prompt, "sampling_params": params, "num_samples": 1}
    return api.post(
        "asample", sampling_session_id=sampler, seq_id=seq_id, **body | given
    )


def sampler_of(api, session: str, number: int, **given) -> str:
    made = api.post(
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=number,
        **given,
    )
    return made["sampling_session_id"]


@pytest.fixture
def published(api):
    """A model after a step, and a sampler of its weights."""
    model = api.model()
    data = datums(np.random.default_rng(0))
    api.good(api.submit(pass_request(model, 1, data)))
    api.post(
        "optim_step",
        model_id=model,
        seq_id=2,
        adam_params=ADAM | {"learning_rate": 0.1},
    )
    saved = api.post(
        "save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0
    )
    return model, api.result(saved)["sampling_session_id"]


def test_sampler_and_trainer_agree(api, published):
    """Also after the model is trained on."""
    model, sampler = published
    targets = Datum(tokens=PROMPT[:-1], target_tokens=PROMPT[1:])
    request = pass_request(model, 4, [targets], forward_only=True)
    (expected,) = logprobs_of(api.output(api.good(api.submit(request))))
    for seq_id in (5, 6):
        api.good(api.submit(pass_request(model, seq_id, [targets])))
    api.post("optim_step", model_id=model, seq_id=7, adam_params=ADAM)
    first = ask(api, sampler, 0, prompt_logprobs=True, topk_prompt_logprobs=2)
    result = api.result(first)
    np.testing.assert_allclose(result["prompt_logprobs"][1:], expected, atol=1e-4)
    assert result["prompt_logprobs"][0] is result["topk_prompt_logprobs"][0] is None
    assert [len(best) for best in result["topk_prompt_logprobs"][1:]] == [2] * 4
    base = api.result(
        ask(
            api,
            sampler_of(api, api.sessions[-1], 1, base_model=NAME),
            0,
            prompt_logprobs=True,
        )
    )
    assert np.abs(np.subtract(base["prompt_logprobs"][1:], expected)).max() > 1e-3


def test_samples_in_protobuf(api, published):
    promise = ask(
        api,
        published[1],
        0,
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=2,
    )
    assert len({*promise["sample_sequence_ids"]}) == 3
    found = api.send(
        "POST",
        "retrieve_future",
        json={"request_id": promise["request_id"]},
        headers={"Accept": PROTOBUF},
    )
    result = messages.SampleResponse.FromString(found.content)
    tokens = [np.frombuffer(one.tokens, np.int32).tolist() for one in result.sequences]
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 4
    assert result.sequences[0].stop_reason == messages.LENGTH
    logprobs = np.frombuffer(result.sequences[0].logprobs, np.float32)
    assert len(logprobs) == 4 and (logprobs < 0).all()
    scored = np.isfinite(np.frombuffer(result.prompt_logprobs, np.float32))
    assert scored.tolist() == [False] * 3 + [True] * 2
    top = np.frombuffer(result.topk_prompt_logprobs.logprobs, np.float32)
    assert (top.reshape(5, 2)[:3] == -99999).all() and (top.reshape(5, 2)[3:] < 0).all()


def test_a_named_sampler_is_opened_again(api, published):
    """By its files, if the server no longer has it."""
    model, sampler = published
    saved = api.post("save_weights_for_sampler", model_id=model, seq_id=4, path="one")
    path = api.result(saved)["path"]
    assert path == f"tinker://{model}/sampler_weights/one"
    session = api.sessions[-1]
    named = sampler_of(api, session, 1, model_path=path)
    assert named == sampler_of(api, session, 1, model_path=path)
    info = api.get(f"samplers/{named}")
    assert (info["base_model"], info["model_path"]) == (NAME, path)
    first, second = (api.result(ask(api, one, 0)) for one in (sampler, named))
    assert first["sequences"][0]["tokens"] == second["sequences"][0]["tokens"]
    assert {*api.get(f"sessions/{session}")["sampler_ids"]} == {sampler, named}
    refused = api.post(
        "create_sampling_session",
        400,
        session_id=session,
        sampling_session_seq_id=1,
        base_model=NAME,
    )
    assert "other weights" in refused["detail"]


def test_stops_retries_and_cancelling(api, published):
    sampler = published[1]
    tokens = api.result(ask(api, sampler, 0))["sequences"][0]["tokens"]
    stop = GREEDY | {"stop": [tokens[1]]}
    (one,) = api.result(ask(api, sampler, 1, stop))["sequences"]
    assert (one["tokens"], one["stop_reason"]) == (
        tokens[: tokens.index(tokens[1]) + 1],
        "stop",
    )
    assert ask(api, sampler, 1, stop) == ask(api, sampler, 1, stop)
    prompt = {"chunks": [{"tokens": [1]}]}
    given = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt}
    again = api.post("asample", 422, **given, sampling_params={})
    assert "another content" in again["detail"]
    ended = ask(api, sampler, 2, GREEDY | {"max_tokens": 400})
    api.post("cancel_future", request_id=ended["request_id"])
    result = api.result(ended)
    assert "cancelled" in result.get("error", "cancelled")


@pytest.mark.parametrize(
    ("status", "text", "given"),
    [
        (400, "has 0 tokens", {"prompt": {"chunks": []}}),
        (400, "knows the tokens", {"prompt": {"chunks": [{"tokens": [288]}]}}),
        (400, "num_samples=999", {"num_samples": 999}),
        (400, "needs prompt_logprobs", {"prompt_logprobs_last_n": 1}),
        (400, "is empty", {"sampling_params": {"stop": [""]}}),
        (400, "reads text only", {"prompt": {"chunks": [{"type": "image"}]}}),
        (422, "temperature", {"sampling_params": {"temperature": -1}}),
        (422, "does not know", {"prompt_alt_tokens_k": 2}),
        (404, "no sampler", {"sampling_session_id": "x"}),
        (400, "create_sampling_session first", {"sampling_session_id": None}),
    ],
)
def test_samples_that_cannot_be_drawn(api, published, status, text, given):
    prompt = {"chunks": [{"tokens": PROMPT}]}
    body = {"sampling_session_id": published[1], "seq_id": 0, "prompt": prompt}
    body |= {"sampling_params": GREEDY} | given
    assert text in api.post("asample", status, **body)["detail"]
