"""The hub runs the operations of models in their order, and keeps its promises."""

import dataclasses
import pathlib
import sqlite3
import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest
import sqlalchemy as sa

from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.errors import ConfigError, StorageError
from jaxlora.hf.load import load_model
from jaxlora.serve import engine_thread, snapshots
from jaxlora.serve.database import Database
from jaxlora.serve.hub import Hub, SeqConflict, Unavailable
from jaxlora.serve.ledger import Logged
from jaxlora.serve.operation import (
    Create,
    Done,
    Failed,
    Load,
    Pass,
    Save,
    Step,
    Unload,
    encode,
    encode_outcome,
)
from jaxlora.serve.shared import HubSettings
from jaxlora.serve.storage import Storage
from jaxlora.session.datum import ChosenLoss, Datum
from jaxlora.session.engine import Engine
from jaxlora.session.operations import begin_state_file
from jaxlora.session.samples import SampleCall, Samples
from tests import tiny
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import datums

CREATE = Create(rank=4, lora_alpha=32.0, target_modules=None, seed=0)
STEP = Step(params=AdamParams(learning_rate=1e-3))
CROSS_ENTROPY = ChosenLoss.of("cross_entropy", None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return load_model(tiny.write_model(tmp_path_factory.mktemp("hub") / "model"))


@pytest.fixture
def open_hub(tiny_model, tmp_path):
    """Opens hubs of one folder, one after the other."""
    opened = []

    def open(
        *, starts: bool = True, clock=time.monotonic, url: str = "", **settings
    ) -> Hub:
        database = Database(url or f"sqlite:///{tmp_path}/jaxlora.db")
        engine = Engine(tiny_model, SessionConfig(**SETTINGS))
        storage = Storage(tmp_path / "storage")
        hub = Hub(engine, storage, database, HubSettings(**settings), clock=clock)
        opened.append(hub)
        if starts:
            hub.start()
        return hub

    yield open
    for hub in opened:
        hub.stop()
        hub._ledger._database.close()


@pytest.fixture
def hub(open_hub):
    return open_hub()


def crash(hub: Hub) -> None:
    """Ends a hub as a crash does: it settles nothing and writes no snapshot."""
    hub._thread._end = lambda: None
    hub.stop()


def wait_for(is_so) -> None:
    """Waits until something is so; another thread makes it so."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def run(hub: Hub, *operations, model: str = "m", first: int = 1) -> list:
    """Runs operations; returns their outcomes."""
    promises = [
        hub.submit("t", model, number, one)
        for number, one in enumerate(operations, first)
    ]
    return [promise.outcome.result(timeout=60) for promise in promises]


def state(hub: Hub, model: str = "m") -> bytes:
    """The whole state of a model, whose operations are done, as a file has it."""
    path = pathlib.Path(hub._thread._shared.storage._place._root) / "state"
    begin = lambda: begin_state_file(hub.engine, hub._promises.models[model].adapter)
    if (
        hub._thread._thread.is_alive()
    ):  # which may be copying slots for a snapshot just now
        made: Future = Future()
        hub._tasks.ask(lambda: made.set_result(begin()))
        made.result(timeout=60)(path)
    else:
        begin()(path)
    found = path.read_bytes()
    path.unlink()
    return found


def training_pass(seed: int = 0) -> Pass:
    data = tuple(datums(np.random.default_rng(seed)))
    return Pass(data=data, loss=CROSS_ENTROPY, is_training=True)


def test_operations_run_in_the_order_of_their_numbers(hub, tmp_path):
    """Whose gaps hold those that came before, and a repeated one is the first."""
    late = hub.submit("t", "m", 4, Save(checkpoint="t/m/one", kind="state"))
    given = [CREATE, training_pass(), STEP]
    promises = [hub.submit("t", "m", i, one) for i, one in enumerate(given, 1)]
    assert hub.submit("t", "m", 3, STEP) is promises[2]
    assert isinstance(late.outcome.result(timeout=60), Done)
    step = promises[2].outcome.result(timeout=60)
    assert isinstance(step, Done) and step.result.step == 1
    assert (tmp_path / "storage" / "t" / "m" / "one").is_file()
    assert hub.promise("t", late.request_id) is late
    assert hub.promise("other", late.request_id) is None


def test_a_failed_operation_does_not_hold_those_after_it(hub):
    hub.submit("t", "m", 1, CREATE)
    bad = hub.submit("t", "m", 2, Save(checkpoint="t/m/one", kind="state"))
    again = hub.submit("t", "m", 3, Save(checkpoint="t/m/one", kind="adapter"))
    assert isinstance(bad.outcome.result(timeout=60), Done)
    failed = again.outcome.result(timeout=60)
    assert isinstance(failed, Failed) and "there already" in failed.message
    step = hub.submit("t", "m", 4, STEP).outcome.result(timeout=60)
    assert isinstance(step, Done)


ROUND = [training_pass(), training_pass(1), STEP]


@pytest.mark.parametrize("steps_of_a_snapshot", [1, 1000])
def test_a_crash_changes_nothing(open_hub, tmp_path, steps_of_a_snapshot):
    """Results, bits and promises are those of a hub that has not crashed."""
    forward = Pass(data=training_pass().data, loss=CROSS_ENTROPY, is_training=False)
    given = [CREATE, *ROUND, forward, *ROUND, training_pass(2)]
    hub = open_hub(snapshot_steps=steps_of_a_snapshot)
    promises = [hub.submit("t", "m", i, one) for i, one in enumerate(given, 1)]
    outcomes = [promise.outcome.result(timeout=60) for promise in promises]
    if steps_of_a_snapshot == 1:
        wait_for(lambda: hub._ledger.read().models)
    crash(hub)
    again = open_hub(snapshot_steps=1000, starts=False)
    pieces = again._ledger.read().pieces
    again.start()
    for promise, outcome in zip(promises, outcomes, strict=True):
        found = again.promise("t", promise.request_id)
        assert encode_outcome(found.outcome.result()) == encode_outcome(outcome)
        assert again.promise("other", promise.request_id) is None
    assert again.submit("t", "m", 4, STEP).request_id == promises[3].request_id
    with pytest.raises(SeqConflict, match="seq_id=4 of model m belongs to another"):
        again.submit("t", "m", 4, training_pass())
    (after,) = run(again, STEP, first=len(given) + 1)
    assert after.result.step == 3
    assert again.status().replayed_microbatches == sum(one.rows > 0 for one in pieces)
    assert (pieces[0].number > 0) == (steps_of_a_snapshot == 1)
    crash(again)
    third = open_hub(snapshot_steps=1000)
    assert [one.result.step for one in run(third, *ROUND, first=11)[2:]] == [4]


def test_an_orderly_end_leaves_nothing_to_replay(open_hub):
    hub = open_hub()
    run(hub, CREATE, *ROUND)
    wanted = state(hub)
    hub.stop()
    again = open_hub()
    (step,) = run(again, STEP, first=5)
    assert step.result.step == 2
    assert again.status().replayed_microbatches == 0
    crash(again)
    third = open_hub(starts=False)
    third.start()
    run(third, Save(checkpoint="t/m/one", kind="state"), first=6)
    assert third.status().steps == 1  # the one that was replayed
    assert state(third) != wanted


def test_what_was_accepted_and_not_done_is_done_after_the_crash(open_hub):
    hub = open_hub(starts=False)  # nothing runs
    given = [CREATE, *ROUND]
    promises = [hub.submit("t", "m", i, one) for i, one in enumerate(given, 1)]
    for promise in promises:
        promise.accepted.result(timeout=60)
    hub.stop()
    again = open_hub()
    found = [again.promise("t", one.request_id) for one in promises]
    assert found[3].outcome.result(timeout=60).result.step == 1


def test_a_second_server_does_not_start(open_hub):
    hub = open_hub()
    with pytest.raises(ConfigError, match="another server uses the database"):
        open_hub()
    hub.stop()
    open_hub()


def test_a_server_that_lost_the_database_acknowledges_nothing(open_hub):
    hub = open_hub()
    run(hub, CREATE)
    with hub._ledger._database.writing() as connection:
        connection.execute(sa.text("update hub_owner set token = 'another'"))
    late = hub.submit("t", "m", 2, STEP)
    with pytest.raises(ConfigError, match="another server has taken the database"):
        late.accepted.result(timeout=60)
    assert hub.status().health == "failed" and not hub.status().is_healthy
    assert hub.waiting("t").state == "paused_capacity"
    with pytest.raises(Unavailable, match="the server is failed"):
        hub.submit("t", "m", 3, STEP)
    assert not late.outcome.done()


@pytest.mark.parametrize("fault", ["database is away", "disk is full"])
def test_a_full_disk_delays_and_drops_nothing(hub, monkeypatch, fault):
    run(hub, CREATE, training_pass())
    engine = hub._ledger._database.engine
    is_over = threading.Event()

    def fail(connection, *_):
        if is_over.is_set():
            size = 2**30
        elif fault == "disk is full":
            size = connection.execute("PRAGMA page_count").fetchone()[0]
        else:
            raise sqlite3.OperationalError(fault)
        connection.execute(f"PRAGMA max_page_count={size}")

    sa.event.listen(engine, "checkout", fail)
    large = Pass(data=training_pass().data * 500, loss=CROSS_ENTROPY, is_training=False)
    late = hub.submit("t", "m", 3, large)
    wait_for(lambda: hub.status().health == "paused")
    assert hub.waiting("t").state == "paused_capacity"
    assert fault in hub.status().reason
    assert hub.submit("t", "m", 3, large) is late  # a retry
    with pytest.raises(Unavailable, match=fault):
        hub.submit("t", "m", 4, STEP)
    assert not late.accepted.done() and not late.outcome.done()
    is_over.set()
    assert isinstance(late.outcome.result(timeout=60), Done) and late.accepted.done()
    assert run(hub, STEP, first=4)[0].result.step == 1
    assert hub.status().health == "running" and hub.waiting("t").state == "active"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_on_postgres(open_hub, database_url):
    hub = open_hub(url=database_url, snapshot_steps=1)
    run(hub, CREATE, *ROUND)
    late = hub.submit("t", "m", 5, training_pass(2))
    late.accepted.result(timeout=60)
    with pytest.raises(ConfigError, match="another server uses the database"):
        open_hub(url=database_url)
    crash(hub)
    again = open_hub(url=database_url)
    assert again.promise("t", late.request_id).outcome.result(timeout=60)
    (step,) = run(again, STEP, first=6)
    assert step.result.step == 2


class Clock:
    """A clock that stands still until it is set forward."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_model_with_a_gap_fails(open_hub):
    clock = Clock()
    hub = open_hub(clock=clock)
    run(hub, CREATE)
    late = hub.submit("t", "m", 3, STEP)
    other = hub.submit("t", "other", 1, CREATE)
    other.outcome.result(timeout=60)
    for clock.now in (2.0, 599.0, 605.0):
        assert not late.outcome.done()
        wait_for(lambda: hub._thread._next_tick > clock.now)
    failed = late.outcome.result(timeout=60)
    assert failed.category == "user" and "operation 2 of model m" in failed.message
    for number in (2, 4):
        found = hub.submit("t", "m", number, STEP).outcome.result(timeout=60)
        assert found == failed
    assert hub.submit_last("t", "m", Unload()).outcome.result(timeout=60) == failed
    (found, _) = hub.status().models
    assert (found.pending_datums, found.pending_tokens) == (0, 0)
    crash(hub)
    again = open_hub(starts=False)
    # The failure of this one was not on disk before the crash.
    encoded = encode(STEP)
    lost = Logged(
        model="m",
        seq_id=9,
        request_id="9" * 32,
        tenant="t",
        encoded=encoded,
        digest=encoded.digest,
    )
    again._ledger.accept(lost).result()
    again.start()
    assert again.promise("t", "9" * 32).outcome.result(timeout=60) == failed
    unload = again.submit_last("t", "m", Unload())
    assert unload.outcome.result(timeout=60) == failed
    assert again.submit_last("t", "m", Unload()) is unload
    assert again.submit("t", "m", 4, STEP).outcome.result(timeout=60) == failed
    assert again.submit("t", "m", 6, STEP).outcome.result(timeout=60) == failed
    (found,) = run(again, STEP, model="other", first=2)
    assert isinstance(found, Done)


def test_outcomes_are_forgotten_after_their_time(open_hub):
    clock = Clock()
    hub = open_hub(clock=clock, keep_seconds=-10.0, snapshot_steps=1)
    promise = hub.submit("t", "m", 1, CREATE)
    run(hub, *ROUND, first=2)
    wait_for(lambda: hub._ledger.read().models)
    clock.now = 100.0
    wait_for(lambda: ("m", 1) not in hub._promises._by_number)
    hub._ledger.flush()
    assert hub.promise("t", promise.request_id) is None
    with pytest.raises(ConfigError, match="seq_id=1 of model m ended long ago"):
        hub.submit("t", "m", 1, CREATE)
    (step,) = run(hub, STEP, first=5)
    assert step.result.step == 2


def test_the_log_of_a_model_that_is_evaluated_does_not_grow(open_hub):
    clock = Clock()
    hub = open_hub(clock=clock, keep_seconds=-10.0, snapshot_steps=1)
    run(hub, CREATE, *ROUND)
    wait_for(lambda: hub._promises.models["m"].snapshot)
    evaluation = dataclasses.replace(training_pass(), is_training=False)
    for first in (5, 7):
        run(hub, evaluation, evaluation, first=first)
        clock.now += 100.0
        wait_for(lambda: not hub._ledger.read().operations)
    late = training_pass(1)  # its gradients are in no snapshot
    run(hub, late, evaluation, first=9)
    clock.now += 100.0
    wait_for(lambda: hub._thread._next_forgetting > clock.now)
    hub._ledger.flush()
    assert [one.seq_id for one in hub._ledger.read().operations] == [9, 10]
    crash(hub)
    again = open_hub()
    (step,) = run(again, STEP, first=11)
    assert step.result.step == 2 and step.result.grad_norm > 0


def test_the_log_of_a_model_that_never_steps_does_not_grow(open_hub):
    """Datums go when the result is there, and the rest after a snapshot at rest."""
    clock = Clock()
    hub = open_hub(clock=clock, keep_seconds=-10.0)
    evaluation = dataclasses.replace(training_pass(), is_training=False)
    _, wanted, _ = run(hub, CREATE, evaluation, evaluation)
    hub._ledger.flush()
    assert not any(one.encoded.data for one in hub._ledger.read().operations)
    clock.now += 100.0
    wait_for(lambda: hub._promises.models["m"].snapshot)
    clock.now += 100.0
    wait_for(lambda: not hub._ledger.read().operations)
    run(hub, training_pass(1), first=4)  # its gradients are in the next snapshot
    clock.now += 200.0
    wait_for(lambda: hub._promises.models["m"].covered_seq == 4)
    crash(hub)
    again = open_hub()
    found, step = run(again, evaluation, STEP, first=5)
    assert again.status().replayed_microbatches == 0
    for one, other in zip(found.result.logprobs, wanted.result.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    assert step.result.step == 1 and step.result.grad_norm > 0


def test_an_unloaded_model_leaves_nothing(open_hub, tmp_path):
    hub = open_hub(snapshot_steps=1)
    outcomes = run(hub, CREATE, *ROUND, Unload(), STEP)
    assert [type(one) for one in outcomes] == [*[Done] * 5, Failed]
    assert hub.status().models == ()
    run(hub, CREATE, model="other")
    crash(hub)
    again = open_hub(starts=False)
    assert again._ledger.read().pieces == ()
    again.start()
    run(again, STEP, model="other", first=2)
    assert [one.id for one in again.status().models] == ["other"]
    (failed,) = run(again, STEP, first=7)
    assert "was unloaded" in failed.message
    files = (tmp_path / "storage" / "t" / "m").rglob("*")
    assert not [path for path in files if path.is_file()]


def test_models_that_came_and_went_leave_nothing(open_hub):
    clock = Clock()
    hub = open_hub(clock=clock, keep_seconds=100.0)
    wrong = dataclasses.replace(CREATE, rank=99)
    given = {"stays": (CREATE,), "wrong": (wrong, STEP)}
    given |= {f"m{number}": (CREATE, STEP, Unload(), STEP) for number in range(20)}
    promises = [
        hub.submit("t", name, number, one)
        for name, operations in given.items()
        for number, one in enumerate(operations, 1)
    ]
    for promise in promises:
        promise.outcome.result(timeout=60)
    gap = hub.submit("t", "gap", 2, STEP)
    for clock.now in (2.0, 605.0):
        wait_for(lambda: hub._thread._next_tick > clock.now)
    assert isinstance(gap.outcome.result(timeout=60), Failed)
    clock.now = 800.0
    wait_for(lambda: [*hub._promises.models] == ["stays"])
    hub._ledger.flush()
    with hub._ledger._database.reading() as connection:
        counts = [
            connection.scalar(sa.text(f"select count(*) from {table}"))
            for table in ("operations", "pieces", "hub_models")
        ]
    assert counts == [1, 0, 0]
    assert not hub._promises._by_id and not hub.knows("m1", 1)
    assert isinstance(run(hub, CREATE, model="m1")[0], Done)


def test_a_load_outlives_its_checkpoint(open_hub):
    """Also one that fails: the model stays as it was."""
    hub = open_hub()
    save = Save(checkpoint="t/m/one", kind="state")
    run(hub, CREATE, *ROUND, save)
    load = Load(checkpoint="t/m/one", with_optimizer=True)
    loaded, step = run(hub, load, STEP, model="n")
    fresh = Load(checkpoint="t/m/one", with_optimizer=False)
    again, first = run(hub, fresh, STEP, model="n", first=3)
    assert [type(one) for one in (loaded, again)] == [Done, Done]
    assert (step.result.step, first.result.step) == (2, 1)
    hub._thread._shared.storage.delete("t/m/one")
    missing, second = run(hub, load, STEP, model="n", first=5)
    assert "there is no t/m/one" in missing.message and second.result.step == 2
    wanted = state(hub, "n")
    crash(hub)
    hub = open_hub()
    run(hub, Save(checkpoint="t/m/two", kind="state"), model="n", first=7)
    assert state(hub, "n") == wanted


def test_an_operation_whose_outcome_was_lost_is_done_after_the_crash(
    open_hub, monkeypatch
):
    """What it has changed was on disk before."""
    hub = open_hub()
    run(hub, CREATE)
    monkeypatch.setattr(hub._ledger, "finish", lambda *_: Future())
    promise = hub.submit("t", "m", 2, Unload())
    wait_for(lambda: hub._promises.models["m"].covered_seq == 2)
    crash(hub)
    found = open_hub().promise("t", promise.request_id)
    assert isinstance(found.outcome.result(timeout=60), Done)


@pytest.mark.parametrize("is_mine", [True, False])
def test_a_crash_after_a_checkpoint_was_written(open_hub, is_mine):
    """It is the operation's own if that had begun to write it."""
    hub = open_hub()
    save = Save(checkpoint="t/m/one", kind="state")
    promise = hub.submit("t", "m", 2, save)
    promise.accepted.result(timeout=60)
    with hub._thread._shared.storage.writing("t/m/one") as path:
        path.write_bytes(b"")
    if is_mine:
        hub._ledger.begin("m", 2)
    crash(hub)
    outcomes = run(open_hub(), CREATE, save)
    assert isinstance(outcomes[1], Done if is_mine else Failed)


def fails(monkeypatch, *, token: int | None = None, times: int) -> list:
    """Makes microbatches fail that have a token, or all; returns the errors."""
    queue, errors = Engine._queue_microbatch, []

    def fail(engine, run, microbatch, places, batches, rows):
        every = [call.samples[number].token_ids for _, call, number in places]
        queue(engine, run, microbatch, places, batches, rows)
        if len(errors) < times and (token is None or token in np.concatenate(every)):
            errors.append(len(places))
            raise jax.errors.JaxRuntimeError("INTERNAL: it is broken")

    monkeypatch.setattr(Engine, "_queue_microbatch", fail)
    return errors


def test_an_error_of_the_engine_changes_nothing(open_hub, monkeypatch):
    hub = open_hub(snapshot_steps=1)
    given = [CREATE, *ROUND, *ROUND, training_pass(2)]
    wanted = run(hub, *given)
    bits = state(hub)
    errors = fails(monkeypatch, times=1)
    assert isinstance(run(hub, training_pass(3), first=9)[0], Done)
    assert len(errors) == 1 and hub.status().restarts == 1
    again = run(hub, *given, model="n")
    assert list(map(encode_outcome, again)) == list(map(encode_outcome, wanted))
    assert state(hub, "n")[-1000:] == bits[-1000:]
    assert hub.status().health == "running"


def test_a_snapshot_of_the_engine_before_an_error_is_not_used(
    open_hub, monkeypatch, tmp_path
):
    """The model is brought from the earlier one to where it was."""
    hub, waiting = open_hub(snapshot_steps=1), []
    run(hub, CREATE, *ROUND)
    wait_for(lambda: hub._promises.models["m"].snapshot)
    run_elsewhere = hub._tasks.run
    monkeypatch.setattr(hub._tasks, "run", waiting.append)
    run(hub, *ROUND, first=5)
    wait_for(lambda: waiting)
    covered = hub._promises.models["m"].covered_seq
    fails(monkeypatch, times=1)
    assert isinstance(run(hub, training_pass(3), first=8)[0], Done)
    assert hub.status().restarts == 1
    monkeypatch.setattr(hub._tasks, "run", run_elsewhere)
    bits = state(hub)
    with monkeypatch.context() as patch:  # it was copied before the error
        patch.setattr(snapshots, "write_state", lambda path, *_: path.write_bytes(b""))
        waiting[0]()
    wait_for(lambda: not hub._tasks.is_busy)
    run(hub, CREATE, model="n")
    assert hub._promises.models["m"].covered_seq == covered
    crash(hub)
    again = open_hub()
    run(again, CREATE, model="k")
    assert state(again)[-1000:] == bits[-1000:]


def test_an_error_of_ours_before_a_sample_fails_the_sample_alone(hub, monkeypatch):
    monkeypatch.setattr(Samples, "submit", lambda *_: 1 / 0)
    call = SampleCall(version="base", prompt=(1,), max_tokens=1, seed=0)
    failed = hub.sample("t", call).result(timeout=60)
    assert isinstance(failed, Failed) and failed.category == "server"
    run(hub, CREATE)
    assert hub.status().restarts == 0


def test_an_operation_that_breaks_the_engine_fails_alone(open_hub, monkeypatch):
    """Others in its microbatches are done, also those of its model."""
    bad = Datum(tokens=[7, 251], target_tokens=[1, 2])
    errors = fails(monkeypatch, token=251, times=9)
    hub = open_hub()
    culprit = Pass(
        data=(*training_pass().data, bad), loss=CROSS_ENTROPY, is_training=True
    )
    given = [CREATE, training_pass(), culprit, STEP, training_pass(1), STEP]
    other = [CREATE, *ROUND, *ROUND]
    promises = [
        hub.submit("t", name, number, one)
        for number in range(1, 8)
        for name, own in {"m": given, "n": other}.items()
        for one in own[number - 1 : number]
    ]
    outcomes = {(p.model, p.seq_id): p.outcome.result(timeout=120) for p in promises}
    failed = [key for key, one in outcomes.items() if isinstance(one, Failed)]
    assert failed == [("m", 3)]
    assert outcomes["m", 3].category == "server"
    assert "failed on this operation" in outcomes["m", 3].message
    assert outcomes["m", 6].result.step == outcomes["n", 7].result.step == 2
    assert len(errors) == 3 and errors[-1] == 1
    alone = [one for i, one in enumerate(given) if i != 2]
    wanted = run(hub, *alone, model="k")
    np.testing.assert_allclose(
        outcomes["m", 4].result.grad_norm, wanted[2].result.grad_norm, rtol=1e-5
    )


def test_nothing_is_noted_of_what_a_process_has_accepted_itself(open_hub, monkeypatch):
    """Also while it was starting."""
    hub, outcomes = open_hub(starts=False), []
    read = hub._thread._read

    def read_late():
        for number, one in enumerate([CREATE, *ROUND], 1):
            promise = hub.submit("t", "m", number, one)
            promise.accepted.result(timeout=60)
            outcomes.append(promise.outcome)
        return read()

    monkeypatch.setattr(hub._thread, "_read", read_late)
    monkeypatch.setattr(hub._ledger, "attempt", lambda strikes: 1 / 0)
    hub.start()
    (step,) = run(hub, STEP, first=5)
    assert isinstance(step, Done) and hub.status().restarts == 0
    assert all(isinstance(one.result(timeout=60), Done) for one in outcomes)


@pytest.mark.parametrize("is_done", [False, True])
def test_strikes_of_earlier_processes(open_hub, is_done):
    """What is done and cannot be done again ends its model, and no other one."""
    hub = open_hub(starts=is_done)
    given = [CREATE, training_pass()]
    promises = [hub.submit("t", "m", i, one) for i, one in enumerate(given, 1)]
    for promise in promises[: 2 * is_done]:
        promise.outcome.result(timeout=60)
    hub._ledger.attempt({("m", 2, 1): 4, ("m", 2, 0): 4, ("gone", 1, 0): 4}).result()
    crash(hub)
    again = open_hub()
    (other,) = run(again, CREATE, model="n")
    assert isinstance(other, Done)
    found = again.promise("t", promises[1].request_id).outcome.result(timeout=60)
    (step,) = run(again, STEP, first=3)
    assert isinstance(found, Done) == isinstance(step, Failed) == is_done
    failed = step if is_done else found
    assert failed.category == "user" and "of it was on the device" in failed.message
    assert again.status().replayed_microbatches == 0
    again._ledger.flush()
    assert not again._ledger.read().attempts
    assert len(again._ledger.read().pieces) == (not is_done)  # that of the step


def test_what_was_on_the_device_at_a_death_runs_alone(open_hub, monkeypatch):
    """And so in each further replay, with the same bits."""
    hub = open_hub()
    run(hub, CREATE, *ROUND)
    (piece, *_) = hub._ledger.read().pieces
    key = piece.parts[0].key
    hub._ledger.attempt({key: 2}).result()
    crash(hub)
    again = open_hub()
    run(again, Save(checkpoint="t/m/one", kind="state"), first=5)
    wanted, read = state(again), again._ledger.read()
    alone = [p.key for one in read.pieces for p in one.parts if p.is_alone]
    assert alone == [p.key for p in piece.parts]  # those of its model
    assert not read.attempts
    crash(again)
    third = open_hub()
    run(third, Save(checkpoint="t/m/two", kind="state"), first=6)
    assert state(third) == wanted


def test_an_engine_that_cannot_be_made_anew_ends_the_hub(open_hub, monkeypatch):
    """And the next process goes on."""
    hub = open_hub()
    run(hub, CREATE, training_pass())
    with monkeypatch.context() as patch:
        fails(patch, times=1)
        patch.setattr(Engine, "anew", lambda engine: 1 / 0)
        late = hub.submit("t", "m", 3, training_pass(1))
        assert isinstance(hub.died.result(timeout=60), ZeroDivisionError)
    assert hub.status().health == "failed" and not late.outcome.done()
    with pytest.raises(Unavailable):
        hub.submit("t", "m", 4, STEP)
    hub.stop()
    again = open_hub()
    (step,) = run(again, STEP, first=4)
    assert step.result.step == 1
    assert isinstance(again.promise("t", late.request_id).outcome.result(), Done)


def test_an_end_while_the_database_is_away_and_the_engine_is_made_anew(
    open_hub, monkeypatch
):
    hub = open_hub()
    run(hub, CREATE)

    def fail(entries):
        raise StorageError("the database is away.")

    errors = fails(monkeypatch, times=1)
    monkeypatch.setattr(engine_thread, "END_SECONDS", 0.1)
    monkeypatch.setattr(hub._ledger, "_commit", fail)
    late = hub.submit("t", "m", 2, training_pass())
    wait_for(lambda: errors)
    ending = threading.Thread(target=hub.stop, daemon=True)
    ending.start()
    ending.join(timeout=30)
    assert not ending.is_alive()
    assert isinstance(late.accepted.exception(), StorageError)


def test_settings_that_cannot_replay_lose_nothing(open_hub, monkeypatch):
    hub = open_hub()
    run(hub, CREATE, *ROUND)
    crash(hub)
    with monkeypatch.context() as patch:
        patch.setitem(SETTINGS, "rank", 2)
        other = open_hub()
        error = other.died.result(timeout=60)
    assert "cannot be done again" in str(error) and "rank" in str(error)
    other.stop()
    (step,) = run(open_hub(), STEP, first=5)
    assert step.result.step == 2


def test_numbers(hub):
    run(hub, CREATE, *ROUND, STEP)
    hub.submit("t", "m", 9, training_pass())  # behind a gap
    hub.submit("u", "n", 1, CREATE).outcome.result(timeout=60)
    found = hub.status()
    assert (found.health, found.reason, found.is_healthy) == ("running", None, True)
    one, other = found.models
    assert (one.id, one.tenant, one.next_seq, one.steps) == ("m", "t", 6, 2)
    assert (one.pending_datums, one.pending_tokens) == (2, 11)
    assert one.loss_per_token is not None and one.tokens_per_second > 0
    assert (other.tenant, other.steps, other.loss_per_token) == ("u", 0, None)
    assert (found.tokens, found.queued_datums, found.queued_tokens) == (22, 2, 11)
    assert found.microbatches in (1, 2) and found.steps == 2
    assert 0 < found.fill <= 1 and found.microbatch_seconds > 0
    assert (found.restarts, found.replayed_microbatches) == (0, 0)
