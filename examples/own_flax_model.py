"""Two LoRA adapters on a frozen network of your own, trained in the same batches.

    python examples/own_flax_model.py

The network is a plain Flax NNX module. Its linears become `MultiLoraLinear`, which
routes each block of rows to one adapter. Adapter 0 learns one function and adapter 1
another one, from the same frozen weights. This needs nothing else of jaxlora.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxlora

BLOCKS, ROWS = 4, 32  # a batch has 4 blocks of 32 rows
SLOTS = jaxlora.SlotShape(num_slots=2, rank=8, use_dropout=False)


class Network(nnx.Module):
    """Three linears of width 64 with GELU; the first two have adapters."""

    def __init__(self, rngs: nnx.Rngs):
        def linear() -> jaxlora.MultiLoraLinear:
            return jaxlora.MultiLoraLinear(
                64, 64, slots=SLOTS, dtype=jnp.float32, implementation="xla", rngs=rngs
            )

        self.first, self.second = linear(), linear()
        self.head = jaxlora.BaseParam(rngs.normal((64, 1)) / 8)  # frozen

    def __call__(self, x: jax.Array, routing: jaxlora.Routing) -> jax.Array:
        x = jax.nn.gelu(self.first(x, routing))
        x = jax.nn.gelu(self.second(x, routing))
        return (x @ self.head[...])[:, 0]


def make_batch(key: jax.Array) -> tuple[jax.Array, jax.Array, jaxlora.Routing]:
    """Blocks 0 and 2 belong to adapter 0, blocks 1 and 3 to adapter 1."""
    x = jax.random.normal(key, (BLOCKS * ROWS, 64))
    adapter = jnp.array([0, 1, 0, 1])
    target = jnp.where(jnp.repeat(adapter, ROWS) == 0, x[:, 0], -x[:, 1])
    return x, target, jaxlora.Routing(block_adapter=adapter)


@nnx.jit
def step(network: Network, optimizer: nnx.Optimizer, x, target, routing):
    """Takes an optimizer step; returns each adapter's loss."""

    def loss(network: Network):
        error = (network(x, routing) - target) ** 2
        per_block = error.reshape(BLOCKS, ROWS).mean(1)
        return per_block.mean(), per_block[:2]

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    (_, losses), grads = nnx.value_and_grad(loss, argnums=wrt, has_aux=True)(network)
    optimizer.update(network, grads)
    return losses


def main() -> tuple[jax.Array, jax.Array]:
    """Trains; returns the adapters' losses in the first step and in the last one."""
    network = Network(nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 2)
    for layer in (network.first, network.second):
        layer.kernel[...] = jax.random.normal(keys[0], (64, 64)) / 8
        for slot in range(SLOTS.num_slots):
            a = jax.random.normal(jax.random.fold_in(keys[1], slot), (64, 8)) / 8
            layer.load_slot(slot, a, jnp.zeros((8, 64)), scaling=2.0, dropout=0.0)
    optimizer = nnx.Optimizer(network, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    losses = []
    for i in range(100):
        batch = make_batch(jax.random.key(i))
        losses.append(step(network, optimizer, *batch))
        if i % 25 == 0 or i == 99:
            print(f"step {i:3}: losses {losses[-1][0]:.3f} and {losses[-1][1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
