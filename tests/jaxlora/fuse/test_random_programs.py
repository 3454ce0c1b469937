"""Whatever surrounds an adapter, `fuse` raises no error, and values stay.

The programs are drawn: sums of linears on odd inputs, under transforms, with several
adapters, numbers far from 1, and parts that other results read too.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxlora

SIZES = [
    (6, 32, 24, 2, 3),
    (8, 16, 16, 1, 2),
    (5, 24, 40, 3, 1),
    (16, 16, 16, 4, 4),
    (1, 32, 32, 2, 2),
    (12, 8, 48, 2, 3),
]


def arguments(seed: int) -> dict[str, jax.Array]:
    tokens, k, n, rank, adapters = SIZES[seed % len(SIZES)]
    shapes = {
        "x": (tokens, k),
        "w": (k, n),
        "a": (k, rank),
        "b": (rank, n),
        "u": (k, k),
        "back": (n, k),
        "many_a": (adapters, k, rank),
        "many_b": (adapters, rank, n),
        "scales": (adapters,),
        "columns": (n,),
        "features": (k,),
        "rows": (tokens, 1),
        "number": (),
    }
    rng = np.random.default_rng(seed)
    arrays = {
        name: jnp.asarray(
            rng.normal(size=shape) / max(1, *shape[-2:-1], 1) ** 0.5, jnp.float32
        )
        for name, shape in shapes.items()
    }
    return arrays | {"ids": jnp.asarray(rng.integers(0, adapters, tokens))}


def linear(draw: random.Random, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A linear with an adapter, or something that looks like one."""
    w, a, b = p["w"], p["a"], p["b"]
    scale = draw.choice([1, 2.0, -1, 0.5, 1e-9, 0.0, 1e25])
    change = draw.choice(
        [
            lambda y: y,
            lambda y: y * 0.5,
            lambda y: -y,
            jnp.tanh,
            lambda y: y * p["number"],
            lambda y: y.astype(jnp.bfloat16).astype(y.dtype),
        ]
    )
    form = draw.choice(
        [
            lambda: change(x @ w) + scale * (x @ a) @ b,
            lambda: x @ w - change(x @ a) @ b,
            lambda: x @ (w + scale * a @ b),
            lambda: change(x) @ w + (x @ a) @ b,
            lambda: ((x @ a) @ b) * p["columns"] + (x @ w) * p["columns"],
            lambda: x @ w + p["columns"] + (x @ a) @ b,
            lambda: change(x @ w + (x @ a) @ b) / p["columns"],
            lambda: x @ w + ((x @ a) * scale) @ b,
        ]
    )
    return form()


def part(draw: random.Random, p: dict[str, jax.Array]) -> jax.Array:
    """A sum [T, N] with an adapter."""
    x, w, a, b = (p[name] for name in ("x", "w", "a", "b"))
    tokens, ids = x.shape[0], p["ids"]
    lora = lambda x: linear(draw, p, x)
    plain = lambda x, a, b: x @ w + (x @ a) @ b
    entry = lambda name: p[name][ids]

    def chosen():
        s = jnp.einsum("tk,tkr->tr", x, entry("many_a"))
        branch = jnp.einsum("tr,trn->tn", s, entry("many_b"))
        return x @ w + entry("scales")[:, None] * branch

    def mapped():
        axis = draw.randrange(3)
        y = jax.vmap(plain, (None, 0, 0), axis)(x, p["many_a"], p["many_b"])
        return y.sum(axis)

    def einsum():
        spec, axis = draw.choice([("gtn", 0), ("tgn", 1), ("tng", 2)])
        tables = p["many_a"], p["many_b"]
        return jnp.einsum(f"tk,gkr,grn->{spec}", x, *tables).sum(axis)

    def by_row(x, i):
        return x @ w + p["scales"][i] * (x @ p["many_a"][i]) @ p["many_b"][i]

    def scanned():
        step = lambda c, _: (c + 0.1 * c @ p["u"], lora(c))
        return lax.scan(step, x, None, length=2)[1].sum(0)

    normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["features"]
    made = draw.choice(
        [
            lambda: lora(x),
            lambda: lora(normed),
            lambda: lora(x + x @ p["u"]),
            lambda: lora(x @ p["u"]),
            lambda: lora(x * p["rows"]),
            lambda: lora(x[:, ::-1]),
            lambda: lora(lora(x) @ p["back"]),
            lambda: lora(jnp.broadcast_to(x[:1], x.shape)),
            lambda: lora(x[None])[0],
            lambda: jnp.concatenate([lora(x[: tokens // 2]), lora(x[tokens // 2 :])]),
            lambda: jnp.einsum("kt,nk->nt", x.T, w.T).T + (x @ a) @ b,
            lambda: jax.checkpoint(lora)(x),
            lambda: jax.jit(lora)(x),
            lambda: jax.grad(lambda x: jnp.sum(lora(x) ** 2))(x) @ w,
            lambda: jax.vmap(lambda a: plain(x, a, b))(p["many_a"])[0],
            lambda: jax.vmap(lambda b: plain(x, a, b))(p["many_b"]).mean(0),
            lambda: jax.vmap(by_row)(x, ids),
            scanned,
            chosen,
            mapped,
            einsum,
        ]
    )
    return made()


def program(seed: int):
    """Returns a function of the arguments, with one or several results."""

    def function(p):
        draw = random.Random(seed)
        parts = [part(draw, p) for _ in range(draw.randint(1, 4))]
        total = jnp.zeros(parts[0].shape)
        for y in parts:
            scale = draw.choice([1.0, 2.0, 0.0, p["number"], p["columns"]])
            total = total + draw.choice([jnp.tanh, lambda y: y])(y) * scale
        return (total, *parts) if draw.random() < 0.3 else (total,)

    return function


def passes(function):
    def both(p):
        ids = p["ids"]
        floats = {name: value for name, value in p.items() if name != "ids"}
        results, vjp = jax.vjp(lambda q: function(q | {"ids": ids}), floats)
        return results, vjp(jax.tree.map(jnp.ones_like, results))

    return jax.jit(both)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=() if n < 8 else pytest.mark.grid) for n in range(200)],
)
def test_a_drawn_program_keeps_its_values(seed):
    function, p = program(seed), arguments(seed)
    fused = jaxlora.fuse(function, implementation="xla")
    found = jax.make_jaxpr(fused)(p)
    if str(found) == str(jax.make_jaxpr(function)(p)):
        return
    pairs = zip(
        *(jax.tree.leaves(passes(f)(p)) for f in (fused, function)), strict=True
    )
    for got, want in pairs:
        got, want = (np.asarray(value, np.float64) for value in (got, want))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        kept = np.isfinite(want)
        size = np.linalg.norm(want[kept])
        assert np.linalg.norm((got - want)[kept]) <= 1e-4 * (size + 1e-2)
