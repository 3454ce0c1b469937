"""VeRA in slots of `MultiLoraLinear`, beside LoRA and alone, against its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora import MultiLoraLinear, Routing, SlotShape
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.vera import VERA_B, VERA_D
from tests.oracle import relative_error

K, N, BLOCK = 12, 20, 8
BLOCKS = 1, 0, -1, 1, 2
MIXED = SlotShape(num_slots=3, rank=6, settings=("use_vera",))
ALONE = dataclasses.replace(MIXED, has_lora=False)


def gradients(f, argnums=0):
    """Compiles the gradients and the value of a function with a further result."""
    return jax.jit(jax.grad(f, argnums, has_aux=True))


@jax.jit
def run(layer: MultiLoraLinear, x: jax.Array, routing: Routing) -> jax.Array:
    return layer(x, routing)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def layer_with(slots: SlotShape) -> MultiLoraLinear:
    """Slot 0 has LoRA if there is any, slot 1 VeRA of rank 5, and slot 2 is empty."""
    layer = MultiLoraLinear(K, N, slots=slots, dtype=jnp.float32, rngs=nnx.Rngs(0))
    none = [np.zeros(t.shape(K, N, 5), np.float32) for t in (LORA_A, LORA_B)]
    vectors = draw(5), draw(N)
    if slots.has_lora:
        off = np.zeros(3, np.float32), np.zeros(N, np.float32)
        layer.load_slot(0, draw(K, 3), draw(3, N), *off, scaling=0.5, dropout=0.25)
        vectors = (*none, *vectors)
    matrices = draw(K + 3, 5)[:K], draw(5, N + 4)[:, :N]
    layer.load_slot(1, *vectors, scaling=1.0, dropout=0.5, vera=matrices)
    return layer


@pytest.mark.parametrize("slots", [MIXED, ALONE], ids=["beside LoRA", "alone"])
def test_output_and_gradients_are_those_of_the_definition(slots):
    layer = layer_with(slots)
    x, dy = draw(len(BLOCKS) * BLOCK, K), draw(len(BLOCKS) * BLOCK, N)
    graph, tables, rest = nnx.split(layer, nnx.LoRAParam, ...)
    routing = Routing(block_adapter=jnp.array(BLOCKS))

    def loss(tables, x):
        y = nnx.merge(graph, tables, rest)(x, routing)
        return (y * dy).sum(), y

    (dtables, dx), y = gradients(loss, (0, 1))(tables, x)
    own = np.repeat(np.array(BLOCKS), BLOCK) == 1
    a, b = layer.vera_a[1], layer.vera_b[1]

    def wanted(vectors, x):
        d, factor = vectors
        y = x @ layer.kernel[...] + ((x @ a) * d) @ b * factor
        return (y * dy[own]).sum(), y

    d, factor = (getattr(layer, t.name)[1] for t in (VERA_D, VERA_B))
    grads, out = gradients(wanted, (0, 1))((d, factor), x[own])
    (of_d, of_b), of_x = grads
    assert relative_error(y[own], out) < 1e-5
    assert relative_error(dx[own], of_x) < 1e-5
    assert relative_error(dtables[VERA_D.name][1], of_d) < 1e-5
    assert relative_error(dtables[VERA_B.name][1], of_b) < 1e-5
    others = [dtables[t.name][slot] for t in (VERA_D, VERA_B) for slot in (0, 2)]
    if slots.has_lora:
        assert dtables[LORA_B.name][0].any()
        others += [dtables[t.name][1] for t in (LORA_A, LORA_B)]
    assert not any(array.any() for array in others)


def test_a_slot_with_lora_has_the_bits_that_it_has_without_vera():
    plain = MultiLoraLinear(
        K,
        N,
        slots=SlotShape(num_slots=3, rank=6),
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    plain.load_slot(0, draw(K, 3), draw(3, N), scaling=0.5)
    layer, x = layer_with(MIXED), jnp.asarray(draw(2 * BLOCK, K))
    layer.vera_b[...] = layer.vera_b[...].at[1].set(jnp.nan)
    alone = run(plain, x[:BLOCK], Routing(block_adapter=jnp.array([0])))
    beside = np.asarray(run(layer, x, Routing(block_adapter=jnp.array([0, 1]))))
    np.testing.assert_array_equal(beside[:BLOCK], alone)
    assert np.isnan(beside[BLOCK:]).all()


def test_no_matrices_are_kept_for_the_gradient():
    """They would be as large as those of LoRA in every linear."""
    graph, tables, rest = nnx.split(layer_with(ALONE), nnx.LoRAParam, ...)
    x, routing = jnp.asarray(draw(BLOCK, K)), Routing(block_adapter=jnp.array([1]))

    def run(tables):
        return nnx.merge(graph, tables, rest)(x, routing)

    given = [rest["vera_a"][...], rest["vera_b"][...]]
    kept = jax.tree.leaves(jax.vjp(run, tables)[1])
    shapes = [x.shape for x in kept if not any(x is one for one in given)]
    assert not {(3, K, 6), (3, 6, N)} & set(shapes), shapes
