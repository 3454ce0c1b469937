"""Several engines behind one address are used as one server is."""

import asyncio
import dataclasses
import pathlib

import httpx
import numpy as np
import pytest

from jaxlora.serve.fleet import front as module
from jaxlora.serve.fleet.relay import Incoming
from jaxlora.serve.ids import Misdirected, engine_of
from jaxlora.serve.operation import Unload
from jaxlora.session.datum import Datum
from tests import tiny
from tests.jaxlora.serve.fleet.conftest import Patient, fleet_in
from tests.jaxlora.serve.tinker.conftest import ADAM, pass_request, serving

LEARNING = ADAM | {"learning_rate": 1e-2}
JOB = {
    "data": {"path": "d.jsonl"},
    "steps": 2,
    "rank": 4,
    "max_length": 32,
    "target_modules": ["q_proj"],
}


def datum(seed: int, size: int) -> Datum:
    tokens, targets = np.random.default_rng(seed).integers(3, 250, (2, size))
    return Datum(tokens=tokens, target_tokens=targets)


def train(api, model: str, first: int, steps: int, seed: int = 0) -> list[float]:
    """Trains a model by requests from a number on; returns its losses."""
    losses = []
    for number in range(first, first + 2 * steps, 2):
        data = [datum(seed + number - first, size) for size in (8, 12)]
        passed = api.submit(pass_request(model, number, data)).json()
        stepped = api.post(
            "optim_step", model_id=model, seq_id=number + 1, adam_params=LEARNING
        )
        losses.append(api.output(passed).metrics["loss:sum"])
        api.result(stepped)
    return losses


def test_loops_of_two_tenants_run_on_two_engines_and_have_the_bits_of_one(
    model, database_url, tmp_path
):
    with serving(tmp_path / "one", model) as given:
        api = Patient(given.server, given.client, given.key)
        alone = train(api, api.model(), 1, 3)
    with fleet_in(tmp_path / "s", model, database=database_url) as fleet:
        apis = [fleet.api, fleet.as_tenant("bob")]
        models = [api.model() for api in apis]
        assert {engine_of(one) for one in models} == {0, 1}
        assert [train(*pair, 1, 3) for pair in zip(apis, models, strict=True)] == [
            alone,
            alone,
        ]


def test_clients_of_an_engine_that_is_away_wait_and_others_do_not(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.1)
    with fleet_in(tmp_path / "s", model) as fleet:
        api = fleet.api
        found = {engine_of(one): one for one in (api.model(), api.model())}
        train(api, found[1], 1, 1)
        saved = api.post("save_weights", model_id=found[1], seq_id=3, path="a")
        path = api.result(saved)["path"]
        fleet.stop(1)
        answer = api.send(
            "POST", "optim_step", json={"model_id": found[1], "seq_id": 4}
        )
        assert answer.status_code == 503
        assert "engine 1, which has what this request is about" in answer.text
        answer = api.send("POST", "retrieve_future", json=saved)
        assert answer.status_code == 503  # the client asks again
        session = {"session_id": found[1].partition(":")[0]}
        assert api.send("POST", "session_heartbeat", json=session).status_code == 200
        train(api, found[0], 1, 1)
        health = fleet.client.get("/healthz").json()
        assert health == {"status": "partly", "engines": {"0": "ok", "1": "away"}}
        assert engine_of(api.session()) == 0
        # What was saved can go on elsewhere.
        other = api.session()
        loaded = api.post(
            *("load_weights",),
            session_id=other,
            model_seq_id=0,
            path=path,
            optimizer=True,
        )
        assert api.result(loaded)["model_id"] == f"{other}:train:0"
        elsewhere = train(api, f"{other}:train:0", 1, 2, seed=9)
        fleet.start(1)
        fleet.wait(1)
        assert train(api, found[1], 4, 2, seed=9) == elsewhere


def test_a_request_about_an_engine_goes_to_no_other(fleet, monkeypatch):
    """Another one would say that there is no such result, and the client gives up."""
    engines = {n: module.Engine(n, pathlib.Path("none")) for n in range(2)}
    front = dataclasses.replace(fleet.front, engines=engines)
    engines[0].health = "ok"

    async def receive():
        return {"type": "http.request", "body": b'{"request_id": "e1-a"}'}

    async def healthz(path, headers):
        return 200, b'{"status": "ok"}'

    async def choose():
        path = "/api/v1/retrieve_future"
        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        choosing = asyncio.create_task(front.choose(scope, Incoming(receive)))
        await asyncio.sleep(0.01)
        assert not choosing.done()
        monkeypatch.setattr(engines[1].relay, "get", healthz)
        await engines[1].look()
        engines[1].lose()  # before the request goes on
        return await choosing

    assert asyncio.run(choose()) is engines[1]


@pytest.mark.parametrize("body", [b'{"detail": "an error"}', b"Internal Server Error"])
def test_an_engine_that_answers_with_an_error_is_away(body, monkeypatch):
    engine = module.Engine(0, pathlib.Path("none"))
    engine.health = "ok"

    async def healthz(path, headers):
        return 500, body

    monkeypatch.setattr(engine.relay, "get", healthz)
    asyncio.run(engine.look())
    assert engine.health is None


