"""Calls of several adapters give each what it gets alone."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.errors import ConfigError, DeviceError
from jaxlora.session.session import Session
from tests.jaxlora.session.conftest import LINEARS, SETTINGS, scaled
from tests.jaxlora.session.test_losses import (
    count_microbatches,
    datums,
    gradients,
    with_logprobs,
)

RATE = 1e-2


def state(session, name) -> dict[str, np.ndarray]:
    """Weights and moments of an adapter, by kind and path."""
    engine = session._engine
    parked = engine.begin_copy(engine.adapters[name])().parked.by_kind()
    return {f"{k} {p}": x for k, own in parked.items() for p, x in own.items()}


def assert_same(found: dict, wanted: dict, *, exactly: bool = True) -> None:
    assert found.keys() == wanted.keys()
    for key, array in found.items():
        if exactly:
            np.testing.assert_array_equal(array, wanted[key], key)
        else:
            np.testing.assert_allclose(
                array, wanted[key], rtol=1e-4, atol=1e-6, err_msg=key
            )


def test_chunks_are_the_whole(opened):
    """Queued together they are the same microbatch; apart, they differ by rounding."""
    session = opened("a")
    data = datums(np.random.default_rng(1), (9, 5, 7, 3))
    whole = session.forward_backward("a", data).result()
    wanted = gradients(session, "a")
    session.optim_step("a", 0.0)
    parts = [session.forward_backward("a", data[i : i + 2]) for i in (0, 2)]
    losses = [part.result().loss for part in parts]
    assert sum(losses) == pytest.approx(whole.loss, rel=1e-12)
    assert_same(gradients(session, "a"), wanted)
    session.optim_step("a", 0.0)
    apart = [session.forward_backward("a", [one]).result() for one in data]
    for one, lp in zip(apart, whole.logprobs, strict=True):
        np.testing.assert_allclose(one.logprobs[0], lp, rtol=1e-5)
    assert_same(gradients(session, "a"), wanted, exactly=False)


def train(session, data: dict, params: dict, steps: int = 3) -> dict:
    """Takes steps of several adapters, whose datums share microbatches."""
    found = {name: [] for name in data}
    for _ in range(steps):
        for name in data:
            found[name].append(session.forward_backward(name, data[name]))
        for name in data:
            found[name].append(session.optim_step(name, **params[name]))
    return {name: [one.result() for one in own] for name, own in found.items()}


def test_adapters_together_are_as_alone(tiny_model, make_adapter, monkeypatch):
    """To the bit where datums lie in the same rows.

    The first one lies as alone. The second lies behind the first; its neighbour has
    other data of the same lengths, other settings, and diverges.
    """
    rng = np.random.default_rng(2)
    data = {name: datums(rng, (9, 5)) for name in ("a", "b", "other")}
    plain, odd = {"learning_rate": RATE}, {"learning_rate": 1e30, "weight_decay": 0.5}
    params = {"a": plain, "b": plain, "other": odd}

    def run(*names: str) -> tuple:
        session = Session(tiny_model, **SETTINGS)
        monkeypatch.setattr(session._engine.queue, "_sizes", [96])
        for seed, name in enumerate(names):
            adapter = make_adapter(LINEARS, rank=4 + 2 * seed, seed=seed)
            session._engine.open(name, scaled(adapter))
        called = count_microbatches(session, monkeypatch)
        results = train(session, {n: data[n] for n in names}, params)
        assert len(called) == 3
        return results, {name: state(session, name) for name in names}

    together, states = run("a", "b")
    alone, own = run("a")
    assert_same(states["a"], own["a"])
    for one, other in zip(together["a"], alone["a"], strict=True):
        if hasattr(one, "logprobs"):
            np.testing.assert_array_equal(one.logprobs[0], other.logprobs[0])
        else:
            assert one == other
    beside, others = run("other", "b")
    assert_same(states["b"], others["b"])
    assert [one.is_finite for one in beside["other"][1::2]] == [True, False, False]
    assert np.isnan(beside["other"][2].logprobs[0]).any()
    assert all(one.is_finite for one in beside["b"][1::2])


def test_a_step_that_is_not_finite_is_skipped(opened, caplog):
    session = opened("a", "b")
    data = datums(np.random.default_rng(3))
    session.forward_backward("a", data)
    assert session.optim_step("a", RATE).result().step == 1
    before, other = state(session, "a"), state(session, "b")
    far = [
        Datum(
            tokens=one.tokens,
            target_tokens=one.target_tokens,
            logprobs=np.full(len(one.tokens), -1e4),
            advantages=one.advantages,
        )
        for one in data
    ]
    bad = session.forward_backward("a", far, "importance_sampling").result()
    assert not np.isfinite(bad.loss) and np.isfinite(bad.logprobs[0]).all()
    with caplog.at_level(logging.WARNING):
        skipped = session.optim_step("a", RATE, weight_decay=0.1).result()
    assert (skipped.step, skipped.is_finite) == (1, False)
    assert "adapter a: an optimizer step was skipped" in caplog.text
    assert_same(state(session, "a"), before)
    assert not any(x.any() for x in gradients(session, "a").values())
    session.forward_backward("a", data)
    assert session.optim_step("a", RATE).result().step == 2
    assert_same(state(session, "b"), other)


def test_a_step_touches_no_other_adapter(opened):
    """Neither its weights, nor its moments, nor its gradients."""
    session = opened("a", "b")
    data = datums(np.random.default_rng(4))
    for name in ("a", "b"):
        session.forward_backward(name, data)
    session.optim_step("b", RATE).result()
    session.forward_backward("b", data).result()
    before, pending = state(session, "b"), gradients(session, "b")
    assert session.optim_step("a", RATE, weight_decay=0.5).result().is_finite
    assert_same(state(session, "b"), before)
    assert_same(gradients(session, "b"), pending)


def test_steps_are_those_of_adamw_in_float64(opened):
    """With decay and a clipped gradient, and settings that change from step to step."""
    session = opened("a")
    rng, moments = np.random.default_rng(5), {}
    weights = {k: x.astype(float) for k, x in state(session, "a").items()}
    weights = {k.split()[1]: x for k, x in weights.items() if k.startswith("params")}
    for number in range(1, 4):
        b1, b2, eps, decay, rate = 0.8, 0.9, 1e-6, 0.1 * number, RATE / number
        session.forward_backward("a", datums(rng)).result()
        grads = {
            path: gradients(session, "a")[path][: x.shape[0], : x.shape[1]].astype(
                float
            )
            for path, x in weights.items()
        }
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        most = norm / 2 if number == 2 else 0.0
        found = session.optim_step(
            "a",
            rate,
            betas=(b1, b2),
            eps=eps,
            lora_plus_ratio=number,
            weight_decay=decay,
            grad_clip_norm=most,
        ).result()
        assert found.grad_norm == pytest.approx(norm, rel=1e-5)
        for path, g in grads.items():
            g = g * (most / norm if most else 1.0)
            m, v = moments.get(path, (0.0, 0.0))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            moments[path] = m, v
            root = np.sqrt(v / (1 - b2**number)) + eps
            update = m / (1 - b1**number) / root + decay * weights[path]
            ratio = number if path.endswith("lora_b") else 1
            weights[path] = weights[path] - rate * ratio * update
    for path, wanted in weights.items():
        found = state(session, "a")[f"params {path}"]
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-5)


def test_weights_scale_gradients(opened):
    """Twice the weights give twice the gradient; the negative ones cancel it."""
    session = opened("a")
    data = datums(np.random.default_rng(6))
    norms = []
    for factor in (1.0, 2.0, -0.5):
        scaled = [one.with_weights(factor * one.weights) for one in data]
        session.forward_backward("a", scaled)
        norms.append(session.optim_step("a", 0.0).result().grad_norm)
    assert norms[1] == 2 * norms[0] and norms[2] == norms[0] / 2
    for factor in (1.0, -1.0):
        scaled = [one.with_weights(factor * one.weights) for one in data]
        session.forward_backward("a", scaled)
    assert session.optim_step("a", 0.0).result().grad_norm < 1e-5 * norms[0]


def test_log_probabilities_of_positions_without_weight(opened):
    """They are those of positions that count, and have no gradient."""
    session = opened("a")
    data = datums(np.random.default_rng(7))
    wanted = session.forward("a", [d.with_weights(None) for d in data]).result()
    for training in (True, False):
        run = session.forward_backward if training else session.forward
        found = run("a", [d.with_weights(0 * d.weights) for d in data]).result()
        for lp, other in zip(found.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(lp, other, rtol=1e-5)
        assert found.metrics == {"loss:sum": 0.0, "tokens:sum": 0.0}
    assert session.optim_step("a", RATE).result().grad_norm == 0


def test_a_loss_of_your_own(opened):
    """It has the value and the gradient of the same loss here, and metrics."""
    session = opened("a")
    data = with_logprobs(session, "a", datums(np.random.default_rng(8)))

    def ppo(data, logprobs):
        total = 0.0
        for one, lp in zip(data, logprobs, strict=True):
            r = jnp.exp(lp - one.logprobs)
            a = one.advantages
            each = -jnp.minimum(r * a, jnp.clip(r, 0.8, 1.2) * a)
            total += (one.weights * each).sum()
        return total, {"largest:max": max(lp.max() for lp in logprobs)}

    wanted = session.forward_backward("a", data, "ppo").result()
    exact = gradients(session, "a")
    session.optim_step("a", 0.0)
    found = session.forward_backward_custom("a", data, ppo).result()
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.metrics["largest:max"] == max(x.max() for x in wanted.logprobs)
    assert_same(gradients(session, "a"), exact, exactly=False)


def test_calls_run_in_the_order_of_their_adapter(opened):
    """A pass sees the steps before it, and none after it, whenever it is asked for."""
    session = opened("a")
    data = datums(np.random.default_rng(9))
    before = session.forward("a", data)
    session.forward_backward("a", data)
    step = session.optim_step("a", RATE)
    after = session.forward("a", data)
    assert not step.is_done and after.result().loss != before.result().loss
    assert before.is_done and step.is_done
    again = session.forward("a", data).result()
    np.testing.assert_array_equal(again.logprobs[0], after.result().logprobs[0])


def test_the_base(opened, session):
    """Its log-probabilities are those of a fresh adapter, and not of another one."""
    session, data = opened("a"), datums(np.random.default_rng(11))
    session.add_adapter("fresh")
    base, own, fresh = (session.forward(name, data) for name in ("base", "a", "fresh"))
    for lp, other, same in zip(
        base.result().logprobs,
        own.result().logprobs,
        fresh.result().logprobs,
        strict=True,
    ):
        np.testing.assert_allclose(lp, same, rtol=1e-6)
        assert not np.allclose(lp, other, rtol=1e-3)
    options = {"max_new_tokens": 4, "temperature": 1.0}
    found = [session.sample(n, [[3, 4]], **options) for n in ("base", "fresh")]
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="no adapter 'base'"):
        session.forward_backward("base", data)


def test_nothing_is_compiled_again(opened, tmp_path):
    """Neither for other adapters, ranks, lengths or settings, nor by loading."""
    session, rng = opened("a"), np.random.default_rng(13)
    engine = session._engine

    def count() -> int:
        return engine._programs.num_compilations()

    def use(name: str, lengths, rate: float) -> None:
        data = with_logprobs(session, name, datums(rng, lengths))
        session.forward_backward(name, data, "ppo", {"clip_low_threshold": rate})
        session.optim_step(name, rate, weight_decay=rate, grad_clip_norm=rate)
        session.save_state(name, tmp_path / "a.safetensors")

    use("a", (60, 9), 0.1)
    use("a", (5,), 0.1)
    session.load("b", tmp_path / "a.safetensors")
    session.remove("a")
    before = count()
    session.add_adapter("c", rank=3, target_modules=["q_proj"])
    session.load("d", tmp_path / "a.safetensors")
    for name, lengths in {"b": (7, 3, 2), "c": (80,), "d": (6, 6)}.items():
        use(name, lengths, 0.2)
    assert count() == before


def test_work_that_breaks_off_is_repeated(opened, monkeypatch):
    """Each datum counts once, and the step behind it sees all of them."""
    session, data = opened("a", "b"), datums(np.random.default_rng(12))
    wanted = [session.forward_backward("a", data), session.optim_step("a", 0.0)]
    wanted = [call.result() for call in wanted]
    calls = [session.forward_backward("a", data), session.optim_step("a", RATE)]
    waits = session.optim_step("b", RATE)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._engine._programs, "accumulate", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                calls[1].result()
    with monkeypatch.context() as patch:
        patch.setattr(session._engine._programs, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls[1].result()
    found = [call.result() for call in calls]
    assert found[0].loss == wanted[0].loss
    assert found[1].grad_norm == wanted[1].grad_norm and found[1].step == 2
    assert waits.result().step == 1


def test_a_step_counts_once_if_its_result_is_read_twice(opened, monkeypatch):
    session = opened("a")
    session.forward_backward("a", datums(np.random.default_rng(12))).result()
    step = session.optim_step("a", RATE)

    class Interrupted(type(session._engine._in_flight)):
        def popleft(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._engine, "_in_flight", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            step.result()
        left = list(session._engine._in_flight)
    session._engine._in_flight.extend(left)
    assert step.result().step == 1
    assert session.optim_step("a", RATE).result().step == 2


def test_a_session_whose_slots_are_lost_says_so(opened, monkeypatch, tmp_path):
    """A program that has taken the slots, and failed, leaves none to go on with."""
    session, data = opened("a", "b"), datums(np.random.default_rng(12))
    steps = session._engine._programs
    accumulate = steps.accumulate

    def fail(*args):
        accumulate(*args)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    done = session.forward_backward("a", data)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "accumulate", fail)
        with pytest.raises(DeviceError, match="RESOURCE_EXHAUSTED: out of memory"):
            done.result()
    for call in (
        done.result,
        lambda: session.save("b", tmp_path / "b"),
        lambda: session.sample("b", [[1]], max_new_tokens=1),
        session.optim_step("b", RATE).result,
    ):
        with pytest.raises(DeviceError, match="this session cannot go on"):
            call()


def test_a_microbatch_has_the_smallest_size_that_holds_it(opened, monkeypatch):
    session = opened("a", "b")
    called = count_microbatches(session, monkeypatch)
    short, long = (datums(np.random.default_rng(10), (n,)) for n in (5, 60))
    session.forward("a", short).result()
    session.forward("a", long)
    session.forward("b", short)
    session.forward_backward("b", short)
    session.forward_backward("b", long).result()
    assert called == [32, 96, 96]


def test_a_layout_gives_the_same_bits_again(tiny_model, make_adapter):
    """Also where the rows of another adapter stay empty, and in other slots."""
    rng = np.random.default_rng(14)
    data = {name: datums(rng, (20, 5)) for name in "abc"}

    def new(names: str) -> tuple[Session, list, list]:
        session, queued, settled = Session(tiny_model, **SETTINGS), [], []
        for name in names:
            adapter = make_adapter(LINEARS, rank=4, seed=ord(name))
            session._engine.open(name, scaled(adapter))
        session._engine.on_queued = queued.append
        session._engine.on_settled = settled.append
        return session, queued, settled

    first, queued, settled = new("abc")
    calls = {n: first.forward_backward(n, own) for n, own in data.items()}
    found = {n: call.result() for n, call in calls.items()}
    (piece,), exact = queued, {n: gradients(first, n) for n in data}
    assert settled == queued and not first._engine.unsettled
    assert (piece.rows, len(piece.parts), piece.is_training) == (96, 6, True)
    assert first.optim_step("c", RATE).result().step == 1
    assert queued[1].rows == 0 and queued == settled

    again, queued, _ = new("ca")
    calls = {n: again.forward_backward(n, data[n])._call for n in "ca"}
    engine = again._engine
    layout = []
    for name, number in [(n, i) for n in "abc" for i in range(2)]:
        if name == "b":
            layout.append((name, len(data[name][number].tokens)))
        else:
            layout.append((engine.adapters[name], calls[name], number))
    engine.run_layout(96, layout)
    engine.drain()
    assert [one.rows for one in queued] == [96]
    for name in "ca":
        assert not engine.adapters[name].calls
        assert_same(gradients(again, name), exact[name])
        for lp, wanted in zip(
            calls[name].result.logprobs, found[name].logprobs, strict=True
        ):
            np.testing.assert_array_equal(lp, wanted)
    call = again.optim_step("c", RATE)._call
    engine.run_step(engine.adapters["c"])
    engine.drain()
    assert call.result.step == 1
    assert_same(state(again, "c"), state(first, "c"))


def test_many_steps_in_a_row_do_not_hold_up_others(opened):
    session, data = opened("a", "b"), datums(np.random.default_rng(1))
    rows = []
    session._engine.on_queued = lambda piece: rows.append(piece.rows)
    steps = [session.optim_step("a", RATE) for _ in range(5)]
    session.forward_backward("b", data)
    assert [one.result().step for one in steps] == [1, 2, 3, 4, 5]
    assert rows == [0, 32, 0, 0, 0, 0]


def test_the_device_is_one_microbatch_ahead(opened):
    """So a new call waits for two at most."""
    session, ahead = opened("a"), []
    engine = session._engine

    def note(piece) -> None:
        ahead.append(sum(one.rows > 0 for one in engine.unsettled))

    engine.on_queued = note
    data = datums(np.random.default_rng(15), (60,) * 5)
    session.forward_backward("a", data)
    session.optim_step("a", RATE).result()
    assert ahead == [1, 2, 2, 2, 2, 1]
