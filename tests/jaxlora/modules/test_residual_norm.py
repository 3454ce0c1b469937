"""A norm whose input is also added behind, with gradients in one pass or in two."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxlora.modules import norm
from jaxlora.modules.norm import RmsNorm
from jaxlora.pallas_kernels import LINEAR_RESULTS
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.pallas_kernels.quantized.fp8 import Fp8Weight
from jaxlora.plan.memory.planned import TRACED_ON
from tests.drawn import Draws
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import mosaic_kernels

T, D = 5, 200


def make_norm(offset, dtype=jnp.float32):
    made = RmsNorm(D, eps=1e-5, offset=offset, dtype=jnp.dtype(dtype))
    made.scale[...] = Draws(1).normal(D, dtype=dtype)
    return made


@functools.partial(jax.jit, static_argnums=1)
def gradients(module, implementation, arrays):
    """Returns both results, and the gradients of h and of the scale."""
    h, *dy = arrays
    graph, state = nnx.split(module)

    def run(state, h):
        return nnx.merge(graph, state).of_residual(h, implementation)

    results, vjp = jax.vjp(run, state, h)
    return *results, *jax.tree.leaves(vjp(tuple(dy)))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradients_of_both_paths_agree(offset, dtype):
    draws = Draws(0)
    arrays = [draws.normal(T, D, dtype=dtype) for _ in range(3)]
    own = make_norm(offset, dtype)
    plain = gradients(own, "xla", arrays)
    with mosaic_kernels():
        found = gradients(own, "mosaic", arrays)
    exact_norm = make_norm(offset)
    exact_norm.scale[...] = own.scale[...].astype(jnp.float32)
    exact = gradients(exact_norm, "xla", [x.astype(jnp.float32) for x in arrays])
    for one, two, three in zip(found, plain, exact, strict=True):
        assert_as_accurate_as(actual=one, baseline=two, exact=three)


@pytest.mark.parametrize(
    ("implementation", "on_fp8"), [("triton", False), ("mosaic", True)]
)
def test_without_a_kernel_the_norm_is_the_plain_one(implementation, on_fp8):
    """Its program is that of the rows themselves and of the norm."""
    h = jax.ShapeDtypeStruct((T, D), jnp.float32)
    graph, state = nnx.split(make_norm(False))
    w = Fp8Weight.quantize(jnp.ones((D, D), jnp.bfloat16)) if on_fp8 else None

    def both(state, h):
        return nnx.merge(graph, state).of_residual(h, implementation, w)

    def plain(state, h):
        return h, nnx.merge(graph, state)(h)

    with planned_for(TRACED_ON):
        found, want = (str(jax.make_jaxpr(run)(state, h)) for run in (both, plain))
    assert found == want


POLICIES = {
    "nothing": None,
    "linears": jax.checkpoint_policies.save_only_these_names(LINEAR_RESULTS),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_rematerialized_it_has_the_kernel_once(policy, monkeypatch):
    """Also for rows of a device among several, whose types are checked."""
    calls, kernel = [], norm.norm_gradient
    count = lambda *args, **options: calls.append(args) or kernel(*args, **options)
    monkeypatch.setattr(norm, "norm_gradient", count)
    graph, state = nnx.split(make_norm(False))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=auto)

    @jax.shard_map(mesh=mesh, in_specs=(None, jax.P("data")), out_specs=jax.P("data"))
    def on_each(state, h):
        def half(h):
            h, x = nnx.merge(graph, state).of_residual(h, "mosaic")
            return h + jnp.tanh(x)

        run = jax.checkpoint(half, policy=POLICIES[policy])
        return jax.grad(lambda h: run(h).sum())(h)

    with planned_for(TRACED_ON):
        h = jax.ShapeDtypeStruct((2 * T, D), jnp.float32)
        traced = jax.make_jaxpr(on_each)(state, h)
    assert traced.out_avals[0].shape == h.shape
    assert len(calls) == 1
