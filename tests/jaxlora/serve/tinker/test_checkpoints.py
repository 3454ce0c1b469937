"""Checkpoints: saves, loads, lists, and who may read them."""

import io
import json
import tarfile
import types
from concurrent.futures import Future

import numpy as np
import pytest

from jaxlora.config.serve_config import Quota
from jaxlora.errors import StorageError
from jaxlora.serve.app import delete_expired
from jaxlora.serve.hub import Hub, Unavailable
from jaxlora.serve.tinker.checkpoints import reserve
from tests.jaxlora.serve.tinker.conftest import (
    ADAM,
    NAME,
    Api,
    logprobs_of,
    pass_request,
)
from tests.jaxlora.session.test_losses import datums

DATA = datums(np.random.default_rng(0))


@pytest.fixture
def trained(api):
    """A model after one step."""
    model = api.model()
    api.good(api.submit(pass_request(model, 1, DATA)))
    api.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    return model


def save(api, model: str, seq_id: int, name: str, kind="save_weights", **given):
    promise = api.post(kind, model_id=model, seq_id=seq_id, path=name, **given)
    return api.result(promise)


def step(api, model: str, seq_id: int) -> np.ndarray:
    """Takes a step, and returns the log-probabilities after it."""
    api.good(api.submit(pass_request(model, seq_id, DATA)))
    api.post("optim_step", model_id=model, seq_id=seq_id + 1, adam_params=ADAM)
    request = pass_request(model, seq_id + 2, DATA, forward_only=True)
    return np.concatenate(logprobs_of(api.output(api.good(api.submit(request)))))


def load(api, path: str, number: int, *, optimizer: bool) -> str:
    session = api.session()
    promise = api.post(
        "load_weights",
        session_id=session,
        model_seq_id=number,
        path=path,
        optimizer=optimizer,
    )
    model = f"{session}:train:{number}"
    assert api.result(promise)["model_id"] == model
    return model


def test_a_model_goes_on_from_a_checkpoint(api, trained):
    """To the bit with the optimizer's state, and otherwise without."""
    path = save(api, trained, 3, "one")["path"]
    assert path == f"tinker://{trained}/weights/one"
    info = api.post("weights_info", tinker_path=path)
    assert info["lora_rank"] == 4 and info["base_model"] == NAME
    expected = step(api, trained, 4)
    resumed = load(api, path, 0, optimizer=True)
    assert api.post("get_info", model_id=resumed)["lora_rank"] == 4
    np.testing.assert_array_equal(step(api, resumed, 1), expected)
    fresh = load(api, path, 1, optimizer=False)
    assert np.abs(step(api, fresh, 1) - expected).max() > 1e-5
    # An older client makes the model first, and then loads into it.
    old = api.model()
    loaded = api.post("load_weights", model_id=old, seq_id=1, path=path, optimizer=True)
    assert api.result(loaded)["path"] == path
    np.testing.assert_array_equal(step(api, old, 2), expected)


def test_a_name_is_taken_once(api, trained):
    key = {"ttl_seconds": 3600, "user_metadata": {"a": "b"}}
    assert "error" not in save(api, trained, 3, "one", **key)
    step(api, trained, 4)
    assert "is there already" in save(api, trained, 7, "one")["error"]
    run = f"training_runs/{trained}"
    (before,) = api.get(f"{run}/checkpoints")["checkpoints"]
    assert before["user_metadata"] == {"a": "b"} and before["expires_at"]
    state = api.server.storage.fetch(f"alice/{trained}/weights/one").read_bytes()
    for seq_id in (8, 9):
        assert "error" not in save(api, trained, seq_id, "one", overwrite=True)
        (after,) = api.get(f"{run}/checkpoints")["checkpoints"]
        assert after["user_metadata"] is None and after["expires_at"] is None
    (key,) = api.server.storage.list(f"alice/{trained}/weights")
    assert api.server.storage.fetch(key).read_bytes() != state
    # What was accepted before is the same request, although the name is taken.
    assert "error" not in save(api, trained, 9, "one", overwrite=True)


