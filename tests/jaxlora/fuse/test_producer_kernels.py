"""Norm, linears and gate in the Hopper kernels, in the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlora
from jaxlora.fuse import measure
from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.measure import SiteTimer
from tests.jaxlora.fuse.row_functions import SWIGLU
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import mosaic_kernels

BLOCK = dataclasses.replace(SWIGLU, shape=(2, 64, 128), inner=128, keep=0.75)
# Adapters of their own for each sequence.
RUN = jax.vmap(BLOCK, in_axes=(0, None, 0))


def arguments(dtype=jnp.bfloat16):
    """Returns (lora, frozen, x), rounded to bfloat16 and then cast."""
    given = BLOCK.arguments()
    lora = jax.tree.map(lambda a: jnp.stack([a, -a]), given["lora"])
    return jax.tree.map(lambda a: a.astype(dtype), (lora, given["frozen"], given["x"]))


def both_passes(function):
    """Returns (result, gradients of A and B, gradient of x), jitted."""

    def run(lora, frozen, x):
        y, pull = jax.vjp(lambda lora, x: function(lora, frozen, x), lora, x)
        dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, *pull(dy.astype(y.dtype))

    return jax.jit(run)


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_both_passes_by_the_oracle_and_adapters_are_isolated():
    wide = dataclasses.replace(BLOCK, dtype=jnp.float32)
    exact = both_passes(jax.vmap(wide, in_axes=(0, None, 0)))(*arguments(jnp.float32))
    plain = both_passes(RUN)(*arguments())
    with mosaic_kernels():
        lora, frozen, x = arguments()
        options = FuseOptions("mosaic")
        found = trace_call(RUN, options, (lora, frozen, x), {}).rewritten.choices
        assert {choice.part.name for choice in found} == {"producer and gate"}
        fused = both_passes(jaxlora.fuse(RUN, implementation="mosaic", strict=True))
        got = fused(lora, frozen, x)
        other = fused(lora, frozen, x.at[1].set(jnp.nan))
    leaves = (jax.tree.leaves(each) for each in (got, plain, exact))
    for one, baseline, true in zip(*leaves, strict=True):
        assert_as_accurate_as(actual=one, baseline=baseline, exact=true)
    # The first adapter's results and gradients keep their bits beside NaN.
    for one, beside in zip(*map(jax.tree.leaves, (got, other)), strict=True):
        np.testing.assert_array_equal(one[0], beside[0])


def test_ways_are_timed_while_a_function_is_traced(monkeypatch):
    traced = lambda p: jax.eval_shape(p.function, p.values, p.gradients)
    monkeypatch.setattr(measure, "_lowered", traced)
    monkeypatch.setattr(measure, "compile_program", lambda _: None)
    options = FuseOptions("mosaic", SiteTimer(100.0, timer=lambda *_: 1.0))

    def linear(lora, frozen, x):
        normed, own = BLOCK.made(x, frozen["gain"]), lora["l0"]
        return normed @ frozen["l0"] + (normed @ own["a"]) @ own["b"]

    def run(given):
        given = given["lora"], given["frozen"], given["x"]
        (choice,) = trace_call(linear, options, given, {}).rewritten.choices
        assert [*choice.seconds] == ["kernels", "producer"]
        return given[-1]

    with mosaic_kernels():
        jax.eval_shape(run, BLOCK.arguments())
