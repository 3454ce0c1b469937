"""Linears of experts: rows, products and gradients beside loops in float64."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlora.pallas_kernels import (
    DoraGain,
    Dropout,
    Fp8Weight,
    GivenMask,
    Int8Weight,
    Mxfp4Weight,
    Nf4Weight,
    Projection,
    combine_rows,
    dropout_keys,
    expert_input,
    expert_linears,
    expert_output,
    gather_rows,
    route_rows,
)
from jaxlora.pallas_kernels.experts import of_rows
from jaxlora.pallas_kernels.triton import target as triton
from tests.oracle import relative_error
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.fused import ON_GPU, back_ends, mosaic_kernels

BACK_ENDS = back_ends()
RATES = 0.0, 0.4
GAINS = DoraGain(gain=jnp.ones((10, 48)), is_used=jnp.ones(10, bool))


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
    options = dict(options)
    block_rows = options.pop("block_rows", 64)
    plan = route_rows(expert_ids, block_adapter, *sizes, block_rows=block_rows)

    def run(x, weights, projections):
        given = dict(options)
        kernels = {"implementation": given.get("implementation", "xla")}
        rows, s = expert_input(x, projections, plan, **kernels)
        if not given.pop("combined", False):
            given["s"] = s
            outputs = expert_linears(rows, projections, plan, **given)
            return [combine_rows(y, weights, plan) for y in outputs]
        return [expert_output(rows, p, weights, plan, **given) for p in projections]

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
        {"num_experts": 5, "unused": (2,), "bias": True, "w_transposed": True},
        {"num_experts": 3, "k": 1, "num_adapters": 1, "block_adapter": (0, -1, 0)},
        {"num_experts": 12, "k": 8, "features": (32, (48, 16)), "block": 16},
    ],
)
def test_the_definition_matches_loops_over_experts_and_adapters(sizes):
    problem = experts(**sizes)
    transposed = sizes.get("w_transposed", False)
    w = [np.swapaxes(p.w, 1, 2) if transposed else p.w for p in problem.projections]
    wanted = expected(problem, w)
    for options in ({}, {"combined": True}, {"block_rows": 16}):
        got = results(problem, w_transposed=transposed, **options)
        assert_close(got, wanted)


def test_a_mask_depends_on_the_token_its_expert_and_the_feature():
    problem = experts((0, 1), k=3, num_experts=3, features=(64, (16, 8)), rates=RATES)
    plan, masks = problem.plan(), []
    for one in problem.projections:
        drop = of_rows(one.dropout, plan, 64)
        shape = plan.num_rows, 64
        kept = drop.keep(jnp.maximum(plan.slot, 0), shape).reshape(shape)
        # All tokens have all experts here, in the order of their choice.
        rows = np.take_along_axis(plan.row, np.argsort(problem.expert_ids), axis=1)
        masks.append(np.asarray(kept)[rows])  # [T, E, K]

    def kept(i, expert, token):
        keep = 1 - RATES[problem.adapter[token]]
        return masks[i][token, expert] / keep

    assert_close(results(problem), expected(problem, kept=kept))
    dropped = masks[0][64:]
    assert abs(dropped.mean() - (1 - RATES[1])) < 0.02
    for one in (dropped, masks[1][64:]):
        pairs = [
            (one[:, 0], one[:, 1]),
            (one[:-1], one[1:]),
            (one[..., 1:], one[..., :-1]),
        ]
        for a, b in pairs:  # of experts, tokens and features
            assert abs(np.mean(a == b) - (RATES[1] ** 2 + (1 - RATES[1]) ** 2)) < 0.03


def own(problem: Experts, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what belongs to adapter 0."""
    of_token = problem.adapter == 0
    of_slot = np.arange(len(found["da0"])) % problem.num_adapters == 0
    return {
        name: x[of_slot if name[:2] in ("da", "db") else of_token]
        for name, x in found.items()
    }


def assert_same_bits(got, wanted):
    for name, x in wanted.items():
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(got[name], x)


