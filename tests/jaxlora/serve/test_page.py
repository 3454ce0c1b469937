"""The page and the metrics of a server with two tenants, and the page of a run.

What the page shows is tested in a browser: on a desktop and on a phone.
"""

import dataclasses
import itertools
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import uvicorn

from jaxlora import Callback, LoraJob, RunConfig, Trainer
from jaxlora.config.serve_config import ServeConfig, ServerSession
from jaxlora.config.session_config import AdamParams
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import StorageError
from jaxlora.hf.load import load_model
from jaxlora.serve.app import make_app, make_server
from jaxlora.serve.history import History, Rates
from jaxlora.serve.operation import Create, Done, Pass, Step, Unload
from jaxlora.serve.run_page import serve_run
from jaxlora.serve.server import Server
from jaxlora.serve.view import Point
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.samples import SampleCall
from tests import tiny
from tests.browser import DESKTOP, PHONE, browser, needs_browser, opened
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import datums
from tests.jaxlora.session.test_samples import CONFIG
from tests.jaxlora.train.host_executor import without_device
from tests.jaxlora.train.runs import LINEARS, TWO_SLOTS

__all__ = ["browser"]
CURVE = "document.querySelector('path[data-model=\"%s\"]')?.getAttribute('d')"
SHIFTS = """new PerformanceObserver(list => list.getEntries().forEach(
    one => { window.shifted = (window.shifted || 0) + one.value; })
).observe({type: 'layout-shift', buffered: true})"""


CREATE = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
STEP = Step(params=AdamParams(learning_rate=3e-3))


@dataclasses.dataclass(frozen=True)
class Served:
    """A server that listens.

    Attributes:
        server: The server.
        address: Its address.
        keys: Keys of two tenants and of an admin.
        numbers: The next numbers of the operations of each model.
        loaded: The tenants of models that are loaded.
    """

    server: Server
    address: str
    keys: dict[str, str]
    numbers: dict[str, Iterator[int]] = dataclasses.field(default_factory=dict)
    loaded: dict[str, str] = dataclasses.field(default_factory=dict)

    def do(self, tenant: str, model: str, *operations) -> None:
        """Runs operations of a model, after those before."""
        numbers = self.numbers.setdefault(model, itertools.count(1))
        for operation in operations:
            promise = self.server.hub.submit(tenant, model, next(numbers), operation)
            assert isinstance(promise.outcome.result(timeout=60), Done)
        self.loaded[model] = tenant
        if isinstance(operations[-1], Unload):
            del self.loaded[model]

    def get(self, path: str, who: str | None = None, **query) -> httpx.Response:
        headers = {} if who is None else {"X-API-Key": self.keys[who]}
        return httpx.get(f"{self.address}{path}", headers=headers, params=query)

    def state(self, who: str, **query) -> dict:
        return self.get("/page/state", who, **query).raise_for_status().json()