def test_jobs_of_a_tenant_run_on_all_engines_and_are_one_list(fleet, tmp_path):
    api = fleet.as_tenant("jobs")
    call = lambda method, path, **given: fleet.client.request(
        method, f"/jobs/v1/{path}", headers=api.key, **given
    )
    records = pathlib.Path(tiny.write_records(tmp_path / "d.jsonl", 12, 0))
    sent = call("PUT", "uploads/d.jsonl", content=records.read_bytes())
    assert sent.status_code == 201, sent.text
    made = [call("POST", "jobs", json=JOB | {"name": name}) for name in ("a", "b")]
    assert [one.status_code for one in made] == [201, 201], made[-1].text
    assert {engine_of(one.json()["id"]) for one in made} == {0, 1}
    assert call("POST", "jobs", json=JOB | {"name": "A"}).status_code == 409
    assert {"running", "waiting", "places"} < call("GET", "queue").json().keys()
    for name in ("a", "b"):
        while call("GET", f"jobs/{name}").json()["status"] != "finished":
            pass
        assert call("POST", f"jobs/{name}/stop").status_code == 409  # it has ended
        chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
        found = fleet.client.post(
            "/v1/chat/completions", headers=api.key, json=chat | {"max_tokens": 1}
        )
        assert found.status_code == 200, found.text
    listed = call("GET", "jobs").json()
    assert {job["name"] for job in listed["jobs"]} == {"a", "b"}
    again = JOB | {"name": "c", "init_from": "a"}
    assert call("POST", "preview", json=again).status_code == 200
    assert call("DELETE", "jobs/a").status_code == 204
    assert call("GET", "jobs/a").status_code == 404


def test_samples_are_drawn_where_their_weights_are(fleet):
    api = fleet.api
    for _ in range(2):
        session = api.session()
        model = api.model(session)
        published = api.post(
            *("save_weights_for_sampler",),
            model_id=model,
            seq_id=1,
            sampling_session_seq_id=0,
        )
        sampler = api.result(published)["sampling_session_id"]
        assert engine_of(sampler) == engine_of(session)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        asked = api.post(
            *("asample",),
            sampling_session_id=sampler,
            seq_id=0,
            prompt=prompt,
            sampling_params={"max_tokens": 2, "temperature": 0},
        )
        assert len(api.result(asked)["sequences"]) == 1


def test_metrics_and_the_page_are_of_all_engines(fleet):
    admin = fleet.as_tenant("ops", "admin")
    get = lambda path: fleet.client.get(path, headers=admin.key)
    models = [fleet.api.model(), fleet.api.model()]
    for model in models:
        train(fleet.api, model, 1, 2)
    text = get("/metrics").text
    for number in range(2):
        assert f'jaxlora_engine_up{{engine="{number}"}} 1.0' in text
        assert f'jaxlora_steps_total{{engine="{number}"}}' in text
    assert fleet.client.get("/metrics", headers=fleet.api.key).status_code == 403
    view = get("/page/state").json()
    assert {*models} <= {row["id"] for row in view["models"]}
    assert {*models} <= view["points"].keys()
    assert view["figures"]["slots"] == 2 * fleet.config.session.num_slots
    after = f"?after={view['cursor']}&epoch={view['epoch']}"
    new = get(f"/page/state{after}").json()
    assert new["epoch"] == view["epoch"] and not new["points"]
    train(fleet.api, models[0], 5, 1)
    assert get(f"/page/state{after}").json()["points"].keys() == {models[0]}
    # After a restart of an engine, all points come anew.
    wrong = after.replace(view["epoch"].rpartition("-")[2], "0" * 16)
    assert {*models} <= get(f"/page/state{wrong}").json()["points"].keys()
    for damaged in ("?after=\u0663&epoch=0-a", "?after=1&epoch=0-\u00e4"):
        assert get(f"/page/state{damaged}").status_code == 422


def test_bodies_are_bounded_and_large_ones_are_streamed(model, tmp_path):
    limits = {"body_bytes": 20_000, "upload_bytes": 50_000}
    with fleet_in(tmp_path / "s", model, limits=limits) as fleet:
        line, own = b'{"prompt": "a", "completion": "b"}\n', fleet.api.key
        put = lambda name, content: fleet.client.put(
            f"/jobs/v1/uploads/{name}.jsonl", headers=own, content=content
        )
        assert put("a", line * 1_200).status_code == 201
        assert put("b", iter([line] * 1_200)).status_code == 201  # length is not said
        assert put("c", line * 1_600).status_code == 413
        assert put("d", iter([line] * 1_600)).status_code == 413
        assert put("a", line).status_code == 409  # there is one
        answer = fleet.client.post(
            "/api/v1/create_session", headers=own, content=bytes(30_000)
        )
        assert answer.status_code == 413
        assert fleet.client.put("/jobs/v1/uploads/e.jsonl").status_code == 401
        # Downloads pass, too.
        model_id = fleet.api.model()
        saved = fleet.api.post("save_weights", model_id=model_id, seq_id=1, path="a")
        path = fleet.api.result(saved)["path"].removeprefix("tinker://")
        run, kind, name = path.split("/")
        route = f"training_runs/{run}/checkpoints/{kind}/{name}/archive"
        link = fleet.api.send("GET", route).headers["location"]
        assert link.startswith(fleet.url)
        assert len(httpx.get(link).content) > 10_000


def test_any_engine_answers_about_those_that_are_not_of_this_server(fleet):
    answer = fleet.api.send("POST", "get_info", json={"model_id": "e7-abc:train:0"})
    assert answer.status_code == 404


def test_a_wrong_key_is_not_sent_on(fleet, monkeypatch):
    asked = []
    monkeypatch.setattr(module.Front, "choose", lambda *given: asked.append(given))
    answer = fleet.client.get("/v1/models", headers={"X-API-Key": "tml-local"})
    assert answer.status_code == 401 and not asked


def test_a_request_that_goes_to_the_wrong_engine_is_refused(fleet):
    model = fleet.api.model()
    other = fleet.servers[1 - engine_of(model)]
    with pytest.raises(Misdirected, match="lives on engine"):
        other.hub.submit("alice", model, 5, Unload())
