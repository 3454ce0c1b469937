"""Random problems on quantized base weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.problems import given_mask, problem
from tests.pallas_kernels.quantized.weights import quantized

# Every format, and every way to compute with it.
KINDS = {
    "fp8": ("fp8", {}),
    "fp8-transposed": ("fp8", {"transposed": True}),
    "fp8-forward": ("fp8", {"fp8_backward": False}),
    "int8": ("int8", {}),
    "nf4": ("nf4", {}),
}
BLOCK = 16


def quantize(kind, w):
    """Quantizes a weight [K, N]."""
    name, options = KINDS[kind]
    return quantized(name, w.T, **options)


def quantized_problem(kind, *, mask="dropout", **options):
    """Makes arguments of the op; feature 3 of the weight is zero.

    Args:
        kind: Key of `KINDS`.
        mask: "dropout", "given" or None.
        **options: Of `problem`.
    """
    options = {"blocks": (2, -1, 0, 1), "ranks": (8, 3, 16, 5)} | options
    options = {"k": 128, "n": 72, "block": BLOCK, "dtype": jnp.bfloat16} | options
    rates = None if mask is None else (0.0, 0.5, 0.1, 0.2)
    p, _ = problem(rates=rates, **options)
    if mask == "given":
        p["dropout"] = given_mask(p)
    w = np.array(p["w"])
    w[:, 3] = 0
    return p | {"w": quantize(kind, w)}


def padding_rows(p):
    """Returns which rows are padding."""
    return np.repeat(np.asarray(p["block_adapter"]) < 0, BLOCK)


def ragged_problem(kind, seed):
    """Makes a problem of random slots and ranks, with rows of extreme magnitudes."""
    rng = np.random.default_rng(seed)
    ranks = *(int(r) for r in rng.integers(1, 17, 3)), 16
    blocks = tuple(int(b) for b in rng.integers(-1, 3, 4))
    p = quantized_problem(kind, blocks=blocks, ranks=ranks, seed=seed)
    x, bias = (np.array(p[name], np.float32) for name in ("x", "bias"))
    x *= 10.0 ** rng.uniform(-3, 3, (len(x), 1)).astype(np.float32)
    x[rng.integers(len(x))] = 0
    x[padding_rows(p)] = np.nan
    return p | {"x": jnp.asarray(x), "bias": jnp.asarray(bias)}


def projections_of(p, kind, sizes=(24, 72)):
    """Makes fields of several projections; their weights differ a lot in magnitude."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    made = []
    for i, n in enumerate(sizes):
        w = jnp.asarray(normal(p["x"].shape[1], n) * np.float32(10.0 ** (1 - i)))
        b = jnp.asarray(normal(*p["b"].shape[:2], n))
        drop = p["dropout"]
        if drop is not None:
            drop = dataclasses.replace(drop, key=drop.key + i)
        fields = {k: p[k] for k in ("a", "scaling")}
        made.append(fields | {"w": quantize(kind, w), "b": b, "dropout": drop})
    return made
