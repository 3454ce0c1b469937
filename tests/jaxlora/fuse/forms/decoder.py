"""A small decoder in plain JAX with a branch beside each of its seven linears."""

import jax
import jax.numpy as jnp

from tests.jaxlora.fuse.forms.form import random_array

WIDTH, HEADS, HIDDEN, RANK = 48, 4, 80, 4
SCALE = 2.0
LINEARS = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, WIDTH // 2),
    "v": (WIDTH, WIDTH // 2),
    "o": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}


def make_weights(num_layers: int):
    """Makes (frozen, lora): trees of arrays whose first dimension is the layer."""
    frozen, lora = {}, {}
    for name, (k, n) in LINEARS.items():
        frozen[name] = random_array(f"{name}.w", (num_layers, k, n))
        lora[name] = {
            "a": random_array(f"{name}.a", (num_layers, k, RANK)),
            "b": random_array(f"{name}.b", (num_layers, RANK, n)) * 0.3,
        }
    for name in ("attention_norm", "mlp_norm"):
        frozen[name] = 1 + 0.1 * random_array(name, (num_layers, WIDTH))
    return frozen, lora


def make_x(batch: int = 2, tokens: int = 11):
    return random_array("x", (batch, tokens, WIDTH))


def _norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def _heads(y):
    return y.reshape(*y.shape[:-1], -1, WIDTH // HEADS)


def layer(x, frozen, lora):
    """Applies one layer: grouped-query attention and a gated MLP."""

    def linear(x, name):
        branch = (x @ lora[name]["a"]) @ lora[name]["b"]
        return x @ frozen[name] + SCALE * branch

    h = _norm(x, frozen["attention_norm"])
    q, k, v = (_heads(linear(h, name)) for name in "qkv")
    k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
    x = x + linear(mixed.reshape(x.shape), "o")
    h = _norm(x, frozen["mlp_norm"])
    gated = jax.nn.silu(linear(h, "gate")) * linear(h, "up")
    return x + linear(gated, "down")


def scanned(x, frozen, lora):
    """Applies the layers in a scan, each recomputed in the backward pass."""

    @jax.checkpoint
    def body(x, weights):
        return layer(x, *weights), None

    return jax.lax.scan(body, x, (frozen, lora))[0]


def unrolled(x, frozen, lora):
    """Applies the layers one after another."""
    num_layers = frozen["q"].shape[0]
    for i in range(num_layers):
        x = layer(x, *jax.tree.map(lambda leaf: leaf[i], (frozen, lora)))  # noqa: B023
    return x
