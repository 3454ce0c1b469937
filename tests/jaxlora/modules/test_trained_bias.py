"""Trained biases in slots of `MultiLoraLinear`, against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlora import MultiLoraLinear, Routing, SlotShape
from jaxlora.modules.trained_tensors import TRAINED_BIAS
from tests.oracle import relative_error

K, N, R, BLOCK = 12, 20, 4, 8
BLOCKS = np.array([1, 0, -1, 1, 2])
SLOTS = SlotShape(num_slots=3, rank=R, settings=("train_bias",))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def layer_with(*slots: int) -> MultiLoraLinear:
    """Slot 1 alone trains its bias, which is zero; the frozen bias is not."""
    layer = MultiLoraLinear(
        K, N, slots=SLOTS, use_bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    layer.bias[...] = jnp.asarray(draw(N))
    for slot in slots:
        lora = draw(K, R) + slot, draw(R, N) - slot
        bias = np.zeros(N, np.float32)
        layer.load_slot(slot, *lora, bias, scaling=0.5, trains_bias=slot == 1)
    return layer


def test_output_and_gradients_are_those_of_the_definition():
    layer = layer_with(0, 1)
    x, dy = jnp.asarray(draw(len(BLOCKS) * BLOCK, K)), draw(len(BLOCKS) * BLOCK, N)
    graph, tables, rest = nnx.split(layer, nnx.LoRAParam, ...)
    routing = Routing(block_adapter=jnp.array(BLOCKS))

    def loss(tables, x):
        y = nnx.merge(graph, tables, rest)(x, routing)
        return (y * dy).sum(), y

    (found, dx), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(tables, x)
    rows = np.repeat(BLOCKS, BLOCK)
    for slot in (0, 1, 2):
        here = rows == slot
        wanted = x[here] @ layer.kernel[...]
        wanted += 0.5 * x[here] @ layer.lora_a[slot] @ layer.lora_b[slot] * (slot < 2)
        bias = jnp.zeros(N) if slot == 1 else layer.bias[...]
        assert relative_error(y[here], wanted + bias) < 1e-5
    assert not y[rows == -1].any() and not dx[rows == -1].any()
    of_bias = found[TRAINED_BIAS.name]
    assert relative_error(of_bias[1], dy[rows == 1].sum(axis=0)) < 1e-6
    assert not of_bias[0].any() and not of_bias[2].any()


def test_slots_without_have_the_bits_of_a_layer_without():
    plain = MultiLoraLinear(
        K,
        N,
        slots=SlotShape(num_slots=3, rank=R),
        use_bias=True,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    plain.bias[...] = jnp.asarray(draw(N))
    plain.load_slot(0, draw(K, R), draw(R, N), scaling=0.5)
    layer, x = layer_with(0, 1), jnp.asarray(draw(2 * BLOCK, K))
    table = getattr(layer, TRAINED_BIAS.name)
    table[...] = table[...].at[1].set(jnp.nan)
    beside = layer(x, Routing(block_adapter=jnp.array([0, 1])))
    alone = plain(x[:BLOCK], Routing(block_adapter=jnp.array([0])))
    np.testing.assert_array_equal(beside[:BLOCK], alone)
    assert np.isnan(beside[BLOCK:]).all()


def test_a_linear_without_a_bias_has_no_table():
    layer = MultiLoraLinear(K, N, slots=SLOTS, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert not hasattr(layer, TRAINED_BIAS.name)
    layer.load_slot(1, draw(K, R), draw(R, N), scaling=0.5, trains_bias=True)
    layer(jnp.asarray(draw(BLOCK, K)), Routing(block_adapter=jnp.array([1])))