def training_pass() -> Pass:
    data = tuple(datums(np.random.default_rng(0)))
    loss = ChosenLoss.of("cross_entropy", None)
    return Pass(data=data, loss=loss, is_training=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("page") / "model"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return ServeConfig(
        model="tiny",
        model_name="a <model> & more",
        folder=str(tmp_path_factory.mktemp("page") / "serve"),
        keys=True,
        session=ServerSession(**SETTINGS),
        sampling=CONFIG,
    )


@pytest.fixture(scope="module")
def listening(model, config):
    server = make_server(config, model)
    tenants = {"alice": ("alice", ["read"]), "bob": ("bob", ["read"])}
    tenants |= {"trainer": ("alice", ["train"]), "admin": ("ops", ["admin"])}
    keys = {name: server.keys.add(*one) for name, one in tenants.items()}
    settings = uvicorn.Config(make_app(server), log_config=None)
    listens = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        run = {"sockets": [bound]}
        thread = threading.Thread(target=listens.run, kwargs=run)
        thread.start()
        httpx.get(f"{address}/healthz").raise_for_status()
        yield Served(server, address, keys)
        listens.should_exit = True
        thread.join()


@pytest.fixture
def served(listening):
    """The server, which is without models at the end of each test."""
    yield listening
    for model, tenant in [*listening.loaded.items()]:
        listening.do(tenant, model, Unload())


def test_a_tenant_sees_its_own_and_an_admin_sees_all(served):
    served.do("alice", "a1:train:0", CREATE, training_pass(), STEP)
    served.do("bob", "b1:train:0", CREATE, training_pass(), training_pass(), STEP)
    alice = served.state("alice")
    assert [row["id"] for row in alice["models"]] == ["a1:train:0"]
    assert alice["points"].keys() == {"a1:train:0"} and alice["tenants"] is None
    assert "bob" not in str(alice) and alice["subtitle"] == "tenant alice"
    assert alice["figures"]["fill"] is None
    (point,) = alice["points"]["a1:train:0"]
    step, loss, held_out, rate, norm = point
    assert (step, held_out, rate) == (1, None, 3e-3) and norm > 0
    # The loss is that of a target token: twice the same pass has the same.
    every = served.state("admin")
    assert {row["tenant"] for row in every["models"]} == {"alice", "bob"}
    assert every["points"]["b1:train:0"][0][1] == pytest.approx(loss, rel=1e-5)
    assert [row["name"] for row in every["tenants"]] == ["alice", "bob"]
    assert 0 < every["figures"]["fill"] <= 1
    assert every["figures"]["commit_seconds"] > 0


def test_samples_are_for_their_tenant_alone(served):
    prompt = tuple(load_tokenizer(served.server.hub.engine.model.folder).encode("ab"))
    call = SampleCall(
        version="base", prompt=prompt, num_samples=2, max_tokens=4, seed=0
    )
    served.server.hub.sample("alice", call).result(timeout=60)
    (sample,) = served.state("alice")["samples"]  # the first of the two
    assert sample["prompt"] == "ab" and sample["model"] == "base"
    assert served.state("bob")["samples"] == served.state("admin")["samples"] == []
    text = served.get("/metrics", "admin").text
    assert 'jaxlora_samples_total{tenant="alice"} 2.0' in text


def test_a_job_is_shown_by_its_name(served, tmp_path):
    rows = pathlib.Path(tiny.write_records(tmp_path / "rows.jsonl", 6, seed=0))
    head = {"X-API-Key": served.keys["trainer"]}
    jobs = f"{served.address}/jobs/v1"
    sent = httpx.put(
        f"{jobs}/uploads/{rows.name}", headers=head, content=rows.read_bytes()
    )
    assert sent.is_success, sent.text
    data = {"data": {"path": rows.name}, "eval_fraction": 0.4}
    job = {"name": "orders", "rank": 4, "steps": 2, "batch_size": 2} | data
    added = httpx.post(f"{jobs}/jobs", headers=head, json=job)
    assert added.is_success, added.text

    (job,) = served.server.jobs.every()
    deadline = time.monotonic() + 120
    while not job.progress.is_over:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (found,) = [r for r in served.state("alice")["models"] if r["name"] == "orders"]
    assert found["state"] == "finished"
    assert (found["step"], found["num_steps"], found["rank"]) == (2, 2, 4)
    # Its losses are those of its metrics; passes have weights of other sums.
    lines = httpx.get(
        f"{jobs}/jobs/orders/metrics", headers={"X-API-Key": served.keys["alice"]}
    ).json()["metrics"]
    wanted = [[x.get(key, 0) for key in ("step", "loss", "eval_loss")] for x in lines]
    points = served.state("alice")["points"][found["id"]]
    assert [one[0] for one in points] == [0, 1, 2, 2]
    for point, values in zip(points, wanted, strict=True):
        assert [x or 0 for x in point[:3]] == pytest.approx(values, rel=1e-5)
    call = SampleCall(
        version=job.adapter, prompt=(5,), num_samples=1, max_tokens=1, seed=0
    )
    served.server.hub.sample("alice", call, job.adapter).result(timeout=60)
    assert served.state("alice")["samples"][0]["model"] == "orders"
    assert not any(r["name"] == "orders" for r in served.state("bob")["models"])


def test_points_travel_once_and_all_of_them_after_a_restart(served):
    served.do("alice", "a2:train:0", CREATE, training_pass(), STEP)
    first = served.state("alice")
    query = {"after": first["cursor"], "epoch": first["epoch"]}
    assert served.state("alice", **query)["points"] == {}
    served.do("alice", "a2:train:0", training_pass(), STEP)
    assert [p[0] for p in served.state("alice", **query)["points"]["a2:train:0"]] == [2]
    other = served.state("alice", **query | {"epoch": "of another process"})
    assert [p[0] for p in other["points"]["a2:train:0"]] == [1, 2]


def test_a_model_that_was_unloaded_keeps_its_curve(served):
    served.do("alice", "a3:train:0", CREATE, training_pass(), STEP, Unload())
    rows = {row["id"]: row for row in served.state("alice")["models"]}
    assert rows["a3:train:0"]["state"] == "unloaded"
    assert rows["a3:train:0"]["step"] == 1 and rows["a3:train:0"]["loss"] > 0


def test_rates_are_those_of_the_last_seconds_and_of_each_tenant(clock):
    rates = Rates(clock)
    for _ in range(20):  # seconds
        rates.add("alice", 300)
        rates.add("bob", 100)
        clock.now += 1
    assert rates.now("bob") == 100 and rates.now(None) == 400
    assert [one.tokens_per_second for one in rates.recent("alice")] == [300] * 4
    assert [one.time - clock.now for one in rates.recent(None)] == [-15, -10, -5, 0]
    clock.now += 700
    rates.add("alice", 150)
    assert rates.now("alice") == 10 and rates.now("bob") == 0
    assert len(rates.recent("bob")) == 120  # ten minutes, and no more is kept
    assert sum(one.tokens_per_second for one in rates.recent("bob")) == 0


@pytest.mark.parametrize(
    ("path", "who", "status"),
    [
        ("/", None, 200),
        ("/page/state", None, 401),
        ("/page/state", "trainer", 403),
        ("/metrics", None, 401),
        ("/metrics", "alice", 403),
        ("/metrics", "admin", 200),
    ],
)
def test_keys_say_what_is_shown(served, path, who, status):
    assert served.get(path, who).status_code == status


def test_metrics_count_operations_and_requests(served):
    def value(name: str) -> float:
        lines = served.get("/metrics", "admin").text.splitlines()
        found = [line for line in lines if line.startswith(name)]
        assert len(found) == 1, name
        return float(found[0].rpartition(" ")[2])

    served.do("bob", "b4:train:0", CREATE, training_pass())
    before = value('jaxlora_tokens_total{pass="training",tenant="bob"}')
    served.do("bob", "b4:train:0", training_pass(), STEP)
    tokens = sum(len(datum.tokens) for datum in training_pass().data)
    after = value('jaxlora_tokens_total{pass="training",tenant="bob"}')
    assert after == before + tokens
    assert value('jaxlora_operation_seconds_count{operation="step"}') >= 1
    assert value('jaxlora_operations_total{operation="step",outcome="done"}') >= 1
    assert value("jaxlora_commit_seconds_sum") > 0
    assert value("jaxlora_microbatches_total") >= 1
    assert value('jaxlora_health{health="running"}') == 1
    labels = 'method="GET",route="/page/state",status="403"'
    served.get("/page/state", "trainer")
    before = value(f"jaxlora_requests_total{{{labels}}}")
    served.get("/page/state", "trainer")
    assert value(f"jaxlora_requests_total{{{labels}}}") == before + 1
    httpx.request("ODD", f"{served.address}/odd/{'x' * 50}")
    text = served.get("/metrics", "admin").text
    assert 'method="other",route="none"' in text and "xxx" not in text


def test_curves_go_on_after_a_restart(served, tmp_path, caplog):
    """As they were saved; rates and counts begin with the process."""
    path = tmp_path / "curves.json"
    first, second, damaged = History(path), History(path), History(path)
    first.load()
    assert not caplog.records
    first.follow(served.server.hub, served.server.jobs)
    served.do("alice", "a5:train:0", CREATE, training_pass(), STEP)
    served.do("alice", "a6:train:0", CREATE, training_pass(), Unload())
    assert not first._sums  # a model that never steps leaves nothing either
    first.save()
    second.load()
    last = second.curves.last("a5:train:0")
    assert last is not None and last == first.curves.last("a5:train:0")
    assert second.tenants == {"a5:train:0": "alice"}
    assert first.num_steps("alice") == first.num_steps(None) == 1
    assert second.num_steps("alice") == 0
    path.write_text('{"points": {"a": [["x", 1]]}}')
    damaged.load()
    assert "is damaged, so curves begin anew" in caplog.text


def test_curves_that_could_not_be_saved_are_saved_later(tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("no space left")

    history = History(tmp_path / "curves.json")
    history.curves.add("m", Point(1, loss=2.0))
    history.tenants["m"] = "alice"
    with monkeypatch.context() as patch:
        patch.setattr("jaxlora.serve.history.write_text", full)
        history.save()
    history.save()
    again = History(tmp_path / "curves.json")
    again.load()
    assert again.curves.last("m") == history.curves.last("m") is not None


# ---- in a browser --------------------------------------------------------------------


def look(tab) -> None:
    """Lets the page ask again, at once."""
    tab.clock.fast_forward(2000)


def enter(tab, key: str) -> None:
    tab.get_by_role("textbox").fill(key)
    tab.keyboard.press("Enter")


@needs_browser
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_of_a_server_moves(browser, served, size):
    one, other = f"c{size[0]}", f"d{size[0]}"
    with opened(browser, f"{served.address}/", size) as tab:
        enter(tab, served.keys["alice"])
        tab.get_by_text("serving").wait_for()
        served.do("alice", f"{one}:train:0", CREATE, training_pass(), STEP)
        served.do("bob", f"{other}:train:0", CREATE, training_pass(), STEP)
        look(tab)
        row = tab.locator("tr", has_text=f"{one}:0")
        row.wait_for()
        before = tab.evaluate(CURVE % f"{one}:train:0")
        tab.evaluate(SHIFTS.replace("true", "false"))  # from now on
        served.do("alice", f"{one}:train:0", training_pass(), STEP)
        look(tab)
        row.get_by_text("2", exact=True).wait_for()
        after = tab.evaluate(CURVE % f"{one}:train:0")
        assert before and after and before != after
        assert tab.get_by_role("heading", name="a <model> & more").is_visible()
        assert other not in tab.content() and "bob" not in tab.content()
        assert served.keys["alice"] not in tab.url + tab.content()
        assert not tab.get_by_role("heading", name="Fill").is_visible()
        # The key is this tab's alone.
        assert tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        look(tab)
        assert tab.evaluate("window.shifted || 0") < 0.1


@needs_browser
def test_a_key_that_is_not_valid_is_asked_for_again(browser, served):
    refused = ["Failed to load resource: the server responded with a status of 401"]
    with opened(browser, f"{served.address}/", expected=refused) as tab:
        enter(tab, "tml-wrong")
        tab.get_by_text("this key is not valid").wait_for()
        enter(tab, served.keys["admin"])
        tab.get_by_text("all tenants").wait_for()
        assert tab.get_by_role("heading", name="Fill").is_visible()


class Watch(Callback):
    """Looks at the page at each step of a job."""

    def __init__(self, tab):
        self.tab, self.curves = tab, []

    def on_step(self, event) -> None:
        if event.job != "first":
            return
        look(self.tab)
        self.tab.get_by_text(f"{event.step} / {event.num_steps}").wait_for()
        self.curves.append(self.tab.evaluate(CURVE % "first"))


@needs_browser
def test_the_page_of_a_run_moves_while_it_trains(browser, tmp_path):
    base = tiny.write_model(tmp_path / "base")
    jobs = [
        LoraJob(
            name=name,
            data={"path": tiny.write_records(tmp_path / f"{name}.jsonl", 12, i)},
            rank=4,
            target_modules=LINEARS,
            steps=3,
            max_length=96,
            eval_fraction=0.2,
        )
        for i, name in enumerate(("first", "second"))
    ]
    folder = tmp_path / "run"
    config = RunConfig(
        model=str(base), output_dir=str(folder), jobs=tuple(jobs), **TWO_SLOTS
    )
    address = serve_run(folder, str(base), 0)
    with opened(browser, address) as tab:
        tab.get_by_text("The run prepares").wait_for()
        watch = Watch(tab)
        with without_device():
            Trainer(config).train(callbacks=[watch])
        look(tab)
        tab.get_by_text("ended", exact=True).wait_for()
        assert len(set(watch.curves)) == 3
        # The keyboard opens a row, whose curve then stands out.
        row = tab.get_by_role("button", name="second")
        row.focus()
        tab.keyboard.press("Enter")
        assert row.get_attribute("aria-expanded") == "true"
        assert tab.locator("path.curve.chosen").first.is_visible()
        assert tab.get_by_text("Rank").is_visible()
    with opened(browser, address, PHONE) as tab:
        tab.evaluate(SHIFTS)
        tab.get_by_role("button", name="first").wait_for()
        assert tab.evaluate("window.shifted || 0") < 0.1
