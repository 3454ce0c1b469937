"""Random problems for the kernels' tests, and what runs an op both ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.pallas_kernels import Dropout, GivenMask, dropout_keys, pack_mask

# Compiling takes most of these tests' time.
QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# XLA's CPU compiler chooses some of its fusions, and so the memory of a program, by
# LLVM's optimizations; see `compiled_quickly` in conftest.py.
AS_FOR_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


def problem(
    blocks=(2, 0, -1, 2, 1),
    *,
    k=128,
    n=192,
    ranks=(8, 3, 16, 5),
    rates=(0.0, 0.5, 0.1, 0.2),
    block=64,
    dtype=jnp.bfloat16,
    seed=0,
):
    """Makes arguments of the op with slots of mixed ranks and rates; and the ranks."""
    rng = np.random.default_rng(seed)
    t, g, r = block * len(blocks), len(ranks), max(ranks)
    live = np.arange(r) < np.array(ranks)[:, None]  # G R

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    arrays = {
        "x": normal(t, k).astype(dtype),
        "w": normal(k, n, scale=k**-0.5).astype(dtype),
        "a": normal(g, k, r, scale=k**-0.5) * live[:, None],
        "b": normal(g, r, n, scale=0.3) * live[:, :, None],
        "scaling": np.linspace(0.5, 3.0, g, dtype=np.float32),
        "block_adapter": np.array(blocks, np.int32),
        "bias": normal(n).astype(dtype),
        "dropout": None,
    }
    if rates is not None:
        arrays["dropout"] = Dropout(
            _keys(np.arange(g), np.arange(g, dtype=np.int32) + 3),
            np.array(rates, np.float32),
            rng.permutation(t).astype(np.int32),
        )
    return jax.tree.map(jnp.asarray, arrays), jnp.array(ranks, jnp.int32)


@jax.jit
def _keys(seed, step):
    return dropout_keys(seed, step, layer=1, projection=2)


@jax.jit
def given_mask(p):
    """Returns the mask of a problem's dropout as the caller would give it."""
    drop, (t, k) = p["dropout"], p["x"].shape
    kept = drop.keep(jnp.maximum(p["block_adapter"], 0), (t, k)).reshape(t, k)
    return GivenMask(pack_mask(kept), drop.inverse_keep)


def weight_of(p):
    """Returns the gradient of y."""
    shape = p["x"].shape[0], p["b"].shape[2]
    return jnp.asarray(np.random.default_rng(9).standard_normal(shape, np.float32))


def both_ways(op, p):
    """Runs an op forward and backward; returns (y, gradients of x, a and b)."""
    weight = weight_of(p)

    def forward(x, a, b):
        return op(**p | {"x": x, "a": a, "b": b})

    y, vjp = jax.vjp(forward, p["x"], p["a"], p["b"])
    return y, *vjp(weight.astype(y.dtype))


def compiled_both_ways(op, p):
    """Runs `both_ways` as one program, which compiles faster than its many parts.

    It is compiled once for each op and all arrays of the same shapes and slots.
    """
    slots = tuple(np.asarray(p["block_adapter"]).tolist())
    arrays = {name: p[name] for name in p if name != "block_adapter"}
    return _both_ways(arrays, op, slots)


@functools.partial(
    jax.jit, static_argnames=("op", "slots"), compiler_options=QUICK_TO_COMPILE
)
def _both_ways(arrays, op, slots):
    with jax.ensure_compile_time_eval():  # the definition loops over the slots
        blocks = jnp.array(slots, jnp.int32)
    return both_ways(op, arrays | {"block_adapter": blocks})