def with_nan(problem: Experts) -> Experts:
    """Makes the values of adapter 1, and the rows of padding, NaN."""
    is_one = jnp.arange(problem.num_experts * problem.num_adapters) % 2 == 1
    bad = lambda x: jnp.where(is_one[:, None, None], jnp.nan, x)
    is_zero = jnp.asarray(problem.adapter == 0)[:, None]
    return dataclasses.replace(
        problem,
        x=jnp.where(is_zero, problem.x, jnp.nan),
        weights=jnp.where(is_zero, problem.weights, jnp.nan),
        projections=tuple(
            dataclasses.replace(p, a=bad(p.a), b=bad(p.b)) for p in problem.projections
        ),
    )


def test_other_adapters_change_no_bit():
    """Alone, beside NaN, and a second time."""
    problem = experts((0, 1, -1, 1, 0), features=(64, (48,)), rates=RATES)
    together = own(problem, results(problem))
    alone = np.where(problem.block_adapter == 0, 0, -1)
    for other in (
        problem,
        with_nan(problem),
        dataclasses.replace(problem, block_adapter=alone),
    ):
        assert_same_bits(own(problem, results(other)), together)


@pytest.mark.parametrize("name", BACK_ENDS)
def test_kernels_have_the_contracts_and_the_values_of_the_definition(name):
    """Blocks of padding, which the kernels do not write, hold anything."""
    fused = BACK_ENDS[name]
    sizes = {"num_experts": 3, "unused": (1,), "k": 1, "rates": RATES, "bias": True}
    problem = experts((0, 1, -1), **sizes, dtype=fused.dtype)
    wanted = results(problem, combined=True)
    options = {"implementation": fused.implementation, "combined": True}
    with fused.kernels():
        got = results(problem, **options)
        beside_nan = results(with_nan(problem), **options)
    assert_close(got, wanted, 4e-3)
    assert_same_bits(own(problem, beside_nan), own(problem, got))


@contextlib.contextmanager
def gathering_kernels():
    """Mosaic kernels, with s of Triton's copies of rows."""
    on_cpu = triton.interpreted(triton_interpreter.run)
    with mosaic_kernels(), contextlib.nullcontext() if ON_GPU else on_cpu:
        yield


@pytest.mark.parametrize(
    ("block_rows", "kernels"),
    [(16, mosaic_kernels), (16, gathering_kernels), (64, gathering_kernels)],
)
def test_adapters_that_share_experts_keep_their_values_and_bits(block_rows, kernels):
    """Some experts have two adapters in a block of 64, and NaN stays with its owner."""
    sizes = {"num_experts": 3, "unused": (1,), "k": 1, "bias": True}
    problem = experts((0, 1, -1, 1, 0), **sizes, dtype=jnp.float16)
    wanted = results(problem, combined=True)
    options = {"implementation": "mosaic", "combined": True, "block_rows": block_rows}
    alone = np.where(problem.block_adapter == 0, 0, -1)
    with kernels():
        got = results(problem, **options)
        beside_nan = results(with_nan(problem), **options)
        alone = results(dataclasses.replace(problem, block_adapter=alone), **options)
    assert_close(got, wanted, 4e-3)
    assert_same_bits(own(problem, beside_nan), own(problem, got))
    assert_same_bits(own(problem, alone), own(problem, got))


