"""DoRA in the op, against PEFT's formula and its gradient by autodiff."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    FORMATS,
    Projection,
    column_norms,
    dora_gain,
    multi_lora_linears,
)
from tests.oracle import relative_error
from tests.pallas_kernels.problems import QUICK_TO_COMPILE, problem

# Slots 0 and 3 have DoRA, 1 and 2 have LoRA; of each kind, one has dropout.
USES_DORA = np.array([True, False, False, True])
RATES = (0.0, 0.5, 0.0, 0.2)
BLOCKS = (2, 0, -1, 3, 1, 0, 3)
K, N, BLOCK = 24, 40, 16
compiled = functools.partial(jax.jit, compiler_options=QUICK_TO_COMPILE)


def make_problem(seed=0, *, blocks=BLOCKS, rates=RATES, dtype=jnp.float32):
    """A problem of the op's tests with magnitudes near the norms."""
    rng = np.random.default_rng(seed)
    p, _ = problem(blocks, k=K, n=N, rates=rates, block=BLOCK, dtype=dtype, seed=seed)
    norms = np.asarray(norms_of(p))
    factor = rng.uniform(0.5, 1.5, norms.shape)
    p["m"] = jnp.asarray(np.where(USES_DORA[:, None], norms * factor, 0), jnp.float32)
    return p


def norms_of(p):
    w = p["w"] if isinstance(p["w"], jax.Array) else p["w"].dequantize(jnp.float32).T
    return compiled(column_norms)(w, p["a"], p["b"], p["scaling"])


def ours(p, w=None, names=("x", "a", "b", "m")):
    """The op as a function of what is trained, and its arguments."""
    w = p["w"] if w is None else w

    def run(x, a, b, m, blocks=p["block_adapter"]):
        drop = p["dropout"]
        dense = w if isinstance(w, jax.Array) else w.dequantize(x.dtype).T
        norms = column_norms(dense, a, b, p["scaling"])
        projection = Projection(
            w=w,
            a=a,
            b=b,
            scaling=p["scaling"],
            bias=p["bias"],
            dropout=drop,
            dora=dora_gain(m, norms, None if drop is None else drop.rate > 0),
        )
        return multi_lora_linears(x, [projection], blocks)[0]

    return run, tuple(p[name] for name in names)


def definition(p, w=None):
    """PEFT's forward pass (peft 0.21, `lora/dora.py`), a row at a time, in float64."""
    w = np.asarray(p["w"] if w is None else w, np.float64)
    drop, blocks = p["dropout"], np.asarray(p["block_adapter"])
    rows = np.repeat(blocks, BLOCK)
    keep = np.ones((len(rows), K))
    if drop is not None:
        kept_of = compiled(lambda drop, blocks: drop.keep(blocks, p["x"].shape))
        kept = kept_of(drop, np.maximum(blocks, 0))
        keep = np.asarray(kept).reshape(keep.shape)
        keep = keep / (1 - np.asarray(drop.rate, np.float64))[np.maximum(rows, 0), None]
    scaling = np.asarray(p["scaling"], np.float64)
    bias = np.asarray(p["bias"], np.float64)

    def run(x, a, b, m):
        out = jnp.zeros((len(rows), N))
        for slot, of_slot in enumerate(scaling):
            mine = (rows == slot)[:, None]
            dropped = x * keep
            delta = of_slot * dropped @ a[slot] @ b[slot]
            y = x @ w + bias + delta
            if USES_DORA[slot]:
                whole = w + of_slot * a[slot] @ b[slot]
                norm = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=0))
                c = m[slot] / norm
                y = x @ w + bias + (c - 1) * (dropped @ w) + c * delta
            out = jnp.where(mine, y, out)
        return out

    return run


def both_ways(run, num_rows: int, seed=1):
    """Compiles the output and gradients; that of y has values in padding, too."""
    dy = np.random.default_rng(seed).normal(size=(num_rows, N))

    @compiled
    def both(*arguments, **given):
        y, vjp = jax.vjp(functools.partial(run, **given), *arguments)
        return jax.tree.leaves((y, vjp(jnp.asarray(dy, y.dtype))))

    return both


def with_gradients(run, arguments):
    """Output and gradients."""
    return both_ways(run, arguments[0].shape[0])(*arguments)


