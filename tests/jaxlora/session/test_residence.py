"""Adapters beyond the slots wait on the host, or in files, and lose no bit."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.config.session_config import AdamParams, SessionConfig
from jaxlora.errors import DeviceError
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.engine import Engine, StepCall
from jaxlora.session.operations import pass_call
from jaxlora.session.session import Session
from tests.jaxlora.session.conftest import LINEARS, SETTINGS, scaled
from tests.jaxlora.session.test_engine import RATE, assert_same, state
from tests.jaxlora.session.test_losses import datums, gradients


def new(tiny_model, make_adapter, names, **room) -> Session:
    """A session of five slots with adapters of different ranks."""
    session = Session(tiny_model, **SETTINGS)
    if room:
        session._engine = Engine(tiny_model, SessionConfig(**SETTINGS), **room)
    for seed, name in enumerate(names):
        adapter = make_adapter(LINEARS, rank=4 + 2 * (seed % 3), seed=seed)
        session._engine.open(name, scaled(adapter))
    return session


def train(session, names, steps=3) -> None:
    """Each adapter runs alone, so its rows lie as if there were no other."""
    for number in range(steps):
        for name in names:
            data = datums(np.random.default_rng([ord(name), number]))
            session.forward_backward(name, data).result()
        for name in names:
            session.optim_step(name, RATE, weight_decay=0.1).result()


def test_parked_adapters_train_in_the_same_bits(tiny_model, make_adapter, tmp_path):
    """With gradients that wait for a step, in any slot, and from a file."""
    names = "abcdefgh"
    few = new(tiny_model, make_adapter, names[:5])
    train(few, names[:5], 2)
    wanted = {name: state(few, name) for name in names[:5]}
    for room in ({}, {"host_bytes": 1, "folder": tmp_path / "cold"}):
        many = new(tiny_model, make_adapter, names, **room)
        train(many, names, 2)
        residence = many._engine._residence
        assert residence.num_moves == 20
        for name in names[:5]:
            assert_same(state(many, name), wanted[name])
        if room:
            assert len([*(tmp_path / "cold").iterdir()]) == 3
            for name in names:
                many.remove(name)
            assert not [*(tmp_path / "cold").iterdir()]


def test_gradients_go_with_a_parked_adapter(opened):
    session, data = opened("a", "b"), datums(np.random.default_rng(1))
    engine = session._engine
    for name in "ab":
        session.forward_backward(name, data).result()
    exact, other = gradients(session, "a"), gradients(session, "b")
    one, slot = engine.adapters["a"], engine.adapters["a"].slot
    engine.park(one)
    assert one.slot is None
    session.add_adapter("c")
    assert engine.adapters["c"].slot is not None
    assert engine.begin_copy(one)().gradients is not None
    assert_same(gradients(session, "a"), exact)
    assert one.slot != slot
    assert_same(gradients(session, "b"), other)


def test_what_is_not_finite_stays_with_its_owner(opened):
    """Also after it has left its slot to another adapter."""
    session, data = opened("a", "b"), datums(np.random.default_rng(2))
    engine = session._engine
    far = [
        Datum(
            tokens=d.tokens,
            target_tokens=d.target_tokens,
            logprobs=np.full(len(d.tokens), -1e4),
            advantages=d.advantages,
        )
        for d in data
    ]
    session.forward_backward("a", far, "importance_sampling").result()
    engine.park(engine.adapters["a"])
    engine.park(engine.adapters["b"])
    session.forward_backward("b", data).result()  # in the slot that a has left
    assert session.optim_step("b", RATE).result().is_finite
    assert not session.optim_step("a", RATE).result().is_finite
    session.forward_backward("a", data)
    assert session.optim_step("a", RATE).result().is_finite


def test_a_loss_that_was_not_finite_is_known_when_the_adapter_is_back(opened):
    """Though its gradients are."""
    session, data = opened("a", "b"), datums(np.random.default_rng(7))
    engine = session._engine
    session.forward_backward("a", data).result()
    one, state = engine.adapters["a"], engine.table.state
    is_finite = state.pending.is_finite.at[one.slot].set(False)
    pending = dataclasses.replace(state.pending, is_finite=is_finite)
    engine.table.state = dataclasses.replace(state, pending=pending)
    engine.park(one)
    session.forward_backward("b", data).result()
    assert not session.optim_step("a", RATE).result().is_finite
    assert session.optim_step("b", RATE).result().is_finite


def test_parked_adapters_can_be_read(opened, tmp_path):
    session, data = opened("a", "b"), datums(np.random.default_rng(3))
    session.forward_backward("a", data)
    session.optim_step("a", RATE).result()
    found = []
    for number in range(2):
        if number:
            session._engine.park(session._engine.adapters["a"])
        session.save("a", tmp_path / f"folder{number}")
        session.save_state("a", tmp_path / f"{number}.safetensors")
        assert (session._engine.adapters["a"].slot is None) == bool(number)
        found.append(session.sample("a", [[3, 4]], max_new_tokens=4, end_tokens=[]))
    assert found[0] == found[1]
    first, second = ((tmp_path / f"{i}.safetensors").read_bytes() for i in (0, 1))
    assert first == second
    name = "adapter_model.safetensors"
    first, second = ((tmp_path / f"folder{i}" / name).read_bytes() for i in (0, 1))
    assert first == second


def test_a_fresh_adapter_without_a_slot_can_be_read(session, tmp_path):
    for name in "abcdef":
        session.add_adapter(name, rank=2)
    assert session._engine.adapters["f"].slot is None
    session.save("f", tmp_path / "f")
    session.save_state("f", tmp_path / "f.safetensors")
    assert session._engine.adapters["f"].slot is None
    session.load("again", tmp_path / "f.safetensors")
    session.load("peft", tmp_path / "f")
    for name in ("again", "peft"):
        assert session.optim_step(name, RATE).result().grad_norm == 0
        assert_same(state(session, name), state(session, "f"))


def test_adapters_that_never_had_a_slot_go_to_files(tiny_model, make_adapter, tmp_path):
    """Fresh ones and those with a saved state, and they continue with the same bits."""
    names, folder = "abcdefgh", tmp_path / "cold"
    plain = new(tiny_model, make_adapter, names)
    train(plain, "f", 1)
    data = datums(np.random.default_rng(9))
    plain.forward_backward("f", data).result()
    plain.save_state("f", tmp_path / "f.safetensors")
    bounded = new(tiny_model, make_adapter, names, host_bytes=1, folder=folder)
    bounded.load("saved", tmp_path / "f.safetensors")
    adapters = bounded._engine.adapters
    assert [adapters[name].place for name in (*"fgh", "saved")] == ["file"] * 4
    plain.load("saved", tmp_path / "f.safetensors")
    for name in ("g", "saved"):
        assert_same(state(bounded, name), state(plain, name))
    for session in (plain, bounded):
        train(session, "g", 1)
        session.optim_step("saved", RATE).result()
    for name in ("g", "h", "saved"):
        assert_same(state(bounded, name), state(plain, name))


def test_an_adapter_that_cannot_be_written_stays_in_memory(
    tiny_model, make_adapter, tmp_path, monkeypatch, caplog
):
    def full(_, path):
        path.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    room = {"host_bytes": 1, "folder": tmp_path / "cold"}
    session = new(tiny_model, make_adapter, "ab", **room)
    train(session, "a", 1)
    engine, wanted = session._engine, state(session, "a")
    engine.park(engine.adapters["a"])
    assert_same(state(session, "a"), wanted)
    assert not [*room["folder"].iterdir()]  # a part would keep the disk full
    assert session.optim_step("a", RATE).result().step == 2
    assert "stays in memory" in caplog.text
    session.remove("a")


def test_the_least_recently_used_leave_and_those_that_wait_stay(opened):
    session, data = opened(*"abcde"), datums(np.random.default_rng(4))
    engine = session._engine
    engine._residence._min_stay = 0
    session.forward("a", data).result()
    session.add_adapter("f", rank=2)
    waiting = session.forward_backward("c", data)
    session.forward("f", data).result()  # b was used least recently
    away = {name for name, one in engine.adapters.items() if one.slot is None}
    assert away == {"b"} and waiting.is_done


def test_500_adapters_on_five_slots(tiny_model, make_adapter):
    """All make progress, and each of two tenants has half of it at any time."""
    engine = Engine(tiny_model, SessionConfig(**SETTINGS))
    adapter = scaled(make_adapter(("q_proj",), rank=2, seed=0))
    data = datums(np.random.default_rng(5), (9,))
    done, loss = [], ChosenLoss.of("cross_entropy", None)
    for number in range(500):
        tenant = "few" if number < 100 else "many"
        one = engine.open(f"a{number}", adapter, tenant=tenant)
        if number % 2:
            continue  # it is registered, and sends nothing
        engine.submit(one, pass_call(engine, data, loss, is_training=True))
        note = lambda result, tenant=tenant: done.append((tenant, result))
        params = AdamParams(learning_rate=RATE)
        engine.submit(one, StepCall(params=params, on_result=note))
    while engine.advance():
        pass
    assert len(done) == 250 and all(result.step == 1 for _, result in done)
    first = [tenant for tenant, _ in done[:90]]
    assert abs(first.count("few") - 45) <= 6
    assert 240 <= engine._residence.num_moves <= 260


def test_a_tenant_has_no_more_slots_than_it_may(tiny_model, make_adapter):
    """Its own adapters leave for each other, though there are free slots."""
    most = {"few": 2, "many": None}
    engine = Engine(tiny_model, SessionConfig(**SETTINGS), slots_of=most.__getitem__)
    adapter = scaled(make_adapter(LINEARS, rank=2, seed=0))
    data, loss = datums(np.random.default_rng(6)), ChosenLoss.of("cross_entropy", None)
    every = [engine.open(f"few{i}", adapter, tenant="few") for i in range(4)]
    other = engine.open("other", adapter, tenant="many")
    for one in every:
        engine.submit(one, pass_call(engine, data, loss, is_training=True))
    for one in every:
        engine.finish(one)
        here = [one for one in every if one.slot is not None]
        assert len(here) == 2 and other.slot is not None
    assert all(one.has_gradients for one in every)


def test_a_microbatch_runs_again_with_more_adapters_than_a_quota_has(
    tiny_model, make_adapter
):
    """The quota was larger when it was logged."""
    engine = Engine(tiny_model, SessionConfig(**SETTINGS), slots_of=lambda tenant: 1)
    adapter = scaled(make_adapter(("q_proj",), rank=2, seed=0))
    data, loss = (
        datums(np.random.default_rng(8), (9,)),
        ChosenLoss.of("cross_entropy", None),
    )
    places, others = [], [engine.open(f"c{i}", adapter, tenant=f"{i}") for i in "123"]
    for name in "ab":
        one = engine.open(name, adapter, tenant="few")
        call = pass_call(engine, data, loss, is_training=True)
        engine.submit(one, call)
        places.append((one, call, 0))
    engine.run_layout(32, places)
    engine.drain()
    assert all(one.slot is not None for one, *_ in places)
    assert all(one.slot is not None for one in others)  # there was a free slot


def test_an_engine_made_anew_takes_the_place_of_the_old_one(
    tiny_model, make_adapter, tmp_path
):
    """Its slots have the memory of the old ones, and its files have other names."""
    room = {"host_bytes": 1, "folder": tmp_path / "cold"}
    session = new(tiny_model, make_adapter, "ab", **room)
    train(session, "ab", 1)
    old = session._engine
    old.park(old.adapters["a"])
    late = old.adapters["a"].away
    late.written.result()
    session._engine = old.anew()
    assert all(x.is_deleted() for x in jax.tree.leaves(old.table.state))
    with pytest.raises(DeviceError, match="cannot go on"):
        old.advance()
    session._engine.open("a", scaled(make_adapter(LINEARS, rank=4, seed=5)))
    train(session, "a", 1)
    wanted, one = state(session, "a"), session._engine.adapters["a"]
    session._engine.park(one)
    one.away.written.result()
    late.path.write_bytes(b"the old engine was still writing")
    assert_same(state(session, "a"), wanted)