def test_the_last_save_that_was_written_counts(api, trained):
    """Also if nobody has looked since, and the first one was to expire by now."""
    assert "error" not in save(api, trained, 3, "one", ttl_seconds=3600)
    folder, server = f"alice/{trained}/weights", api.server
    for seq_id in (4, 8):
        assert "error" not in save(api, trained, seq_id, "one", overwrite=True)
        step(api, trained, seq_id + 1)
        assert len(server.storage.list(folder)) == 2
    entry = server.registry.owned("alice", "checkpoint", f"{trained}/weights/one")
    server.registry.update("alice", "checkpoint", entry.id, expires_at=1.0)
    delete_expired(server)
    for seq_id in (20, 21):  # these fail, or are not written yet
        model = server.registry.owned("alice", "model", trained)
        given = {"seq_id": seq_id, "ttl": None, "metadata": None, "overwrite": True}
        reserve(server, model, "weights", "one", **given)
    assert [*server.storage.list(folder)] == [f"{folder}/one:8"]
    resumed = load(api, f"tinker://{entry.id}", 0, optimizer=True)
    assert np.isfinite(step(api, resumed, 1)).all()


def test_what_nobody_has_listed_counts_for_the_quota(api, trained, monkeypatch):
    save(api, trained, 3, "one")
    quota = Quota(storage_bytes=1)
    monkeypatch.setattr(type(api.server.limits), "quota", lambda *_: quota)
    given = {"model_id": trained, "seq_id": 4, "path": "two"}
    assert "you have stored" in api.post("save_weights", 402, **given)["detail"]
    monkeypatch.undo()
    assert "error" not in save(api, trained, 4, "two")


def test_lists_and_changes(api, trained):
    path = save(api, trained, 3, "one")["path"]
    external = save(api, trained, 4, "plain", "save_weights_external")["path"]
    run = api.get(f"training_runs/{trained}")
    assert run["last_checkpoint"]["tinker_path"] == path and run["is_lora"]
    assert run["last_sampler_checkpoint"] is None
    runs = api.get("training_runs", limit=1)
    assert [one["training_run_id"] for one in runs["training_runs"]] == [trained]
    found = api.get("checkpoints")
    newest = [one["tinker_path"] for one in found["checkpoints"]][:2]
    assert newest == [external, path] and found["checkpoints"][0]["size_bytes"] > 0
    one = f"training_runs/{trained}/checkpoints/weights/one"
    api.good(api.send("PUT", f"{one}/ttl", json={"ttl_seconds": 3600}))
    assert api.get("checkpoints")["checkpoints"][1]["expires_at"]
    api.good(api.send("PUT", f"{one}/ttl", json={}))
    assert not api.get("checkpoints")["checkpoints"][1]["expires_at"]
    assert api.send("PUT", f"{one}/ttl", json={"ttl_seconds": 1}).status_code == 422
    api.good(api.send("DELETE", one))
    assert api.send("DELETE", one).status_code == 404
    assert api.post("weights_info", 404, tinker_path=path)
    assert api.post("weights_info", 400, tinker_path="tinker://x/y")
    assert not api.server.storage.list(f"alice/{trained}/weights")
    session = trained.partition(":")[0]
    assert api.get(f"sessions/{session}")["training_run_ids"] == [trained]
    assert session in api.get("sessions")["sessions"]
    search = api.post("sessions/search", session_id=session)
    assert search["sessions"][0]["checkpoints_count"] == 1


