"""Each loss is its definition in float64, also where all share one microbatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.errors import ConfigError
from jaxlora.models.stacks import to_paths
from jaxlora.models.structure import linear_path
from jaxlora.objectives.table import OBJECTIVES, find_objective
from tests.jaxlora.session.llama_float64 import logprobs
from tests.oracle import relative_error

CONFIGS = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": {"clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
}


def definition(name: str, lp, q, a) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each position and its derivative by lp, with the settings above."""
    r = np.exp(lp - q)
    if name == "cross_entropy":
        return -lp, -np.ones_like(lp)
    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "ppo":
        is_clipped = np.where(a > 0, r > 1.1, r < 0.8)
        clipped = np.clip(r, 0.8, 1.1)
        return -np.where(is_clipped, clipped, r) * a, -np.where(is_clipped, 0, r) * a
    if name == "cispo":
        clipped = np.clip(r, 0.9, 1.1)
        return -clipped * lp * a, -clipped * a
    return -(lp * a - 0.3 / 2 * (lp - q) ** 2), -(a - 0.3 * (lp - q))


@jax.jit
def exact(lora, scalings, every, slopes):
    """Log-probabilities of datums, and gradients of A and B for slopes by these."""

    def run(lora):
        return [logprobs(lora, scalings, *one) for one in every]

    found, pull_back = jax.vjp(run, lora)
    return found, pull_back(slopes)[0]


def datums(rng, lengths=(7, 4)) -> list[Datum]:
    """Free targets, weights of both signs and 0, and ratios that are clipped."""
    found = []
    for n in lengths:
        weights = rng.normal(size=n)
        weights[1] = 0.0
        tokens, targets = rng.integers(3, 250, (2, n))
        found.append(
            Datum(
                tokens=tokens,
                target_tokens=targets,
                weights=weights,
                logprobs=rng.normal(size=n) * 0.3,  # relative; see `with_logprobs`
                advantages=rng.normal(size=n),
            )
        )
    return found


def with_logprobs(session, name, data) -> list[Datum]:
    """The datums with log-probabilities near those of the adapter."""
    found = session.forward(name, data).result().logprobs
    return [
        Datum(
            tokens=d.tokens,
            target_tokens=d.target_tokens,
            weights=d.weights,
            logprobs=lp + d.logprobs,
            advantages=d.advantages,
        )
        for d, lp in zip(data, found, strict=True)
    ]


def gradients(session, name) -> dict[str, np.ndarray]:
    """The gradients of an adapter since its last step, by path."""
    engine = session._engine
    slot = engine.bring(engine.adapters[name])
    pending = engine.table.state.pending.gradients
    rows = {k: np.asarray(x)[slot] for k, x in pending.items()}
    return to_paths(engine.spec.stacks, rows)


def test_losses_and_gradients_are_those_of_float64(opened, monkeypatch):
    """Five adapters, each with a loss of its own, in one microbatch."""
    session = opened(*CONFIGS)
    rng, data = np.random.default_rng(0), {}
    for name in CONFIGS:
        data[name] = with_logprobs(session, name, datums(rng))
    monkeypatch.setattr(session._engine.queue, "_sizes", [96])
    called = count_microbatches(session, monkeypatch)
    results = {
        name: session.forward_backward(name, data[name], name, config)
        for name, config in CONFIGS.items()
    }
    results = {name: pending.result() for name, pending in results.items()}
    assert called == [96]
    for name, chosen in data.items():
        like = session._engine.begin_reading(session._engine.adapters[name])()
        lora = {
            n: (padded(w.a, (len(w.a), 8)), padded(w.b, (8, w.b.shape[1])))
            for n, w in like.modules.items()
        }
        scalings = {n: like.scaling(w) for n, w in like.modules.items()}
        every = [(d.tokens, d.target_tokens) for d in chosen]
        zeros = [np.zeros(len(d.tokens)) for d in chosen]
        with jax.enable_x64(True):
            lps, _ = exact(lora, scalings, every, zeros)
            terms = [terms_of(name, d, lp) for d, lp in zip(chosen, lps, strict=True)]
            _, wanted = exact(lora, scalings, every, [slope for _, slope in terms])
        values, slopes = map(np.concatenate, zip(*terms, strict=True))
        # Two positions have no weight, and some ratios are clipped.
        assert (2 < (slopes == 0).sum() < 8) == (name == "ppo")
        found = results[name]
        rounding = 1e-5 * np.abs(values).sum()
        assert found.loss == pytest.approx(values.sum(), abs=rounding), name
        assert found.metrics["tokens:sum"] == 9
        for own, lp in zip(found.logprobs, lps, strict=True):
            np.testing.assert_allclose(own, lp, rtol=2e-5)
        own = gradients(session, name)
        for module, pair in wanted.items():
            for tensor, gradient in zip(("lora_a", "lora_b"), pair, strict=True):
                rank = like.modules[module].rank
                given = own[f"{linear_path(module)}.{tensor}"]
                by_rank = given.T if tensor == "lora_a" else given
                assert not by_rank[rank:].any()
                of_rank = gradient.T if tensor == "lora_a" else gradient
                assert relative_error(by_rank[:rank], of_rank[:rank]) < 2e-4, name


def padded(array, shape) -> np.ndarray:
    out = np.zeros(shape)
    out[: array.shape[0], : array.shape[1]] = array
    return out


def terms_of(name: str, datum: Datum, lp) -> tuple[np.ndarray, np.ndarray]:
    """Weighted losses of a datum's positions, and their derivatives."""
    w, q, a = (
        x.astype(np.float64) for x in (datum.weights, datum.logprobs, datum.advantages)
    )
    value, slope = definition(name, np.asarray(lp), q, a)
    return w * value, w * slope


def count_microbatches(session, monkeypatch) -> list[int]:
    """Returns a list that gets the rows of each microbatch that is queued."""
    called, queue = [], session._engine._queue_microbatch

    def count(*given):
        called.append(given[-1])
        return queue(*given)

    monkeypatch.setattr(session._engine, "_queue_microbatch", count)
    return called


def test_rows_of_other_losses_do_not_reach_a_gradient():
    """Ratios that overflow in rows of another loss, or without weight."""
    objective = OBJECTIVES["datum"]
    inputs = {
        key: jnp.array(values, jnp.float32)
        for key, values in {
            "loss": [1, 2, 2, 0],
            "weight": [2.0, 0.0, -1.0, 0.0],
            "old_logprob": [-1e4, -1e4, 0.0, -1e4],
            "advantage": [1.0, 1.0, 3.0, 1.0],
            "first": [0.0] * 4,
            "second": [0.0] * 4,
        }.items()
    }
    nll = jnp.array([1.0, 1.0, 2.0, 1.0])
    gradient = jax.grad(lambda nll: objective.losses(nll, inputs, None).sum())(nll)
    # d/dlp of w exp(lp) A is itself, and lp is -nll.
    np.testing.assert_allclose(gradient, [2, 0, -3 * np.exp(-2), 0], rtol=1e-6)
    loss = objective.losses(nll, inputs, None)
    np.testing.assert_allclose(loss, [2, 0, 3 * np.exp(-2), 0], rtol=1e-6)
    assert objective.is_target(inputs).tolist() == [True, False, True, False]
    assert objective.is_read(inputs).tolist() == [True, True, True, False]


def test_jobs_cannot_have_the_objective_of_datums():
    with pytest.raises(ConfigError, match=r"one of next_token, .*distill\. One"):
        find_objective("datum")
