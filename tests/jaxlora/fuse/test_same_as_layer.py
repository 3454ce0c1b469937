"""A plain model under `fuse` computes what `MultiLoraLinear` computes."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlora
from tests.jaxlora.fuse.forms.form import random_array
from tests.oracle import assert_as_accurate_as

BLOCKS, BLOCK_TOKENS, K, N, R, G = 5, 8, 48, 64, 4, 3
ADAPTER = jnp.array([2, 0, 1, 2, 0], jnp.int32)
SCALING = jnp.array([0.5, 2.0, 1.0])


def make_model():
    """Returns two layers with G random adapters in each."""
    layers = [
        jaxlora.MultiLoraLinear(
            k,
            n,
            slots=jaxlora.SlotShape(num_slots=G, rank=R, use_dropout=False),
            dtype=jnp.float32,
            layer=i,
            rngs=nnx.Rngs(i),
        )
        for i, (k, n) in enumerate([(K, N), (N, K)])
    ]
    for i, layer in enumerate(layers):
        k, n = layer.kernel.shape
        for g in range(G):
            a, b = random_array(f"{i}{g}a", (k, R)), random_array(f"{i}{g}b", (R, n))
            layer.load_slot(g, a, b, scaling=float(SCALING[g]))
    return layers


def plain_model(x, kernels, tables):
    """Applies the two layers in `jax.numpy`, each block with its own adapter."""
    for w, (a, b) in zip(kernels, tables, strict=True):
        scaling = SCALING[ADAPTER][:, None, None]
        y = x @ w + scaling * (x @ a[ADAPTER]) @ b[ADAPTER]
        x = jax.nn.gelu(y)
    return x


def with_gradients(model, x, tables):
    """Returns the results, and the gradients of x and of the adapters."""
    y, vjp = jax.vjp(model, x, tables)
    return y, *vjp(random_array("dy", y.shape))


def test_same_numbers():
    layers = make_model()
    kernels = [layer.kernel[...] for layer in layers]
    tables = [(layer.lora_a[...], layer.lora_b[...]) for layer in layers]
    x = random_array("x", (BLOCKS, BLOCK_TOKENS, K))

    def modules(x, tables):
        routing = jaxlora.Routing(block_adapter=ADAPTER)
        rows = x.reshape(-1, K)
        for layer, (a, b) in zip(layers, tables, strict=True):
            definition, _, rest = nnx.split(layer, nnx.LoRAParam, ...)
            lora = nnx.State({"lora_a": nnx.LoRAParam(a), "lora_b": nnx.LoRAParam(b)})
            rows = jax.nn.gelu(nnx.merge(definition, lora, rest)(rows, routing))
        return rows.reshape(BLOCKS, BLOCK_TOKENS, -1)

    def plain(x, tables):
        return plain_model(x, kernels, tables)

    def fused(x, tables):
        strict = jaxlora.fuse(plain_model, strict=True, implementation="xla")
        return strict(x, kernels, tables)

    results = [
        jax.tree.leaves(jax.jit(with_gradients, static_argnums=0)(model, x, tables))
        for model in (fused, modules, plain)
    ]
    for actual, baseline, exact in zip(*results, strict=True):
        assert_as_accurate_as(actual=actual, baseline=baseline, exact=exact)