@pytest.mark.parametrize("block_rows", [64, 16])
def test_copies_of_rows_come_with_s(block_rows):
    """Padding of blocks of 64 is zero, and s tells of infinities in shared slots' B."""
    problem = experts((0, 1, -1, 1, 0), num_experts=3, dtype=jnp.float16)
    x, (one,), blocks = problem.x, problem.projections, problem.block_adapter
    plan = route_rows(
        problem.expert_ids, jnp.asarray(blocks), 3, 2, block_rows=block_rows
    )
    one = dataclasses.replace(one, b=one.b.at[2, 0, 0].set(jnp.inf))
    with gathering_kernels():
        rows, (s,) = expert_input(x, [one], plan, implementation="mosaic")
    first = plan.slot.reshape(-1, 64 // block_rows)[:, 0]
    is_live = np.repeat(first >= 0, 64)
    wanted = np.asarray(gather_rows(x, plan))
    np.testing.assert_array_equal(rows[is_live], wanted[is_live])
    slot = np.repeat(plan.slot, block_rows)
    is_bad = slot == 2 if block_rows == 16 else np.zeros(len(slot), bool)
    assert np.isnan(s[is_bad]).all() and is_bad.any() == (block_rows == 16)
    own = (slot >= 0) & ~is_bad
    a = np.asarray(one.a.astype(x.dtype), np.float64)[slot[own]]
    factor = np.asarray(one.scaling)[slot[own] % 2, None]
    expected = factor * np.einsum("tk,tkr->tr", wanted[own].astype(np.float64), a)
    assert relative_error(s[own, : a.shape[2]], expected) < 1e-3


@pytest.mark.parametrize("weight", [Nf4Weight, Int8Weight, Fp8Weight, Mxfp4Weight])
def test_a_quantized_stack_has_the_bits_of_its_dequantized_weights(weight):
    problem = experts((0, 1), num_experts=3, features=(64, (64,)), w_transposed=True)
    (one,) = problem.projections
    stack = jax.vmap(weight.quantize)(one.w)
    dense = jax.vmap(lambda w: w.dequantize(jnp.float32))(stack)
    with_w = lambda w: dataclasses.replace(
        problem, projections=(dataclasses.replace(one, w=w),)
    )
    assert_same_bits(results(with_w(stack)), results(with_w(dense), w_transposed=True))


@pytest.mark.parametrize(
    ("num_experts", "num_adapters", "k", "block", "rows"),
    [(5, 3, 2, 64, 64), (16, 1, 4, 32, 64), (3, 4, 1, 128, 64), (5, 6, 2, 64, 16)],
)
def test_rows_are_grouped_in_the_order_of_tokens(
    num_experts, num_adapters, k, block, rows
):
    rng = np.random.default_rng(num_experts)
    adapter = rng.integers(-1, num_adapters, 6)
    scores = rng.normal(size=(6 * block, num_experts)) + 3 * rng.normal(
        size=num_experts
    )
    ids = np.argsort(-scores, axis=1)[:, :k].astype(np.int32)
    make = functools.partial(route_rows, block_rows=rows)
    make, sizes = jax.jit(make, static_argnums=(2, 3)), (num_experts, num_adapters)
    plan = make(ids, jnp.asarray(adapter, jnp.int32), *sizes)
    of_token = np.repeat(adapter, block)
    copies = [
        (ids[t, j] * num_adapters + of_token[t], t, t * k + j)
        for t in range(len(ids))
        for j in range(k)
        if of_token[t] >= 0
    ]
    slot, row = np.asarray(plan.slot), np.asarray(plan.row).reshape(-1)
    assert [plan.copy[row[copy]] for _, _, copy in copies] == [c[2] for c in copies]
    assert (np.asarray(plan.copy) < ids.size).sum() == len(copies)
    assert (row.reshape(ids.shape)[of_token < 0] >= plan.num_rows).all()
    live = np.flatnonzero(slot >= 0)
    np.testing.assert_array_equal(plan.order[: len(live)], live)
    for own_slot in range(num_experts * num_adapters):
        own = [row[copy] for s, _, copy in sorted(copies) if s == own_slot]
        blocks = live[plan.starts[own_slot] : plan.starts[own_slot + 1]]
        assert (slot[blocks] == own_slot).all()
        assert len(blocks) == -(-len(own) // rows)
        np.testing.assert_array_equal(
            own, blocks[:1].sum() * rows + np.arange(len(own))
        )
    expert = np.where(slot < 0, -1, slot // num_adapters).reshape(-1, 128 // rows)
    for tile, (first, *others) in enumerate(expert):
        assert set(others) <= {first, -1}
        assert first < 0 or plan.expert[tile] == first
    assert plan.num_tiles == (live[-1] // (128 // rows) + 1 if len(live) else 0)
    assert (plan.shared is None) == (rows == 64)


def test_shared_blocks_have_an_entry_for_each_of_their_slots():
    problem = experts((0, 1, -1, 2, 3, 4, 0), num_adapters=5, ranks=(1, 1, 1, 1, 1))
    p, sizes = problem, (problem.num_experts, problem.num_adapters)
    blocks = jnp.asarray(p.block_adapter)
    plan = jax.jit(route_rows, static_argnums=(2, 3), static_argnames="block_rows")(
        p.expert_ids, blocks, *sizes, block_rows=16
    )
    shared, small = plan.shared, np.asarray(plan.slot)
    entries = [
        (slot, block, 16 * places.min(), 16 * (places.max() + 1))
        for slot in range(plan.num_experts * plan.num_adapters)
        for block in range(len(small) // 4)
        if len(places := np.flatnonzero(small[4 * block : 4 * block + 4] == slot))
    ]
    rows = np.asarray(shared.rows)
    found = list(zip(shared.slot, shared.block, rows >> 8, rows & 255, strict=True))
    assert len(entries) == shared.starts[-1] > len(set(b for _, b, *_ in entries))
    assert [tuple(map(int, one)) for one in found[: len(entries)]] == entries
    assert (np.asarray(shared.slot)[len(entries) :] == -1).all()
    of_block = {}
    for slot, block, *_ in entries:
        of_block.setdefault(block, []).append(int(shared.color[slot]))
    assert all(len(set(one)) == len(one) for one in of_block.values())


def test_rows_for_the_adapters_that_have_tokens_are_enough():
    """With too few of them, nothing is dropped in silence."""
    problem = experts((3, 1, -1, 3), num_adapters=4, ranks=(2, 3, 4, 5), k=1)
    p, sizes = problem, (problem.num_experts, problem.num_adapters)
    (one,), blocks = p.projections, jnp.asarray(p.block_adapter)

    @functools.partial(jax.jit, static_argnums=0)
    def run(most):
        plan = route_rows(p.expert_ids, blocks, *sizes, most_adapters=most)
        rows = gather_rows(p.x, plan)
        return expert_output(rows, one, p.weights, plan), rows

    (wanted, most), (got, fewer), (too_few, _) = map(run, (None, 2, 0))
    assert len(fewer) < len(most)
    np.testing.assert_array_equal(got, wanted)
    assert np.isnan(np.asarray(too_few)).all()


def test_there_is_neither_a_sort_nor_a_sum_of_scattered_rows():
    problem = experts((0, 1), features=(64, (48,)))
    sizes = problem.num_experts, problem.num_adapters
    p = problem
    fixed = p.expert_ids, jnp.asarray(p.block_adapter), sizes, ()
    made = both_ways.trace(p.x, p.weights, p.projections, p.dy, *fixed).jaxpr
    assert not re.search(r"\b(sort|scatter[-_]add)\b", str(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": jnp.zeros(8)}, r"bias \(8,\), wanted \(5, 48\)"),
        ({"scaling": jnp.ones(10)}, r"scaling \(10,\), wanted \(2,\)"),
        ({"w": jnp.zeros((4, 64, 48))}, r"w \(4, 64, 48\), wanted \(5, 64, 48\)"),
        ({"w": Int8Weight.quantize(jnp.ones((48, 64)))}, "wanted a stack of 5"),
        (
            {"dora": GAINS},
            "not defined for experts",
        ),
        ({"dropout": GivenMask(jnp.zeros((2, 64)), jnp.ones(2))}, "take a Dropout"),
    ],
)
def test_what_is_not_of_experts_is_refused(change, message):
    problem = experts((0, 1), features=(64, (48,)))
    one = dataclasses.replace(problem.projections[0], **change)
    with pytest.raises(ValueError, match=message):
        results(dataclasses.replace(problem, projections=(one,)))


def test_rows_of_another_plan_are_refused():
    problem = experts((0, 1), features=(64, (48,)))
    with pytest.raises(ValueError, match=f"wanted the {problem.plan().num_rows} of"):
        expert_linears(problem.x, problem.projections, problem.plan())


def test_devices_of_a_mesh_route_their_own_tokens():
    """The types of arrays in `shard_map` are those of both passes."""
    problem = experts((0, 1, 1, 0), features=(64, (48,)))
    mesh, own_rows, shared = (
        Mesh(np.array(jax.devices()[:2]), ("data",)),
        P("data"),
        P(),
    )
    sizes = problem.num_experts, problem.num_adapters

    def local(x, weights, projections, dy, ids, blocks):
        given = x, weights, projections, dy, ids, blocks, sizes
        return both_ways(*given, (("combined", True),))

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(own_rows, own_rows, shared, own_rows, own_rows, own_rows),
        out_specs=(own_rows, own_rows, own_rows, shared),
    )
    p = problem
    fixed = p.dy, p.expert_ids, jnp.asarray(p.block_adapter)
    (y,), dx, dweights, (d,) = jax.jit(run)(p.x, p.weights, p.projections, *fixed)
    got = {"dx": dx, "dweights": dweights, "y0": y, "da0": d.a, "db0": d.b}
    assert_close(got, results(problem, combined=True))