def test_downloads(api, trained):
    save(api, trained, 3, "plain", "save_weights_external")
    one = f"training_runs/{trained}/checkpoints/external_weights/plain"
    urls = api.get(f"{one}/external_weights_urls")["urls"]
    assert set(urls) >= {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads(api.client.get(urls["adapter_config.json"]).content)
    assert config["lora_alpha"] == 32 and config["r"] == 4
    moved = api.send("GET", f"{one}/archive")
    assert moved.status_code == 302
    archive = api.client.get(moved.headers["location"]).content
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert "plain/adapter_model.safetensors" in opened.getnames()


def test_other_tenants_read_what_is_published(api, trained):
    path, bob = save(api, trained, 3, "one")["path"], api.as_tenant("bob")
    one = f"training_runs/{trained}/checkpoints/weights/one"
    detail = bob.post("weights_info", 404, tinker_path=path)["detail"]
    other = path.replace(trained, "x")
    missing = bob.post("weights_info", 404, tinker_path=other)["detail"]
    assert detail.replace(trained, "x") == missing
    for method, address in (("DELETE", one), ("POST", f"{one}/publish")):
        assert bob.send(method, address).status_code == 404
    api.good(api.send("POST", f"{one}/publish"))
    assert api.get("checkpoints")["checkpoints"][0]["public"]
    model = load(bob, path, 0, optimizer=True)
    np.testing.assert_array_equal(step(bob, model, 1), step(api, trained, 4))
    bob.post(f"sessions/{model.partition(':')[0]}/finish", reason={"type": "success"})
    api.good(api.send("DELETE", f"{one}/publish"))
    assert bob.post("weights_info", 404, tinker_path=path)


def test_what_cannot_be_loaded(api, trained):
    external = save(api, trained, 3, "plain", "save_weights_external")["path"]
    given = {"session_id": api.session(), "model_seq_id": 7, "path": external}
    refused = api.post("load_weights", 400, **given, optimizer=True)
    assert "no state of the optimizer" in refused["detail"]
    token = {"weights_access_token": "x", "optimizer": False}
    assert "access tokens" in api.post("load_weights", 400, **given, **token)["detail"]
    assert (
        "give either"
        in api.post("load_weights", 422, path="", optimizer=True)["detail"]
    )
    missing = api.post(
        "load_weights",
        model_id=trained,
        seq_id=4,
        path=f"tinker://{trained}/weights/none",
        optimizer=True,
    )
    assert "there is no checkpoint" in api.result(missing)["error"]
    assert np.isfinite(step(api, trained, 5)).all()


def test_a_finished_session_ends_its_models(api):
    model = api.model()
    session = api.sessions[-1]
    assert api.post("session_heartbeat", session_id=session)
    api.post(f"sessions/{session}/finish", reason={"type": "errored"}, detail="d")
    assert api.post("session_heartbeat", 410, session_id=session)
    late = api.submit(pass_request(model, 1, DATA))
    assert late.status_code == 422 and "was unloaded" in late.json()["detail"]
    again = {"session_id": session, "model_seq_id": 1, "base_model": NAME}
    again["lora_config"] = {"rank": 4}
    assert "has finished" in api.post("create_model", 400, **again)["detail"]
    (found,) = api.post("sessions/search", session_id=session)["sessions"]
    assert found["status"]["reason"]["type"] == "errored"
    other = api.model()
    assert api.result(api.post("unload_model", model_id=other))["model_id"] == other
    promises = api.server.hub._promises
    promises._by_number.clear()  # as after a while
    assert other in promises.drop_models(lambda one: one.is_unloaded)
    late = api.submit(pass_request(other, 2, DATA))
    assert late.status_code == 422 and "was unloaded" in late.json()["detail"]


def test_a_session_that_was_not_finished_wholly_is_finished_later(api, monkeypatch):
    session = api.session()
    models = [api.model(session, number) for number in range(2)]
    submit = Hub.submit_last

    def fail(hub, tenant, model, operation):
        if model == models[0]:
            raise Unavailable("the disk is full.")
        return submit(hub, tenant, model, operation)

    finish = f"sessions/{session}/finish"
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "submit_last", fail)
        api.post(finish, 503, reason={"type": "success"})
    one = {"X-API-Key": api.server.keys.add("alice", ["read", "sample"])}
    reader = Api(api.server, api.client, one)
    assert "does not allow train" in reader.post(finish, 403, reason={})["detail"]
    api.post(finish, reason={"type": "success"})
    for model in models:
        entry = api.server.registry.owned("alice", "model", model)
        assert entry.fields["unloaded"]
        late = api.submit(pass_request(model, 1, DATA))
        assert late.status_code == 422 and "was unloaded" in late.json()["detail"]


def test_a_model_counts_as_unloaded_when_the_log_has_that(api, monkeypatch):
    """A crash between the two would leave it loaded for ever."""
    model, accepted = api.model(), Future()
    accepted.set_exception(StorageError("the disk is full."))
    lost = types.SimpleNamespace(accepted=accepted)
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "submit_last", lambda *given: lost)
        api.post("unload_model", 503, model_id=model)
    entry = api.server.registry.owned("alice", "model", model)
    assert not entry.fields.get("unloaded")
