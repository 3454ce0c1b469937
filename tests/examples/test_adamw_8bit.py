"""The optimizer of the example is its definition, and is registered like any other."""

import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlora import register_optimizer
from jaxlora.adapters.optimizers.state import state_shapes, transformation
from jaxlora.adapters.optimizers.table import OPTIMIZERS

RATE, DECAY, STEPS = 0.02, 0.1, 4
adamw_8bit = types.SimpleNamespace(**runpy.run_path("examples/adamw_8bit.py"))
MAPS = [adamw_8bit.dynamic_map(is_signed=signed) for signed in (True, False)]


@pytest.fixture(autouse=True)
def table():
    """Names that a test registers are free again after it."""
    before = dict(OPTIMIZERS)
    yield
    OPTIMIZERS.clear()
    OPTIMIZERS.update(before)


@pytest.fixture
def registered(table):
    register_optimizer("adamw_8bit", adamw_8bit.adamw_8bit)
    return OPTIMIZERS["adamw_8bit"]


def test_the_dynamic_map_has_the_values_of_bitsandbytes():
    """The smallest, largest and middle values that its `create_dynamic_map` gives."""
    signed, unsigned = MAPS
    for values in MAPS:
        assert len(set(values.tolist())) == 256 and (np.diff(values) > 0).all()
        assert values[-1] == 1 and 0 in values
    np.testing.assert_allclose(signed[[0, 126, 128]], [-0.99296875, -5.5e-7, 5.5e-7])
    np.testing.assert_allclose(unsigned[:3], [0, 3.25e-7, 7.75e-7], rtol=1e-6)
    np.testing.assert_allclose(unsigned[-2], 1 - 0.9 / 256, rtol=1e-6)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Values as they are after quantization along the first axis, in float64."""
    out = np.zeros(values.shape)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        scale = np.abs(block).max(axis=0)
        places = np.abs(block[..., None] / scale[:, None] - table).argmin(axis=-1)
        out[start : start + 256] = table[places] * scale
    return out


@pytest.mark.parametrize("name", ["lora_a", "lora_b"])
def test_it_is_the_definition(name):
    """Adam on moments that are stored as the nearest of 256 values in each block."""
    # Blocks lie along the features.
    turn = np.transpose if name == "lora_b" else np.asarray
    rng, (mu_map, nu_map) = np.random.default_rng(0), MAPS
    params = {name: jnp.array(turn(rng.normal(size=(300, 3))), jnp.float32)}
    made = adamw_8bit.adamw_8bit(RATE, DECAY)
    state, update = made.init(params), jax.jit(made.update)
    weight = turn(np.float64(params[name]))
    mu = nu = np.zeros_like(weight)
    for step in range(STEPS):
        g = rng.normal(size=(300, 3)) * 10.0 ** rng.integers(-3, 2)
        gradient = {name: jnp.array(turn(g), jnp.float32)}
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        m, v = mu / (1 - 0.9 ** (step + 1)), nu / (1 - 0.999 ** (step + 1))
        weight = weight - RATE * (m / (np.sqrt(v) + 1e-8) + DECAY * weight)
        mu, nu = nearest(mu, mu_map), nearest(nu, nu_map)
    # A value between two codes may be rounded to either.
    is_close = np.isclose(turn(params[name]), weight, rtol=1e-4, atol=1e-5)
    assert is_close.mean() > 0.995
    codes, scales = state[0].mu_codes[name], state[0].mu_scales[name]
    assert codes.dtype == jnp.uint8
    decoded = adamw_8bit.decode(codes, scales, adamw_8bit.FEATURES[name], mu_map)
    assert np.isclose(turn(decoded), mu, rtol=1e-4).mean() > 0.995


def test_losses_are_close_to_those_of_adamw(registered):
    """On a noisy quadratic whose scales differ within a block: 1.5 % of the first."""
    rng = np.random.default_rng(0)
    scales = jnp.array(rng.lognormal(0, 1, (512, 4)), jnp.float32)
    noise = jnp.array(rng.normal(size=(150, 512, 4)), jnp.float32)

    def losses(optimizer):
        made = transformation(optimizer, 0.01)

        def step(kept, noise):
            weight, state = kept
            gradient = {"lora_a": scales * weight["lora_a"] + 0.1 * noise}
            updates, state = made.update(gradient, state, weight, rank=4)
            loss = jnp.mean(scales * weight["lora_a"] ** 2)
            return (optax.apply_updates(weight, updates), state), loss

        start = {"lora_a": jnp.ones((512, 4))}
        return jax.jit(jax.lax.scan, static_argnums=0)(
            step, (start, made.init(start)), noise
        )[1]

    exact, found = losses(OPTIMIZERS["adamw"]), losses(registered)
    assert exact[-1] < 0.1 * exact[0]
    assert 0 < jnp.abs(found - exact).max() < 0.015 * exact[0]


def test_bytes_of_state(registered):
    table = {"q.lora_a": jax.ShapeDtypeStruct((4096, 16), jnp.float32)}
    shapes = jax.tree.leaves(state_shapes([registered.name], table, axes=0))
    num_bytes = sum(np.prod(s.shape) * s.dtype.itemsize for s in shapes)
    assert num_bytes / (4096 * 16) == 2 + 8 / 256


@pytest.mark.grid
def test_it_trains_beside_adamw(clone):
    found = runpy.run_path("examples/adamw_8bit.py", run_name="__main__")["result"]
    losses = [job.progress.last_loss for job in found.jobs]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
