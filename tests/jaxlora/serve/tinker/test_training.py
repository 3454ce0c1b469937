"""Training by the routes gives the results of a session."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from jaxlora import Datum, Session
from jaxlora.config.serve_config import Quota
from jaxlora.serve.hub import Unavailable
from jaxlora.serve.keys import Principal
from jaxlora.serve.limits import OverQuota
from jaxlora.serve.tinker import bodies, training
from jaxlora.serve.tinker.training import Models
from tests.jaxlora.serve.tinker.conftest import (
    ADAM,
    NAME,
    logprobs_of,
    pass_request,
)
from tests.jaxlora.serve.tinker.test_bodies import json_request
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import CONFIGS, datums

NOTHING = {"rank": 4, "train_mlp": False, "train_attn": False}


@pytest.mark.parametrize("loss", CONFIGS)
def test_losses_are_those_of_a_session(api, tiny_model, loss):
    """The loss, all log-probabilities, and the weights after a step."""
    data, config = datums(np.random.default_rng(3)), CONFIGS[loss]
    session = Session(tiny_model, **SETTINGS)
    session.add_adapter("one", rank=4, seed=1)
    model, found, expected = api.model(), [], []
    for step in range(2):
        seq_id = 2 * step + 1
        request = pass_request(model, seq_id, data, loss, config)
        promise = api.good(api.submit(request))
        stepped = api.post(
            "optim_step", model_id=model, seq_id=seq_id + 1, adam_params=ADAM
        )
        found.append(api.output(promise))
        assert api.result(stepped)["metrics"]["step:max"] == step + 1
        expected.append(session.forward_backward("one", data, loss, config).result())
        session.optim_step("one", **ADAM).result()
    for output, result in zip(found, expected, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(result.loss, rel=1e-6)
        for got, right in zip(logprobs_of(output), result.logprobs, strict=True):
            np.testing.assert_array_equal(got, right)


def test_first_things(api):
    flags = api.post("client/config", sdk_version="0")
    assert flags["parallel_fwdbwd_chunks"] and flags["fwdbwd_max_chunk_len"] == 1024
    assert api.post("client/dynamic_config", sdk_version="0")["sample_cancel_enabled"]
    assert api.post("telemetry", events=[]) == {"status": "accepted"}
    assert "no billing" in api.send("GET", "billing/usage/events").json()["detail"]
    # Others are asked again for minutes.
    assert api.send("PUT", "sessions/x/project", json={}).status_code == 404
    made = api.post("create_session", tags=[], user_metadata=None, sdk_version="0")
    assert "train_unembed=True" in made["warning_message"]
    refused = api.post("create_session", 400, project_id="p")
    assert "no projects" in refused["detail"]
    assert api.get("healthz") == {"status": "ok"}
    (model,) = api.get("get_server_capabilities")["supported_models"]
    assert model["model_name"] == NAME
    id = api.model()
    info = api.post("get_info", model_id=id)
    assert info["lora_rank"] == 4 and info["model_data"]["tokenizer_id"] == NAME


def test_gaps_are_held_and_retries_are_the_same_request(api):
    """The client sends the first part of a pass last, and sends again what is lost."""
    data, model = datums(np.random.default_rng(0)), api.model()
    request = pass_request(model, 2, data[1:])
    late = api.good(api.submit(request))
    assert api.good(api.submit(request)) == late
    first = api.good(api.submit(pass_request(model, 1, data[:1]), compressed=False))
    step = api.post("optim_step", model_id=model, seq_id=3, adam_params=ADAM)
    sums = [api.output(one).metrics["tokens:sum"] for one in (first, late)]
    assert sums == [6.0, 3.0]
    assert api.result(step)["metrics"]["step:max"] == 1
    assert api.good(api.submit(request)) == late
    other = api.submit(pass_request(model, 2, data[:1]))
    assert other.status_code == 422 and "request 2 of model" in other.json()["detail"]


def test_a_request_that_cannot_be_done_leaves_no_gap(api):
    """All requests after it would wait for its number."""
    data, model = datums(np.random.default_rng(0)), api.model()
    big = [dataclasses.replace(data[0], tokens=np.full(7, 999))]
    long = [Datum(tokens=[3] * 97, target_tokens=[3] * 97)]
    cases = {
        "loss='gspo'": pass_request(model, 1, data, "gspo"),
        "datum 0: it has token 999": pass_request(model, 2, big),
        "there is room for 96": pass_request(model, 3, long),
    }
    bad = {text: api.good(api.submit(one)) for text, one in cases.items()}
    wrong = {"learning_rate": 1e-3, "beta1": 1.5}
    bad["betas"] = api.post("optim_step", model_id=model, seq_id=4, adam_params=wrong)
    other = {"type": "dimuon", "learning_rate": 1.0}
    bad["Send AdamParams"] = api.post(
        "optim_step", model_id=model, seq_id=5, optimizer_params=other
    )
    for text, promise in bad.items():
        result = api.result(promise)
        assert text in result["error"] and result["category"] == "user", result
    good = api.good(api.submit(pass_request(model, 6, data)))
    assert api.output(good).metrics["tokens:sum"] == 9


def test_a_step_that_is_not_finite_is_skipped(api):
    data, model = datums(np.random.default_rng(0)), api.model()
    given = dataclasses.replace(data[0], logprobs=np.full(7, -1e4), weights=None)
    api.good(api.submit(pass_request(model, 1, [given], "importance_sampling")))
    bad = api.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    assert "was skipped" in api.result(bad)["error"]
    api.good(api.submit(pass_request(model, 3, data)))
    good = api.post("optim_step", model_id=model, seq_id=4, adam_params=ADAM)
    assert api.result(good)["metrics"]["step:max"] == 1


def test_clients_before_0_25_speak_json(api):
    data, model = datums(np.random.default_rng(0)), api.model()
    body = json_request(data, "cross_entropy") | {"model_id": model}
    first = api.post("forward_backward", **body)
    body = {
        "forward_input": body["forward_backward_input"],
        "model_id": model,
        "seq_id": 2,
    }
    second = api.post("forward", **body)
    for promise in (first, second):
        result = api.result(promise)
        assert result["metrics"]["tokens:sum"] == 9
        shapes = [one["logprobs"]["shape"] for one in result["loss_fn_outputs"]]
        assert shapes == [[7], [4]]


def test_a_poll_ends_in_time(api, monkeypatch):
    """It does not cancel what it waits for, and a lost result says so."""
    data, model = datums(np.random.default_rng(0)), api.model()
    held = api.good(api.submit(pass_request(model, 2, data)))
    monkeypatch.setattr(training, "POLL_SECONDS", 0.01)
    asked = api.post("retrieve_future", 408, request_id=held["request_id"])
    assert asked["type"] == "try_again" and asked["queue_state"] == "active"
    monkeypatch.undo()
    api.good(api.submit(pass_request(model, 1, data)))
    assert api.output(held).metrics["tokens:sum"] == 9
    for tenant, id in ((api, "0" * 32), (api.as_tenant("bob"), held["request_id"])):
        assert (
            "Send the request"
            in tenant.post("retrieve_future", 410, request_id=id)["detail"]
        )


def test_models_that_cannot_be_made(api):
    session = api.session()
    given = {"session_id": session, "model_seq_id": 0, "base_model": NAME}
    given["lora_config"] = {"rank": 4}
    for status, text, changes in (
        (400, "is not served here", {"base_model": "other"}),
        (400, "session.rank=9", {"lora_config": {"rank": 9}}),
        (400, "nothing would be trained", {"lora_config": NOTHING}),
        (404, "no session", {"session_id": "0" * 32}),
        (422, "rank=0", {"lora_config": {"rank": 0}}),
        (422, "must be 'adamw'", {"optimizer_config": {"type": "dimuon"}}),
        (422, "does not know 'own'", {"own": 1}),
    ):
        made = api.post("create_model", status, **given | changes)
        assert text in made["detail"], made
    assert api.post("create_model", **given, own=None)


def test_targets_of_a_model(api, tiny_model):
    """Linears that are not trained have no gradient, and so keep their weights."""
    data, model = datums(np.random.default_rng(0)), api.model(train_mlp=False)
    session = Session(tiny_model, **SETTINGS)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    session.add_adapter("one", rank=4, seed=1, target_modules=linears)
    expected = session.forward_backward("one", data).result()
    session.optim_step("one", **ADAM).result()
    expected = session.forward("one", data).result()
    api.good(api.submit(pass_request(model, 1, data)))
    api.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    after = api.good(api.submit(pass_request(model, 3, data, forward_only=True)))
    np.testing.assert_array_equal(
        np.concatenate(logprobs_of(api.output(after))),
        np.concatenate(expected.logprobs),
    )


def test_a_server_that_accepts_nothing_is_asked_again(api, monkeypatch):
    """The client sends the same request later, also what cannot be done."""
    data, model = datums(np.random.default_rng(0)), api.model()

    def refuse():
        raise Unavailable("the disk is full.")

    monkeypatch.setattr(api.server.hub, "_check_accepts", refuse)
    requests = [pass_request(model, 1, data), pass_request(model, 2, data, "gspo")]
    assert [api.submit(one).status_code for one in requests] == [503, 503]
    assert api.server.limits.pending("alice") == 0
    monkeypatch.undo()
    first, second = (api.good(api.submit(one)) for one in requests)
    assert api.output(first).metrics["tokens:sum"] == 9
    assert "gspo" in api.result(second)["error"]


def test_models_that_are_made_at_once_keep_to_the_quota(api, monkeypatch):
    carol = api.as_tenant("carol")
    server, session, made = carol.server, carol.session(), []
    monkeypatch.setattr(server.limits, "quota", lambda tenant: Quota(models=1))
    models, begin = Models(server), threading.Barrier(8)
    who = Principal(tenant="carol", scopes=frozenset(), key_id=None)

    def create(number: int) -> None:
        body = bodies.CreateModel(
            session_id=session,
            model_seq_id=number,
            base_model=NAME,
            lora_config=bodies.LoraConfig(rank=4),
        )
        begin.wait()
        with contextlib.suppress(OverQuota):
            made.append(models.create(who, body))

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and server.registry.count("carol", "model") == 1
    assert made[0].outcome.result(timeout=60)
