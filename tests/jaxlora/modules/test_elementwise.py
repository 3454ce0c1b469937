"""Norms, gated activations and rope, with gradients, against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.blocks.mlp import geglu, swiglu
from jaxlora.modules.norm import rms_norm
from jaxlora.modules.rope import apply_rope
from tests.drawn import Draws
from tests.oracle import assert_as_accurate_as

T, H, E = 24, 3, 16


def plain_norm(x, scale):
    wide = x.astype(jnp.float32)
    normed = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return scale * normed.astype(x.dtype)


def plain_offset_norm(x, scale):
    wide = x.astype(jnp.float32)
    normed = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def plain_rope(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first + 1j * second) * (cos + 1j * sin)[:, None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def table():
    rng = np.random.default_rng(9)
    angles = 3 * rng.standard_normal((T, E // 2), np.float32)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


OPS = {
    "norm": (lambda *a: rms_norm(*a, 1e-5), plain_norm, [(T, E), (E,)]),
    "norm_of_heads": (lambda *a: rms_norm(*a, 1e-5), plain_norm, [(T, H, E), (E,)]),
    "offset_norm": (
        lambda *a: rms_norm(*a, 1e-5, True),
        plain_offset_norm,
        [(T, E), (E,)],
    ),
    "geglu": (
        geglu,
        lambda g, u: jax.nn.gelu(g, approximate=True) * u,
        [(T, E), (T, E)],
    ),
    "swiglu": (swiglu, lambda g, u: jax.nn.silu(g) * u, [(T, E), (T, E)]),
    "rope": (
        lambda x: apply_rope(x, *table()),
        lambda x: plain_rope(x, *table()),
        [(T, H, E)],
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(f, args, dy):
    value, vjp = jax.vjp(f, *args)
    return value, *vjp(dy)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_as_accurate_as_plain_jax(name, dtype, size):
    op, plain, shapes = OPS[name]
    draws = Draws(0)
    *args, dy = (np.asarray(draws.normal(*shape)) for shape in (*shapes, shapes[0]))
    args, dy = [(size * x).astype(dtype) for x in args], dy.astype(dtype)
    actual, baseline = (with_gradients(f, args, dy) for f in (op, plain))
    wide = [x.astype(np.float32) for x in args]
    exact = with_gradients(plain, wide, dy.astype(np.float32))
    for one, two, three in zip(actual, baseline, exact, strict=True):
        assert_as_accurate_as(actual=one, baseline=two, exact=three)
