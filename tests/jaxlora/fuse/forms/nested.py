"""The branch inside scan, remat, cond, loops, custom_vjp, jit and shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tests.jaxlora.fuse.forms import decoder
from tests.jaxlora.fuse.forms.form import BATCH, TOKENS, K, N, R, form

L = 3
SCALE = 1.5
STACKS = {"w": (L, K, K), "a": (L, K, R), "b": (L, R, K)}
DECODER = {
    "x": decoder.make_x,
    "frozen": lambda: decoder.make_weights(2)[0],
    "lora": lambda: decoder.make_weights(2)[1],
}


def linear(x, w, a, b):
    return x @ w + SCALE * (x @ a) @ b


@form(**STACKS)
def scan_over_layers(x, w, a, b):
    def body(x, weights):
        return jnp.tanh(linear(x, *weights)), None

    return lax.scan(body, x, (w, a, b))[0]


@form(**STACKS, trained="x w a b")
def scan_with_remat_and_trained_w(x, w, a, b):
    @jax.checkpoint
    def body(x, weights):
        return jnp.tanh(linear(x, *weights)), None

    return lax.scan(body, x, (w, a, b))[0]


@form(**STACKS, key=lambda: jax.random.key(8), deep=True)
def scan_with_dropout(x, w, a, b, key):
    keep = np.float32(0.7)  # so that it draws the same mask where x is float64

    def body(x, weights):
        key, w, a, b = weights
        dropped = jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)
        return jnp.tanh(x @ w + SCALE * (dropped @ a) @ b), None

    return lax.scan(body, x, (jax.random.split(key, L), w, a, b))[0]


@form(x=(5, 7, K))
def scan_over_chunks_of_rows(x, w, a, b):
    return lax.map(lambda rows: linear(rows, w, a, b), x)


@form()
def remat(x, w, a, b):
    return jnp.sin(jax.checkpoint(linear)(jnp.cos(x), w, a, b))


@form(**STACKS)
def fori_loop_of_layers(x, w, a, b):
    def body(i, x):
        return jnp.tanh(linear(x, w[i], a[i], b[i]))

    return lax.fori_loop(0, L, body, x)


@form(w=(K, K), b=(R, K), trained="", limit=jnp.float32(40.0))
def while_loop(x, w, a, b, limit):
    def body(x):
        return linear(x, w, a, b) * 1.5

    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) < limit, body, x)


@form(adapted=jnp.bool_(True))
def one_branch_of_cond(x, w, a, b, adapted):
    return lax.cond(adapted, linear, lambda x, w, a, b: x @ w, x, w, a, b)


@form()
def nested_jit(x, w, a, b):
    branch = jax.jit(lambda x, a, b: (x @ a) @ b)
    frozen = jax.jit(lambda x, w: x @ w)
    return frozen(x, w) + SCALE * branch(x, a, b)


@form()
def named_scopes_and_checkpoint_name(x, w, a, b):
    with jax.named_scope("lora"):
        s = checkpoint_name(x @ a, "s")
    return x @ w + SCALE * s @ b


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_gradient(f, *args):
    return f(*args)


def _scaled_forward(f, *args):
    y, vjp = jax.vjp(f, *args)
    return y, vjp


def _scaled_backward(f, vjp, dy):
    return vjp(2 * dy)


_scaled_gradient.defvjp(_scaled_forward, _scaled_backward)


@form()
def custom_vjp(x, w, a, b):
    """The author's own rule doubles the gradients, which must stay so."""
    return _scaled_gradient(linear, x, w, a, b)


@form(x=(4, TOKENS, K))
def shard_map(x, w, a, b):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        linear,
        mesh=mesh,
        in_specs=(rows, whole, whole, whole),
        out_specs=rows,
        check_vma=False,
    )
    return mapped(x, w, a, b)


@form(x=(BATCH, TOKENS, K))
def vmap_over_the_batch(x, w, a, b):
    return jax.vmap(linear, in_axes=(0, None, None, None))(x, w, a, b)


@form(x=(BATCH, TOKENS, K), w=(N, K), a=(R, K), b=(N, R))
def two_vmaps_of_matrix_times_vector(x, w, a, b):
    def one(x):
        return w @ x + SCALE * (b @ (a @ x))

    return jax.vmap(jax.vmap(one))(x)


@form(sites=7, trained="x lora", **DECODER)
def scanned_decoder(x, frozen, lora):
    return decoder.scanned(x, frozen, lora)


@form(sites=14, trained="x lora", **DECODER)
def unrolled_decoder(x, frozen, lora):
    return decoder.unrolled(x, frozen, lora)
