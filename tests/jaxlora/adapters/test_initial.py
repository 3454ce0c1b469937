"""The weights that A and B start from, against the definitions in PEFT."""

import numpy as np
import pytest

from jaxlora import LoraJob
from jaxlora.adapters.fresh import fresh_adapter
from jaxlora.adapters.targets import resolve_targets
from jaxlora.errors import ConfigError
from tests.oracle import relative_error

K, N, RANK = 24, 40, 4
NAME = "model.layers.0.self_attn.o_proj"
W = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)


def job(start, **settings) -> LoraJob:
    values = {"name": "a", "data": {"path": "x"}, "rank": RANK, "lora_alpha": 8}
    values |= {"target_modules": ["o_proj"], "init_lora_weights": start}
    return LoraJob(**values | settings)


def weights(start, **settings):
    made = job(start, **settings)
    modules = resolve_targets(made, [NAME])
    if made.keeps_start:
        modules = {name: module.doubled(made) for name, module in modules.items()}
    adapter = fresh_adapter(made, modules, {NAME: W})
    assert adapter.scaling(adapter.modules[NAME]) == pytest.approx(2)
    return adapter.modules[NAME]


def test_gaussian():
    found = weights("gaussian")
    assert found.a.std() == pytest.approx(1 / RANK, rel=0.2) and not found.b.any()


def test_orthogonal():
    """A and B are not zero, and their product is."""
    found = weights("orthogonal")
    assert found.a.std() > 0.03 and found.b.std() > 0.03
    assert np.abs(found.a @ found.b).max() < 1e-6


def halves(found):
    """A0 and B0 of an adapter that keeps its start, which adds nothing to W."""
    a, b = found.a[:, :RANK], found.b[:RANK]
    np.testing.assert_array_equal(found.a[:, RANK:], a)
    np.testing.assert_array_equal(found.b[RANK:], -b)
    assert found.rank == 2 * RANK
    return a, b


def test_pissa_takes_the_principal_part():
    a, b = halves(weights("pissa"))
    u, s, vh = np.linalg.svd(W.astype(np.float64), full_matrices=False)
    part = (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
    assert relative_error(2 * a @ b, part) < 1e-5
    sizes = np.sqrt(s[:RANK] / 2)
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), sizes, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(b, axis=1), sizes, rtol=1e-5)
    for niter, bound in ((1, 0.3), (60, 1e-3)):
        a, b = halves(weights(f"pissa_niter_{niter}"))
        found = np.linalg.svd(2 * a @ b)[1][:RANK]
        np.testing.assert_allclose(found, s[:RANK], rtol=bound)
    assert relative_error(2 * a @ b, part) < 0.02


def test_olora_takes_a_part_of_the_qr_decomposition():
    """Of W [N, K], as Hugging Face stores it; PEFT does not divide by the scaling."""
    a, b = halves(weights("olora"))
    q, r = np.linalg.qr(W.T.astype(np.float64))
    assert relative_error(a @ b, (q[:, :RANK] @ r[:RANK]).T) < 1e-5
    assert relative_error(b @ b.T, np.eye(RANK)) < 1e-5


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_2", "olora"])
def test_a_rank_above_that_of_the_weight_keeps_all_of_it(start):
    """As one rank may be given for linears of different sizes."""
    found = weights(start, rank=K + 3, lora_alpha=2 * (K + 3))
    a, b = found.a[:, : K + 3], found.b[: K + 3]
    if start != "olora":
        assert relative_error(2 * a @ b, W) < 1e-4
    assert np.abs(found.a @ found.b).max() < 1e-4


def test_a_kept_start_has_the_scaling_of_its_rank():
    found = weights("pissa", use_rslora=True, lora_alpha=4)
    assert found.lora_alpha == pytest.approx(4 * 2**0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"start": "corda"},
            "expected true, gaussian, orthogonal, pissa, pissa_niter_N",
        ),
        ({"start": "eva"}, "expected true, gaussian"),
        ({"start": "loftq"}, "there is no LoftQ. Set init_lora_weights to pissa or"),
        ({"start": False}, "expected true, gaussian"),
        ({"start": "pissa_niter_0"}, "expected true, gaussian"),
        ({"start": "orthogonal", "rank": 3}, "needs even ranks, and there is 3"),
        (
            {"start": "orthogonal", "rank_pattern": {"o_proj": 5}},
            "needs even ranks, and there is 5",
        ),
        ({"start": "pissa", "dropout": 0.1}, "dropout and init_lora_weights=pissa can"),
        ({"start": "olora", "weight_decay": 0.1}, "the kept first weights would decay"),
        ({"start": "gaussian", "init_from": "x"}, "init_from gives the first weights"),
    ],
)
def test_starts_that_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        job(**settings)
