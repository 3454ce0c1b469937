"""Random problems on quantized base weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxlora.pallas_kernels import FORMATS
from tests.pallas_kernels.problems import both_ways, given_mask, problem

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
    return FORMATS[name].quantize(w.T, **options)


def quantized_problem(kind, *, mask="dropout", **options):
    """Makes arguments of the op; feature 3 of the weight is zero.

    Args:
        kind: Key of `KINDS`.
        mask: "dropout", "given" or None.
        **options: Of `problem`.
    """
    options = {"k": 128, "n": 72, "block": BLOCK} | options
    p, _ = problem(rates=None if mask is None else (0.0, 0.5, 0.1, 0.2), **options)
    if mask == "given":
        p["dropout"] = given_mask(p)
    return p | {"w": quantize(kind, p["w"].at[:, 3].set(0))}


def compiled_both_ways(op, p):
    """Runs `both_ways` as one program, which compiles faster than its many parts."""
    arrays = {name: p[name] for name in ("x", "w", "a", "b")}
    return jax.jit(lambda arrays: both_ways(op, p | arrays))(arrays)


def padding_rows(p):
    """Returns which rows are padding."""
    return np.repeat(np.asarray(p["block_adapter"]) < 0, BLOCK)


def ragged_problem(kind, seed):
    """Makes a problem of random sizes with rows of extreme magnitudes."""
    rng = np.random.default_rng(seed)
    ranks = tuple(int(r) for r in rng.integers(1, 17, 4))
    blocks = tuple(int(b) for b in rng.integers(-1, 3, rng.integers(1, 7)))
    n = int(rng.integers(3, 80))
    p = quantized_problem(kind, blocks=blocks, ranks=ranks, n=max(n, 4), seed=seed)
    p = p | {"x": p["x"].astype(jnp.float32), "bias": p["bias"].astype(jnp.float32)}
    magnitude = 10.0 ** rng.uniform(-3, 3, (len(p["x"]), 1))
    x = p["x"] * magnitude.astype(np.float32)
    x = x.at[rng.integers(len(x))].set(0)
    return p | {"x": jnp.where(padding_rows(p)[:, None], jnp.nan, x)}


def projections_of(p, kind, sizes=(24, 72, 8)):
    """Makes fields of several projections; their weights differ a lot in magnitude."""
    keys = jax.random.split(jax.random.key(5), len(sizes))
    made = []
    for i, (key, n) in enumerate(zip(keys, sizes, strict=True)):
        w = jax.random.normal(key, (p["x"].shape[1], n)) * 10.0 ** (1 - i)
        b = jax.random.normal(key, (p["b"].shape[0], p["b"].shape[1], n))
        drop = p["dropout"]
        if drop is not None:
            drop = dataclasses.replace(drop, key=drop.key + i)
        fields = {k: p[k] for k in ("a", "scaling")}
        made.append(fields | {"w": quantize(kind, w), "b": b, "dropout": drop})
    return made
