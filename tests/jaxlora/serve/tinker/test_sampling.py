"""Sampling by the routes."""

import asyncio
import dataclasses
import types
from concurrent.futures import Future

import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.config.serve_config import Quota, ServeConfig
from jaxlora.serve.ids import Ids
from jaxlora.serve.operation import Failed
from jaxlora.serve.registry import Entry
from jaxlora.serve.server import Server
from jaxlora.serve.tinker import bodies, messages
from jaxlora.serve.tinker.sampling import Sample, Samplers
from jaxlora.session.sampler import Completion
from jaxlora.session.samples import SampleResult
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


def test_samples_count_as_pending_tokens_until_they_end(api, published, monkeypatch):
    limits, quota = api.server.limits, Quota(pending_tokens=1000)
    monkeypatch.setattr(limits, "quota", lambda tenant: quota)
    prompt = {"chunks": [{"tokens": PROMPT}]}
    given = {"sampling_session_id": published[1], "prompt": prompt}
    params = GREEDY | {"max_tokens": 160}
    with monkeypatch.context() as patch:  # no sample is drawn
        patch.setattr(api.server.hub._sampling.samples, "turn", lambda train: train())
        before = limits.pending("alice")
        long = ask(api, published[1], 0, GREEDY | {"max_tokens": 120}, num_samples=7)
        refused = api.post("asample", 429, seq_id=1, sampling_params=params, **given)
        assert "pending tokens, and your quota is 1,000" in refused["detail"]
        assert limits.pending("alice") == before + 5 + 7 * 120
        api.post("cancel_future", request_id=long["request_id"])
        assert limits.pending("alice") == before
    (one,) = api.result(ask(api, published[1], 1, params))["sequences"]
    assert len(one["tokens"]) == 160


def test_large_bodies_and_results_are_coded_in_other_threads(
    api, published, monkeypatch
):
    """The thread of the server has a loop, which goes on meanwhile."""
    parsed, answer, num = bodies.parsed, Sample.answer, [0, 0]

    def elsewhere(number, run, *given, **options):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        num[number] += 1
        return run(*given, **options)

    prompt = {"chunks": [{"tokens": [5, 6] * 100}]}
    given = {"prompt": prompt, "prompt_logprobs": True, "topk_prompt_logprobs": 20}
    with monkeypatch.context() as patch:
        patch.setattr(
            bodies,
            "parsed",
            lambda content, kind: (
                elsewhere(0, parsed, content, kind)
                if kind is bodies.Sample
                else parsed(content, kind)
            ),
        )
        patch.setattr(
            Sample, "answer", lambda *given, **kw: elsewhere(1, answer, *given, **kw)
        )
        result = api.result(ask(api, published[1], 0, **given))
    assert num == [1, 1] and len(result["topk_prompt_logprobs"]) == 200


# ---- results that are kept -----------------------------------------------------------


class Kept:
    """Samplers on a hub whose outcomes the test sets, and what they keep."""

    def __init__(self, clock, most: int):
        config = ServeConfig(model="m", limits={"kept_bytes": most})
        model = types.SimpleNamespace(max_positions=10**6, vocab_size=10)
        engine = types.SimpleNamespace(model=types.SimpleNamespace(config=model))
        hub = types.SimpleNamespace(engine=engine, sample=self._sample)
        server = object.__new__(Server)
        for name, value in {"config": config, "hub": hub, "ids": Ids()}.items():
            object.__setattr__(server, name, value)
        self.samplers = Samplers(server, clock=clock)
        self._futures: list[Future] = []

    def _sample(self, *_):
        self._futures.append(Future())
        return self._futures[-1]

    def end(self, number: int, num_tokens: int, tenant: str = "alice") -> Sample:
        """A sample that has ended, with so many tokens."""
        sampler = Entry(
            kind="sampler",
            id=tenant,
            tenant=tenant,
            parent=None,
            created_at=0.0,
            touched_at=0.0,
            expires_at=None,
            num_bytes=0,
            is_public=False,
            fields={"version": "base", "key": None},
        )
        body = bodies.Sample(
            prompt={"chunks": [{"tokens": [1]}]},
            sampling_params=bodies.SamplingParams(max_tokens=1),
            seq_id=number,
        )
        sample = self.samplers.submit(sampler, b"", body)
        zeros = (0,) * num_tokens
        one = Completion(
            prompt=(1,),
            tokens=zeros,
            logprobs=(0.0,) * num_tokens,
            finish_reason="length",
        )
        self._futures[-1].set_result(SampleResult(completions=(one,)))
        return sample

    def has(self, *samples: Sample) -> list[bool]:
        find = self.samplers.promise
        return [find(one.tenant, one.request_id) is one for one in samples]


def test_results_of_a_tenant_are_bounded_in_bytes(clock):
    """Those that were sent go first, then the oldest; the last one is always kept."""
    kept = Kept(clock, 400_000)
    other = kept.end(0, 1000, "bob")
    first, second, third = (kept.end(number, 1500) for number in range(3))
    assert kept.has(first, second, third, other) == [True] * 4
    kept.samplers.note_sent(second)
    fourth = kept.end(3, 1500)
    assert kept.has(first, second, third, fourth, other) == [1, 0, 1, 1, 1]
    fifth = kept.end(4, 1500)
    assert kept.has(first, third, fourth, fifth) == [0, 1, 1, 1]
    assert kept.end(0, 1) is not first  # its number is free again
    large = kept.end(5, 100_000)
    assert kept.has(third, fourth, fifth, large, other) == [0, 0, 0, 1, 1]
    clock.now += 3601
    kept.end(6, 1)
    assert kept.has(large, other) == [False, False]


def test_the_bytes_of_a_result_follow_its_numbers():
    sample, base = Kept(lambda: 0.0, 10**9).end(0, 1000), 4096
    assert 60_000 < sample.num_bytes - base < 100_000
    outcome: Future = Future()
    outcome.set_result(Failed(message="", category="user"))
    failed = dataclasses.replace(sample, outcome=outcome)
    top = (None, *[((1, 0.5),) * 20] * 100)
    outcome = Future()
    outcome.set_result(SampleResult(completions=(), topk_prompt_logprobs=top))
    scored = dataclasses.replace(sample, outcome=outcome)
    assert failed.num_bytes < base + 100 and 200_000 < scored.num_bytes < 400_000


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
