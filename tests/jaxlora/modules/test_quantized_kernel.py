"""`MultiLoraLinear` on a quantized weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlora import BaseParam, MultiLoraLinear, Routing, SlotShape, fuse
from jaxlora.modules.shared_input import apply_together
from jaxlora.pallas_kernels import FORMATS, Int8Weight
from tests import drawn
from tests.oracle import relative_error
from tests.pallas_kernels.quantized.weights import dequantized, quantized

K, N, BLOCK = 64, 24, 8
SLOTS = SlotShape(num_slots=2, rank=4)
ROUTING = Routing(block_adapter=jnp.array([1, 0, -1]))
X = drawn.normal(6, (3 * BLOCK, K))


def weight(seed: int = 0) -> jax.Array:
    return drawn.normal(seed, (N, K))


@jax.jit
def run(layer: MultiLoraLinear, x: jax.Array, routing: Routing) -> jax.Array:
    return layer(x, routing)


def layer_on(kernel, *, slots=SLOTS, **options) -> MultiLoraLinear:
    layer = MultiLoraLinear(
        K, N, slots=slots, dtype=jnp.float32, kernel=kernel, **options
    )
    if slots is not None:
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(K, 3)), rng.normal(size=(3, N))
        layer.load_slot(1, a, b, scaling=0.1)
    return layer


def dense(kernel) -> MultiLoraLinear:
    """The same layer on the weight that a quantized kernel stands for."""
    layer = layer_on(None, rngs=nnx.Rngs(0))
    layer.kernel[...] = dequantized(kernel).T
    return layer


@pytest.mark.parametrize("name", FORMATS)
def test_the_layer_computes_with_the_weight_that_its_kernel_stands_for(name):
    kernel = quantized(name, weight())
    y, wanted = (run(one, X, ROUTING) for one in (layer_on(kernel), dense(kernel)))
    # fp8 also rounds the rows of x.
    assert relative_error(y, wanted) < (0.03 if name == "fp8" else 1e-6)
    assert not np.any(y[2 * BLOCK :])


def test_the_arrays_of_the_kernel_are_frozen_weights_named_by_its_fields():
    layer = layer_on(quantized("fp8", weight(), transposed=True))
    paths = {
        ".".join(path) for path, _ in nnx.to_flat_state(nnx.state(layer, BaseParam))
    }
    assert paths == {"kernel.values", "kernel.scale", "kernel.transposed"}
    kernel = quantized("nf4", weight())
    graph, state = nnx.split(layer_on(kernel))
    again = nnx.merge(graph, state).kernel.weight
    np.testing.assert_array_equal(dequantized(again), dequantized(kernel))


def test_linears_of_several_formats_run_together():
    kernels = [
        quantized("int8", weight(0)),
        None,
        quantized("int8", weight(1)),
        quantized("fp8", weight(2)),
        quantized("fp8", weight(3), fp8_backward=False),
    ]
    layers = [
        layer_on(kernel, rngs=nnx.Rngs(0), projection=i)
        for i, kernel in enumerate(kernels)
    ]
    layers.append(layer_on(kernels[0], slots=None))
    together = jax.jit(apply_together)(layers, X, ROUTING)
    for layer, y in zip(layers, together, strict=True):
        np.testing.assert_array_equal(y, run(layer, X, ROUTING))


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_without_slots_adds_its_bias(name):
    kernel = quantized(name, weight())
    layer = layer_on(kernel, slots=None, use_bias=True)
    layer.bias[...] = jnp.arange(N, dtype=jnp.float32)
    adapted = layer_on(kernel, use_bias=True)
    adapted.bias[...] = layer.bias[...]
    everywhere = Routing(block_adapter=jnp.array([0, 0, 0]))  # an empty slot
    y = run(layer, X, everywhere)
    assert relative_error(y, run(adapted, X, everywhere)) < 1e-6


def test_wrong_kernels_are_refused():
    with pytest.raises(ValueError, match=r"K=24 and N=64.*in_features=64"):
        layer_on(Int8Weight.quantize(weight().T))
    with pytest.raises(ValueError, match="give rngs"):
        layer_on(None)


@pytest.mark.parametrize("name", FORMATS)
def test_fuse_leaves_the_layer_as_it_is(name):
    layer = layer_on(quantized(name, weight()))
    graph, state = nnx.split(layer)

    def loss(x, state):
        return (nnx.merge(graph, state)(x, ROUTING) ** 2).sum()

    got, wanted = (jax.jit(jax.grad(f))(X, state) for f in (fuse(loss), loss))
    np.testing.assert_array_equal(got, wanted)
