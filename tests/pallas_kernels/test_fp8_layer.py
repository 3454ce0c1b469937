"""The linear on an fp8 base in Hopper's kernels; see test_fused.py for the others.

The definition is the XLA back end's in float32, with the same quantized operands.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    Dropout,
    Fp8Weight,
    Projection,
    multi_lora_linears,
)
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import MOSAIC, mosaic_kernels
from tests.pallas_kernels.problems import (
    QUICK_TO_COMPILE,
    given_mask,
    problem,
    weight_of,
)

RANKS, RATES = (8, 3, 16), (0.0, 0.5, 0.1)


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


def _problems(widths, ranks, **options):
    """Makes problems of linears that share x, blocks and tokens, and their ranks.

    A row of x and an output feature are zero.
    """
    made = [
        problem(n=n, ranks=ranks[i % len(ranks)], seed=i, **options)
        for i, n in enumerate(widths)
    ]
    first = made[0][0]
    x = np.array(first["x"])
    x[3] = 0
    first["x"] = jnp.asarray(x)
    for p, rank in made:
        p["x"], w = first["x"], np.array(p["w"])
        w[:, 5] = 0
        p["w"] = jnp.asarray(w)
        p["scaling"] = jnp.asarray(np.where(rank > 0, p["scaling"], np.float32(0)))
        if p["dropout"] is not None:
            own, shared = p["dropout"], first["dropout"]
            p["dropout"] = Dropout(own.key, own.rate, shared.token_index)
    return made


@functools.partial(jax.jit, static_argnames=("transposed", "fp8_backward"))
def _quantized(w, **options):
    return Fp8Weight.quantize(w.T, **options)


def _weight(p, **options):
    return _quantized(p["w"], **options)


def _run(problems, weights, *, implementation="mosaic", dtype=jnp.bfloat16):
    """Returns (y of each projection, dx, (da, db) of each projection)."""
    x = problems[0][0]["x"].astype(dtype)
    blocks = problems[0][0]["block_adapter"]

    def op(x, matrices):
        made = [
            Projection(
                a=a,
                b=b,
                w=w,
                rank=rank,
                **{name: p[name] for name in ("scaling", "bias", "dropout")},
            )
            for (a, b), w, (p, rank) in zip(matrices, weights, problems, strict=True)
        ]
        return multi_lora_linears(x, made, blocks, implementation=implementation)

    @functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)
    def both_ways(x, matrices, dy):
        y, vjp = jax.vjp(op, x, matrices)
        return y, *vjp(dy)

    # All runs get the same dy, which is quantized.
    dy = [p.get("dy", weight_of(p)).astype(jnp.bfloat16) for p, _ in problems]
    matrices = [(p["a"], p["b"]) for p, _ in problems]
    return both_ways(x, matrices, tuple(d.astype(dtype) for d in dy))


CASES = {
    "two linears of mixed ranks": ((128, 128), (RANKS, (0, 16, 1)), RATES, {}),
    "no dropout, second copy": ((384,), (RANKS,), None, {"transposed": True}),
    "two chunks of ranks, given mask": ((128,), ((100, 3, 0),), RATES, {}),
    "backward in bfloat16": ((128,), (RANKS,), None, {"fp8_backward": False}),
}


# Both products, and all that a projection may have, are in the others.
OF_THE_GRID = (
    "two linears of mixed ranks",
    "no dropout, second copy",
    "backward in bfloat16",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.grid if case in OF_THE_GRID else ())
        for case in CASES
    ],
)
def test_matches_the_definition(case):
    widths, ranks, rates, options = CASES[case]
    k = 256 if options.get("transposed") else 128  # more takes the interpreter longer
    problems = _problems(widths, ranks, rates=rates, blocks=(1, -1, 0, 2), k=k)
    if "given mask" in case:
        problems = [(p | {"dropout": given_mask(p)}, rank) for p, rank in problems]
    weights = [_weight(p, **options) for p, _ in problems]
    got = _run(problems, weights)
    low, exact = (
        _run(problems, weights, implementation="xla", dtype=dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    trees = map(jax.tree.leaves, (got, low, exact))
    for actual, baseline, want in zip(*trees, strict=True):
        assert_as_accurate_as(actual=actual, baseline=baseline, exact=want)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_other_slots_padding_and_a_second_copy_change_no_bit():
    """Slot 0 and its rows diverge, and the rows of padding hold NaN."""
    ((p, rank),) = _problems((128,), (RANKS,), rates=RATES, blocks=(2, 0, -1, 1), k=128)
    y, dx, ((da, db),) = _run([(p, rank)], [_weight(p)])
    rows = np.repeat(np.asarray(p["block_adapter"]), 64)[:, None]
    q = p | {name: p[name].at[0].set(jnp.nan) for name in ("a", "b")}
    q["x"] = jnp.where(rows == 0, jnp.inf, jnp.where(rows < 0, jnp.nan, p["x"]))
    q["dy"] = jnp.where(rows < 1, jnp.nan, weight_of(p))
    other = _run([(q, rank)], [_weight(p, transposed=True)])
    other_y, other_dx, ((other_da, other_db),) = other
    mine, padding = rows[:, 0] != 0, rows[:, 0] < 0
    for got, want in ((other_y[0], y[0]), (other_dx, dx)):
        np.testing.assert_array_equal(got[mine], want[mine])
        assert not np.asarray(got, np.float32)[padding].any()
    np.testing.assert_array_equal(other_da[1:], da[1:])
    np.testing.assert_array_equal(other_db[1:], db[1:])


def test_only_bfloat16_is_supported():
    p, rank = MOSAIC.problem((0,), dtype=jnp.float16)
    with pytest.raises(ValueError, match="bfloat16 only, not float16"):
        _run([(p, rank)], [_weight(p)], dtype=jnp.float16)


def test_features_must_fill_steps_of_128_values():
    for n, k in ((192, 128), (128, 192)):
        ((p, rank),) = _problems((n,), (RANKS,), blocks=(0, 1), k=k)
        with pytest.raises(ValueError, match="not multiples of 128"):
            _run([(p, rank)], [_weight(p)])
