"""Every adapter of a plain decoder is found, whichever linears have one.

Linears without an adapter, residual sums and norms are between those that have one, and
each norm is written in a way of its own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxlora
from jaxlora.fuse.rewrite import rewrite
from tests.jaxlora.fuse.forms.form import random_array
from tests.jaxlora.fuse.generator import arithmetic
from tests.oracle import assert_as_accurate_as

TOKENS, WIDTH, HEADS, HIDDEN, RANK, LAYERS = 40, 32, 4, 64, 2, 2
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, WIDTH),
    "v": (WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
CHOICES = [c for n in range(1, 8) for c in itertools.combinations(SHAPES, n)]


def mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def rsqrt(x):
    return lax.rsqrt(x + 1e-6)


def in_float32(norm):
    return lambda x, g: norm(x.astype(jnp.float32), g).astype(x.dtype)


def centered(x):
    return x - mean(x)


NORMS = {
    "x r g": lambda x, g: x * rsqrt(mean(x * x)) * g,
    "g (x r)": lambda x, g: g * (x * rsqrt(mean(jnp.square(x)))),
    "(g x) r": lambda x, g: (g * x) * rsqrt(mean(x**2)),
    "x (r g)": lambda x, g: x * (rsqrt(mean(x * x)) * g),
    "division by sqrt": lambda x, g: x / jnp.sqrt(mean(x * x) + 1e-6) * g,
    "scale of 1 + g": lambda x, g: x * rsqrt(mean(x * x)) * (1 + g),
    "by its norm": lambda x, g: (
        x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1) * g
    ),
    "mean by einsum": lambda x, g: (
        x * rsqrt(jnp.einsum("td,td->t", x, x)[:, None] / x.shape[-1]) * g
    ),
    "float32": in_float32(lambda x, g: x * rsqrt(mean(x * x)) * g),
    "float32 before g": lambda x, g: (
        in_float32(lambda x, _: x * rsqrt(mean(x * x)))(x, g) * g
    ),
    "jit": jax.jit(lambda x, g: x * rsqrt(mean(x * x)) * g),
    "checkpoint": jax.checkpoint(lambda x, g: x * rsqrt(mean(x * x)) * g),
    "layer norm by var": lambda x, g: (
        centered(x) * rsqrt(jnp.var(x, -1, keepdims=True)) * g
    ),
    "layer norm with a bias": lambda x, g: (
        centered(x) / jnp.sqrt(mean(centered(x) ** 2) + 1e-6) * g + g
    ),
    "layer norm by moments": in_float32(
        lambda x, g: centered(x) * rsqrt(mean(x * x) - mean(x) ** 2) * g + 0.1 * g
    ),
    "standardize": lambda x, g: jax.nn.standardize(x) * g + g,
}


def layer(p, x, norm):
    """A layer with multi-head attention and a gated MLP."""

    def linear(name, x):
        y = x @ p[name]["w"] + p[name]["bias"]
        if "a" in p[name]:
            y = y + 2.0 * (x @ p[name]["a"]) @ p[name]["b"]
        return y

    h = norm(x, p["g"])
    q, k, v = (linear(n, h).reshape(-1, HEADS, WIDTH // HEADS) for n in "qkv")
    scores = jnp.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
    x = x + linear("o", mixed.reshape(x.shape))
    h = norm(x, p["g"])
    return x + linear("down", jax.nn.silu(linear("gate", h)) * linear("up", h))


def repeated(norm, p, x, wrap=lambda f: f):
    for number in range(LAYERS):
        weights = jax.tree.map(lambda leaf: leaf[number], p)  # noqa: B023
        x = wrap(functools.partial(layer, norm=norm))(weights, x)
    return x


def scanned(norm, p, x, wrap=lambda f: f):
    run = wrap(functools.partial(layer, norm=norm))
    return lax.scan(lambda x, p: (run(p, x), None), x, p)[0]


def looped(norm, p, x):
    entry = lambda i: jax.tree.map(lambda leaf: leaf[i], p)
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(entry(i), x, norm), x)


# The function, and how often it writes a layer.
AROUND = {
    "one after another": (repeated, LAYERS),
    "jit": (functools.partial(repeated, wrap=jax.jit), LAYERS),
    "checkpoint": (functools.partial(repeated, wrap=jax.checkpoint), LAYERS),
    "scan": (scanned, 1),
    "scan of checkpoint": (functools.partial(scanned, wrap=jax.checkpoint), 1),
    "loop": (looped, 1),
}


def weights(targets, dtype):
    p = {}
    for name, (k, n) in SHAPES.items():
        made = {"w": (k, n), "bias": (n,)}
        made |= {"a": (k, RANK), "b": (RANK, n)} if name in targets else {}
        p[name] = {
            part: random_array(f"{name}.{part}", (LAYERS, *shape), dtype)
            for part, shape in made.items()
        }
    return p | {"g": 1 + random_array("g", (LAYERS, WIDTH), dtype) / 10}


def check_found(targets, norm, around, dtype):
    function, count = AROUND[around]
    run = functools.partial(function, NORMS[norm])
    p, x = weights(targets, dtype), random_array("x", (TOKENS, WIDTH), dtype)
    found = rewrite(jax.make_jaxpr(run)(p, x).jaxpr, "xla")
    names = sum(len(site.linears) for site in found.sites)
    assert names == count * len(targets), found.refusals
    assert not any(refusal.is_adapter for refusal in found.refusals)


DTYPES = (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm(norm):
    """Each with another choice of linears, and other transforms."""
    number = list(NORMS).index(norm)
    around = list(AROUND)[number % len(AROUND)]
    check_found(CHOICES[37 * number % 127], norm, around, DTYPES[number % 2])


@pytest.mark.grid
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targets", CHOICES, ids="-".join)
def test_every_choice_of_linears_beside_every_norm(targets, norm):
    number = CHOICES.index(targets) + list(NORMS).index(norm)
    around = list(AROUND)[number % len(AROUND)]
    check_found(targets, norm, around, DTYPES[number // 6 % 2])


@pytest.mark.parametrize(
    ("norm", "around"), [("x r g", "scan"), ("layer norm by var", "one after another")]
)
def test_values_and_gradients_of_a_decoder(norm, around):
    run = functools.partial(AROUND[around][0], NORMS[norm])
    p, x = weights(("q", "v", "down"), jnp.float32), random_array("x", (TOKENS, WIDTH))

    def both(function):
        def passes(p, x):
            y, vjp = jax.vjp(function, p, x)
            return y, vjp(jnp.cos(y))

        return arithmetic.run(jax.jit(passes).trace(p, x), (p, x))

    actual = both(jaxlora.fuse(run, strict=True, implementation="xla"))
    wanted = both(run)
    for got, want in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        scale = max(1.0, float(np.max(np.abs(want))))
        assert_as_accurate_as(actual=got, baseline=want + 1e-5 * scale, exact=want)
