"""Linears of experts: rows, products and gradients beside loops in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    Dropout,
    Projection,
    combine_rows,
    dropout_keys,
    expert_linears,
    gather_rows,
    route_rows,
)
from tests.oracle import relative_error


@dataclasses.dataclass(frozen=True)
class Experts:
    """A problem: tokens, routes, and linears that share the tokens' rows.

    Attributes:
        x: [T, K].
        expert_ids: [T, k].
        weights: Weights of the copies, [T, k].
        block_adapter: Adapter of each block of tokens.
        projections: The linears.
        dy: Gradient of each combined y, [T, N].
        num_experts: E.
        num_adapters: G.
    """

    x: jax.Array
    expert_ids: jax.Array
    weights: jax.Array
    block_adapter: np.ndarray
    projections: tuple[Projection, ...]
    dy: tuple[jax.Array, ...]
    num_experts: int
    num_adapters: int

    def plan(self):
        sizes = self.num_experts, self.num_adapters
        return route_rows(self.expert_ids, jnp.asarray(self.block_adapter), *sizes)

    @property
    def adapter(self) -> np.ndarray:
        """The adapter of each token."""
        return np.repeat(self.block_adapter, len(self.x) // len(self.block_adapter))


def experts(
    block_adapter=(0, 1, -1, 0),
    *,
    num_experts=5,
    num_adapters=2,
    k=2,
    features=(128, (128,)),
    ranks=(3, 8),
    block=64,
    bias=False,
    w_transposed=False,
    rates=None,
    unused=(),
    dtype=jnp.float32,
    seed=0,
):
    """Makes a problem; `unused` experts have no tokens."""
    rng = np.random.default_rng(seed)
    t, (width, out), slots = (
        block * len(block_adapter),
        features,
        num_experts * num_adapters,
    )
    scores = rng.normal(size=(t, num_experts)) + rng.normal(size=num_experts)
    scores[:, list(unused)] = -np.inf
    adapter_ranks = np.array(ranks)[:num_adapters]

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    def linear(i, n):
        shape = (n, width) if w_transposed else (width, n)
        r = max(adapter_ranks)
        live = np.tile(np.arange(r) < adapter_ranks[:, None], (num_experts, 1))
        dropout = None
        if rates is not None:
            step = jnp.arange(num_adapters) + 3
            key = dropout_keys(jnp.arange(num_adapters), step, 1, i)
            index = jnp.asarray(rng.permutation(t), jnp.int32)
            dropout = Dropout(
                key, jnp.asarray(rates[:num_adapters], jnp.float32), index
            )
        return Projection(
            w=normal(num_experts, *shape, scale=width**-0.5).astype(dtype),
            a=normal(slots, width, r, scale=width**-0.5) * live[:, None],
            b=normal(slots, r, n, scale=0.3) * live[:, :, None],
            scaling=jnp.linspace(0.5, 2.0, num_adapters),
            rank=jnp.asarray(adapter_ranks, jnp.int32),
            bias=normal(num_experts, n).astype(dtype) if bias else None,
            dropout=dropout,
        )

    return Experts(
        x=normal(t, width).astype(dtype),
        expert_ids=jnp.asarray(np.argsort(-scores, axis=1)[:, :k], jnp.int32),
        weights=jnp.asarray(rng.uniform(size=(t, k)), jnp.float32),
        block_adapter=np.array(block_adapter, np.int32),
        projections=tuple(linear(i, n) for i, n in enumerate(out)),
        dy=tuple(normal(t, n).astype(dtype) for n in out),
        num_experts=num_experts,
        num_adapters=num_adapters,
    )


@functools.partial(jax.jit, static_argnames=("sizes", "options"))
def both_ways(x, weights, projections, dy, expert_ids, block_adapter, sizes, options):
    """Returns y of each linear, and the gradients of x, weights and projections."""
    plan = route_rows(expert_ids, block_adapter, *sizes)

    def run(x, weights, projections):
        rows = gather_rows(x, plan)
        outputs = expert_linears(rows, projections, plan, **dict(options))
        return [combine_rows(y, weights, plan) for y in outputs]

    y, back = jax.vjp(run, x, weights, projections)
    return y, *back(list(dy))


def results(problem: Experts, **options):
    """Returns y, dx, dweights and (da, db) of each linear, as arrays by name."""
    p = problem
    sizes = p.num_experts, p.num_adapters
    fixed = p.expert_ids, jnp.asarray(p.block_adapter), sizes, tuple(options.items())
    y, dx, dweights, d = both_ways(p.x, p.weights, p.projections, p.dy, *fixed)
    named = {"dx": dx, "dweights": dweights}
    for i, (y_i, one) in enumerate(zip(y, d, strict=True)):
        named |= {f"y{i}": y_i, f"da{i}": one.a, f"db{i}": one.b}
    return {name: np.asarray(x) for name, x in named.items()}


def expected(problem: Experts, w=None, kept=None):
    """Returns the same by loops over tokens' copies in float64.

    Args:
        problem: The problem.
        w: The weights of each linear, [E, K, N]; None: the problem's, so stored.
        kept: Which features are kept, as a function of (linear, expert, token).
    """
    p, wide = problem, lambda x: np.asarray(x, np.float64)
    x, weights = wide(p.x), wide(p.weights)
    out = {"dx": np.zeros_like(x), "dweights": np.zeros_like(weights)}
    for i, (one, dy) in enumerate(zip(p.projections, p.dy, strict=True)):
        dy, a, b = wide(dy), wide(one.a), wide(one.b)
        y, da, db = np.zeros(dy.shape), np.zeros(a.shape), np.zeros(b.shape)
        base = wide(one.w if w is None else w[i])
        for t, adapter in enumerate(p.adapter):
            for j, e in enumerate(p.expert_ids[t] if adapter >= 0 else ()):
                slot = int(e) * p.num_adapters + adapter
                mask = np.ones(x.shape[1]) if kept is None else kept(i, int(e), t)
                bias = 0 if one.bias is None else wide(one.bias)[e]
                h = float(one.scaling[adapter]) * (x[t] * mask) @ a[slot]
                copy = x[t] @ base[e] + bias + h @ b[slot]
                weighted = weights[t, j] * dy[t]
                dh = float(one.scaling[adapter]) * (b[slot] @ weighted)
                y[t] += weights[t, j] * copy
                out["dweights"][t, j] += copy @ dy[t]
                db[slot] += np.outer(h, weighted)
                da[slot] += np.outer(x[t] * mask, dh)
                out["dx"][t] += base[e] @ weighted + mask * (a[slot] @ dh)
        out |= {f"y{i}": y, f"da{i}": da, f"db{i}": db}
    return out


def assert_close(got, wanted, tolerance=1e-5):
    assert got.keys() == wanted.keys()
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts": 5, "k": 2, "unused": (2,), "bias": True},
        {"num_experts": 3, "k": 1, "num_adapters": 1, "block_adapter": (0, -1, 0)},
        {"num_experts": 12, "k": 8, "features": (32, (48, 16)), "block": 16},
    ],
)
def test_matches_loops_over_experts_and_adapters(sizes):
    problem = experts(**sizes)
    assert_close(results(problem), expected(problem))