@pytest.mark.parametrize(
    ("seed", "rates"),
    [
        pytest.param(
            seed,
            rates,
            id=f"{seed}-{'dropout' if rates else 'plain'}",
            marks=[pytest.mark.grid] * (seed > 1 or (seed > 0 and not rates)),
        )
        for seed in range(3)
        for rates in (None, RATES)
    ],
)
def test_equals_the_definition(seed, rates):
    """Ragged blocks in a random order, slots of both kinds, and a bias."""
    rng = np.random.default_rng(seed)
    p = make_problem(seed, blocks=tuple(rng.integers(-1, 4, 7)), rates=rates)
    run, arguments = ours(p)
    found = with_gradients(run, arguments)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in arguments]
        wanted = with_gradients(definition(p), exact)
    for name, one, other in zip(
        ("y", "dx", "da", "db", "dm"), found, wanted, strict=True
    ):
        assert relative_error(one, other) < 1e-5, name


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_norms_are_those_of_the_dequantized_weight(name):
    """With fp8, products round x; so the output is compared with them."""
    p = make_problem(rates=None)
    k, n = 128, 64
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(len(BLOCKS) * BLOCK, k)), jnp.float32)
    w = FORMATS[name].quantize(jnp.asarray(rng.normal(size=(n, k)), jnp.float32))
    a, b = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, k, 3), (4, 3, n))
    )
    m = jnp.asarray(np.where(USES_DORA[:, None], rng.uniform(1, 2, (4, n)), 0), x.dtype)
    dense = compiled(lambda w: w.dequantize(jnp.float32).T)(w)
    norms = compiled(column_norms)(dense, a, b, p["scaling"])
    whole = np.asarray(dense, np.float64) + np.asarray(p["scaling"], np.float64)[
        :, None, None
    ] * (np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    assert relative_error(norms, np.linalg.norm(whole, axis=1)) < 1e-6
    both = {
        "w": w,
        "a": a,
        "b": b,
        "scaling": p["scaling"],
    }

    @compiled
    def outputs(x, both, m, norms, blocks):
        with_dora = Projection(**both, dora=dora_gain(m, norms))
        kinds = Projection(**both), with_dora
        return [multi_lora_linears(x, [one], blocks)[0] for one in kinds]

    plain, y = outputs(x, both, m, norms, p["block_adapter"])
    rows = np.repeat(np.array(BLOCKS), BLOCK)
    factor = np.where(USES_DORA[:, None], m / norms, 1)[np.maximum(rows, 0)]
    assert relative_error(y, np.asarray(plain) * factor) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(None, id="plain", marks=pytest.mark.grid),
        pytest.param(RATES, id="dropout"),
    ],
)
def test_slots_with_lora_keep_their_bits(dtype, rates):
    """Beside DoRA they have the bits that they have in a run without.

    The program of such a run is another one, and XLA may add up float32 in another
    order there.
    """
    p = make_problem(rates=rates, dtype=dtype)
    run, arguments = ours(p)
    mixed = with_gradients(run, arguments)
    none = *arguments[:3], jnp.zeros_like(arguments[3])
    alone = with_gradients(run, none)
    projection = Projection(
        **{k: p[k] for k in ("w", "a", "b", "scaling", "bias", "dropout")}
    )

    def without(x, a, b):
        one = dataclasses.replace(projection, a=a, b=b)
        return multi_lora_linears(x, [one], p["block_adapter"])[0]

    plain = with_gradients(without, arguments[:3])
    rows = np.isin(np.repeat(np.array(BLOCKS), BLOCK), np.flatnonzero(~USES_DORA))
    for i, (one, two, other) in enumerate(zip(mixed, alone, plain, strict=False)):
        mine = rows if i < 2 else ~USES_DORA
        np.testing.assert_array_equal(one[mine], two[mine])
        if dtype == jnp.bfloat16:
            np.testing.assert_array_equal(one[mine], other[mine])
            np.testing.assert_array_equal(two, other)
        assert relative_error(two, other) < 1e-6


def test_a_slot_alone_has_the_bits_that_it_has_among_others():
    p = make_problem()
    run, arguments = ours(p)
    both, blocks = both_ways(run, arguments[0].shape[0]), p["block_adapter"]
    together = both(*arguments, blocks=blocks)
    for slot in range(4):
        mine = np.repeat(np.array(BLOCKS) == slot, BLOCK)
        found = both(*arguments, blocks=jnp.where(blocks == slot, slot, -1))
        for i, (one, other) in enumerate(zip(together, found, strict=True)):
            here = mine if i < 2 else slot
            np.testing.assert_array_equal(one[here], other[here])


def test_nan_of_a_slot_stays_its_own():
    run, arguments = ours(make_problem())
    both = both_ways(run, arguments[0].shape[0])
    clean = both(*arguments)
    mine = np.repeat(np.array(BLOCKS) == 3, BLOCK)
    for number, what in enumerate("xabm"):
        bad = np.array(arguments[number])
        bad[mine if what == "x" else 3] = np.nan
        found = both(*arguments[:number], jnp.asarray(bad), *arguments[number + 1 :])
        for i, (one, other) in enumerate(zip(found, clean, strict=True)):
            others = ~mine if i < 2 else np.arange(4) != 3
            np.testing.assert_array_equal(one[others], other[others])
        assert np.isnan(found[0][mine]).any(), what


def test_the_start_is_the_base():
    """With B zero and magnitudes that are the norms, gains are zero to the bit."""
    p = make_problem() | {"b": jnp.zeros((4, 16, N))}
    p["m"] = jnp.where(USES_DORA[:, None], norms_of(p), 0)
    run, arguments = ours(p)
    y = np.asarray(compiled(run)(*arguments))
    live = np.repeat(np.array(BLOCKS) >= 0, BLOCK)
    wanted = np.asarray(p["x"] @ p["w"] + p["bias"])[live]
    assert relative_error(y[live], wanted) < 1e-6


def test_columns_of_zeros_and_cancelled_columns_are_finite():
    w = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)
    w[:, 0] = 0
    a, b = w[None, :, 1:2], np.zeros((1, 1, N), np.float32)
    b[0, 0, 1] = -1

    @compiled
    def run(w, a, b):
        norms = column_norms(w, a, b, jnp.ones(1))
        return norms, dora_gain(jnp.ones((1, N)), norms).gain

    norms, gain = map(np.asarray, run(w, a, b))
    assert norms[0, 0] == 0 and 0 < norms[0, 1] < 0.01
    assert gain[0, 0] == 0 and np.isfinite(gain).all()


def test_errors_name_the_cure():
    p = make_problem(rates=None)
    gain = dora_gain(p["m"], norms_of(p))
    common = {k: p[k] for k in ("w", "a", "b", "scaling")}
    cases = {
        r"gains of shape \(4, 39\), wanted \(4, 40\)": dataclasses.replace(
            gain, gain=gain.gain[:, 1:]
        ),
        "no dropout. Give it one": dataclasses.replace(gain, drops=gain.is_used),
    }
    for message, dora in cases.items():
        with pytest.raises(ValueError, match=message):
            multi_lora_linears(
                p["x"], [Projection(**common, dora=dora)], p["block_adapter"]
            )
