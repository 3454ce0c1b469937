"""`MultiLoraLinear` on its own, in somebody's Flax model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlora import MultiLoraLinear, Routing, SlotShape
from tests import drawn
from tests.oracle import relative_error
from tests.pallas_kernels.quantized.weights import dequantized, quantized

K, N, BLOCK = 12, 20, 8
SLOTS = SlotShape(num_slots=3, rank=6)


def layer_with(*slots: int, use_bias: bool = False) -> MultiLoraLinear:
    layer = MultiLoraLinear(
        K, N, slots=SLOTS, use_bias=use_bias, dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    for slot in slots:
        a, b = adapter(slot)
        layer.load_slot(slot, a, b, scaling=0.5 + slot, dropout=0.25 * slot)
    return layer


def adapter(slot: int):
    rng = np.random.default_rng(slot)
    rank = (6, 2, 3)[slot]
    a, b = rng.normal(size=(K, rank)), rng.normal(size=(rank, N))
    return a.astype(np.float32), b.astype(np.float32)


def rows(count: int) -> jax.Array:
    return drawn.normal(1, (count * BLOCK, K))


@jax.jit
def run(layer: MultiLoraLinear, x: jax.Array, routing: Routing) -> jax.Array:
    return layer(x, routing)


def test_each_block_goes_through_its_own_adapter():
    layer = layer_with(0, 1, 2, use_bias=True)
    layer.bias[...] = jnp.arange(N, dtype=jnp.float32)
    blocks = (1, 2, -1, 0, 1)
    x = np.asarray(rows(len(blocks)))
    y = np.asarray(run(layer, x, Routing(block_adapter=jnp.array(blocks))))
    kernel, bias = (np.asarray(p[...]) for p in (layer.kernel, layer.bias))
    for i, slot in enumerate(blocks):
        here = slice(i * BLOCK, (i + 1) * BLOCK)
        wanted = np.zeros((BLOCK, N))
        if slot >= 0:
            a, b = adapter(slot)
            wanted = x[here] @ kernel + bias + (0.5 + slot) * x[here] @ a @ b
        assert relative_error(y[here], wanted) < 1e-5


def test_empty_and_inactive_slots_are_the_base_layer():
    layer = layer_with(1)
    base = layer.kernel[...]
    x = rows(2)
    np.testing.assert_array_equal(
        run(layer, x, Routing(block_adapter=jnp.array([0, 2]))), x @ base
    )
    layer.rank[...] = jnp.zeros(3, jnp.int32)
    np.testing.assert_array_equal(
        run(layer, x, Routing(block_adapter=jnp.array([1, 1]))), x @ base
    )


def test_dropout_is_keyed_by_seed_step_layer_and_projection():
    layer = layer_with(1)
    x, blocks = rows(2), jnp.array([1, 1])

    def output(seed=0, step=0, layer=layer):
        routing = Routing(
            block_adapter=blocks,
            token_index=jnp.arange(2 * BLOCK),
            seed=jnp.asarray(np.full(3, seed)),
            step=jnp.asarray(np.full(3, step)),
        )
        return np.asarray(run(layer, x, routing))

    np.testing.assert_array_equal(output(), output())
    other = layer_with(1)
    other.projection = 1
    deeper = layer_with(1)
    deeper.layer = 1
    others = {"seed": 1}, {"step": 1}, {"layer": other}, {"layer": deeper}
    masks = [output(), *(output(**changed) for changed in others)]
    for i, one in enumerate(masks):
        for two in masks[:i]:
            assert (one != two).any()


def test_trains_in_a_users_own_flax_model():
    """Only the adapters train, each on its own rows (docs/howto/own_flax_model.md)."""

    class Regressor(nnx.Module):
        def __init__(self, rngs):
            self.hidden = MultiLoraLinear(K, N, slots=SLOTS, rngs=rngs)
            self.out = nnx.Linear(N, 1, rngs=rngs)

        def __call__(self, x, routing):
            return self.out(jax.nn.relu(self.hidden(x, routing)))[:, 0]

    model = Regressor(nnx.Rngs(0))
    a = np.asarray(drawn.normal(5, (K, 4))) * K**-0.5
    model.hidden.load_slot(0, a, np.zeros((4, N), np.float32), scaling=2.0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    frozen = [np.array(p) for p in (model.hidden.kernel[...], model.out.kernel[...])]
    routing = Routing(block_adapter=jnp.array([0, 0]))
    x = drawn.normal(1, (2 * BLOCK, K), jnp.bfloat16)
    target = jnp.sin(jnp.arange(2 * BLOCK))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(x, routing) - target) ** 2)

        value, gradients = nnx.value_and_grad(
            loss, argnums=nnx.DiffState(0, nnx.LoRAParam)
        )(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    for before, now in zip(
        frozen, (model.hidden.kernel[...], model.out.kernel[...]), strict=True
    ):
        np.testing.assert_array_equal(before, np.asarray(now))
    assert not model.hidden.lora_b[...][1:].any(), "an empty slot was trained"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, np.zeros((K, 2)), np.zeros((2, N))), "slot 3 is not one of the 3 slots"),
        ((0, np.zeros((K, 7)), np.zeros((7, N))), "share a rank of at most 6"),
        ((0, np.zeros((K, 2)), np.zeros((3, N))), "share a rank of at most 6"),
    ],
)
def test_says_what_does_not_fit(arguments, message):
    slot, a, b = arguments
    with pytest.raises(ValueError, match=message):
        layer_with().load_slot(
            slot, a.astype(np.float32), b.astype(np.float32), scaling=1.0
        )


def test_what_no_variant_takes_is_refused():
    with pytest.raises(TypeError, match="no variant of the slots takes 'vera'"):
        layer_with().load_slot(0, *adapter(0), scaling=1.0, vera=adapter(0))


def test_a_layer_without_slots_says_so():
    layer = MultiLoraLinear(K, N, rngs=nnx.Rngs(0))
    a, b = adapter(0)
    with pytest.raises(ValueError, match="has no slots: make it with slots="):
        layer.load_slot(0, a, b, scaling=1.0)


def test_dropout_without_a_seed_says_so():
    x, blocks = rows(1), jnp.array([1])
    routing = Routing(block_adapter=blocks, token_index=jnp.arange(BLOCK))
    with pytest.raises(ValueError, match="token_index, but not both seed and step"):
        layer_with(1)(x, routing)


def test_slot_shape_is_positive():
    with pytest.raises(ValueError, match="must be positive, got 0 and 4"):
        SlotShape(num_slots=0, rank=4)


@pytest.mark.parametrize("name", [None, "nf4", "int8"])
@pytest.mark.parametrize("kept", [False, True])
def test_dora_on_any_base_with_a_bias(name, kept):
    """Slot 0 has DoRA, slot 1 has not; norms may be computed once."""
    k, n, rng = 128, 64, np.random.default_rng(0)
    kernel = None
    if name is not None:
        kernel = quantized(name, rng.normal(size=(n, k)).astype(np.float32))
    layer = MultiLoraLinear(
        k,
        n,
        slots=SlotShape(num_slots=2, rank=3, settings=("use_dora",)),
        use_bias=True,
        dtype=jnp.float32,
        kernel=kernel,
        rngs=nnx.Rngs(0),
    )
    layer.bias[...] = jnp.arange(n, dtype=jnp.float32)
    dense = layer.kernel[...] if kernel is None else dequantized(kernel).T
    w = np.asarray(dense, np.float64)
    tensors = [rng.normal(size=s).astype(np.float32) for s in ((k, 3), (3, n), (n,))]
    layer.load_slot(0, *tensors, scaling=0.5)
    layer.load_slot(1, *tensors[:2], np.zeros(n, np.float32), scaling=0.5)
    if kept:
        layer.keep_constants(jnp.float32)
    x = rng.normal(size=(2 * BLOCK, k)).astype(np.float32)
    y = jax.jit(lambda x: layer(x, Routing(block_adapter=jnp.array([0, 1]))))(x)
    whole = w + 0.5 * tensors[0].astype(np.float64) @ tensors[1]
    factor = tensors[2] / np.linalg.norm(whole, axis=0)
    for slot, c in enumerate((factor, 1)):
        here = slice(slot * BLOCK, (slot + 1) * BLOCK)
        wanted = c * (x[here] @ whole) + np.arange(n)
        assert relative_error(y[here], wanted) < 1e-5
