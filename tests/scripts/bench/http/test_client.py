"""The tenants of the load over HTTP, and what is counted of them."""

import argparse
import asyncio
import json

import httpx
import numpy as np
import pytest

from jaxlora.errors import JaxloraError
from jaxlora.serve.limits import decompress
from jaxlora.serve.tinker import bodies
from scripts.bench.http import client
from scripts.bench.http.client import Event, Tenant
from scripts.bench.http.load import Load
from scripts.bench.http.server import Seen
from scripts.bench.serve import Case

DATA = [
    {
        "tokens": np.arange(3, 3 + n),
        "target_tokens": np.arange(4, 4 + n),
        "weights": np.arange(n) >= n // 2,
    }
    for n in (5, 9)
]


class Routes:
    """Answers as a server does whose steps have the numbers that a test says."""

    def __init__(self, *steps: int, broken: int = 0):
        self.steps, self.broken = [*steps], broken
        self.bodies, self.requests = [], []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path.removeprefix("/api/v1/")
        self.requests.append((route, request.headers["x-api-key"]))
        if self.broken:
            self.broken -= 1
            if self.broken % 2:
                raise httpx.ConnectError("the server is away")
            return httpx.Response(503, json={"detail": "later"})
        if route == "forward_backward":
            self.bodies.append(decompress(request.content, 2**20))
            return httpx.Response(200, json={"request_id": "pass"})
        if route == "create_session":
            return httpx.Response(200, json={"session_id": "s"})
        if route != "retrieve_future":
            return httpx.Response(200, json={"request_id": route})
        return self._result(json.loads(request.content)["request_id"])

    def _result(self, request_id: str) -> httpx.Response:
        if request_id == "pass":
            headers = {"content-type": bodies.PROTOBUF}
            return httpx.Response(200, headers=headers, content=b"")
        if request_id == "create_model":
            return httpx.Response(200, json={"model_id": "m"})
        metrics = {"step:max": float(self.steps.pop(0))}
        return httpx.Response(200, json={"metrics": metrics})


def train(routes: Routes, times: int = 1) -> tuple[Tenant, list[Event]]:
    async def run():
        transport = httpx.MockTransport(routes)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server"
        ) as http:
            tenant = Tenant(http, "alice", "tml-1", "base")
            await tenant.create(8, seed=0)
            return tenant, [await tenant.train(DATA) for _ in range(times)]

    return asyncio.run(run())


def test_a_pass_has_the_datums_that_the_server_reads():
    routes = Routes(1, 2)
    tenant, (event, _) = train(routes, 2)
    one, two = map(bodies.pass_of_protobuf, routes.bodies)
    assert (one.model_id, one.seq_id, two.seq_id) == ("m", 1, 3)
    operation = one.operation()
    assert operation.is_training and operation.loss.name == "cross_entropy"
    for datum, given in zip(operation.data, DATA, strict=True):
        for name, values in given.items():
            np.testing.assert_array_equal(getattr(datum, name), values)
    assert {key for _, key in routes.requests} == {"tml-1"}
    assert (event.num_tokens, tenant.steps, tenant.wrong_steps) == (14, 2, 0)
    assert event.sent <= event.accepted <= event.ended and event.step_seconds > 0


def test_a_step_with_another_number_is_counted():
    tenant, _ = train(Routes(1, 3), 2)
    assert (tenant.steps, tenant.wrong_steps) == (2, 1)


def test_requests_are_sent_again_while_the_server_is_away(monkeypatch):
    monkeypatch.setattr(client, "_RETRY_SECONDS", 0.0)
    tenant, _ = train(Routes(1, broken=4))
    assert (tenant.steps, tenant.retries) == (1, 4)


def test_a_request_that_is_refused_ends_the_benchmark():
    async def run():
        refuse = httpx.MockTransport(lambda _: httpx.Response(500, text="no"))
        async with httpx.AsyncClient(transport=refuse, base_url="http://s") as http:
            await Tenant(http, "alice", "tml-1", "base").post("create_session")

    with pytest.raises(JaxloraError, match="create_session of alice: 500 no"):
        asyncio.run(run())


def event(tenant: str, ended: float, kind: str = "train") -> Event:
    return Event(
        tenant=tenant,
        kind=kind,
        began=ended - 2,
        sent=ended - 2,
        accepted=ended - 1.99,
        ended=ended,
        num_tokens=100,
        step_seconds=1.5,
    )


def test_columns_count_what_ended_in_the_window():
    label = 'operation="step"'
    sums = {
        f"jaxlora_operation_seconds_sum{{{label}}}": (1.0, 1.0 + 3 * 1.4),
        f"jaxlora_operation_seconds_count{{{label}}}": (5.0, 8.0),
        "jaxlora_commit_seconds_sum{}": (0.0, 0.03),
        "jaxlora_commit_seconds_count{}": (0.0, 10.0),
    }
    window = tuple(
        Seen(
            at=at,
            cpu_seconds=at / 2,
            client_seconds=0.0,
            compiled=3 + place,
            numbers={name: both[place] for name, both in sums.items()},
        )
        for place, at in enumerate((10.0, 20.0))
    )
    case = Case(model="tiny", sizes=(32,), slots=2)
    load = Load.__new__(Load)
    load.case, load.args = case, argparse.Namespace()
    load.events = [event("a", 9.0), event("a", 11.0), event("a", 15.0)]
    load.events += [event("b", 19.0), event("b", 21.0), event("", 12.0, "get")]
    found = load.columns(window)
    assert found["tokens_per_second"] == 30 and found["requests"] == 3
    assert found["p50_s"] == 2.0 and found["accept_p99_ms"] == pytest.approx(10.0)
    assert found["get_p50_ms"] == 2000 and found["unfairness"] == 0.333
    assert found["outside_ms"] == pytest.approx(100.0)
    assert (
        found["commit_ms"] == 3.0 and found["cores"] == 0.5 and found["compiled"] == 1
    )
    assert load.columns(window, without=("a",))["requests"] == 1
