"""The gated delta rule through Triton: its kernels in the interpreter, and compiled."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.models.config import DeltaShape
from jaxlora.modules import triton_gated_delta
from jaxlora.modules.triton_gated_delta import (
    delta_implementation,
    tiles_of,
    triton_delta_unsupported,
    triton_gated_delta_rule,
)
from jaxlora.pallas_kernels.triton import gated_delta as kernels
from jaxlora.pallas_kernels.triton.target import (
    forced_capability,
    interpreted,
    present_target,
)
from tests.oracle import relative_error
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.triton_facts import kernel_facts, shared_memory_bytes

# Lengths of samples; negative: padding. One row, a chunk and a row less or more, and
# several chunks; a sample longer than the rows of a scan's stretch.
RAGGED = (1, 63, -7, 64, 65, 200)
SHORT = (1, 20, -7, 80, 20)
LONG = (20, 270)
KINDS = {
    "alike keys without decay": {"alike": 0.9, "decay": 0.0, "beta": 1.0},
    "the same key": {"alike": 1.0, "decay": 0.1, "beta": 0.99},
    "strong decay": {"decay": 100.0},
    "weak decay": {"decay": 1e-3},
}


def _run(kernel, inputs, out_types, grid, constants):
    # jax_triton refuses other constants.
    assert constants.keys() == {*kernel.arg_names[len(inputs) + len(out_types) :]}
    return triton_interpreter.run(kernel, inputs, out_types, grid, constants)


@pytest.fixture(autouse=True)
def _interpreter():
    with interpreted(_run):
        yield


def segments_of(lengths):
    numbers = [i if n > 0 else -1 for i, n in enumerate(lengths)]
    return jnp.asarray(np.repeat(np.array(numbers, np.int32), np.abs(lengths)))


def drawn(
    num, dtype=jnp.float32, *, shape=(1, 1, 32, 16), alike=0.0, decay=1.0, beta=None,
    seed=0,
):  # fmt: skip
    """Inputs of the rule, and a gradient of its output.

    Args:
        num: Number of rows.
        dtype: Dtype of all but the gates.
        shape: Number of key heads and value heads, and features of keys and values.
        alike: Share of a common direction in the keys.
        decay: Factor of the logarithms of the decays.
        beta: Share that is corrected; None: random.
        seed: Seed.
    """
    rng = np.random.default_rng(seed)
    key_heads, heads, key_dim, value_dim = shape
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys, gates = (num, key_heads, key_dim), (num, heads)
    k = (1 - alike) * unit(rng.normal(size=keys))
    k += alike * unit(rng.normal(size=key_dim))
    betas = rng.uniform(size=gates) if beta is None else np.full(gates, beta)
    numbers = (
        unit(rng.normal(size=keys)),
        unit(k),
        rng.normal(size=(*gates, value_dim)),
        -decay * np.exp(rng.normal(size=gates) - 1),
        betas,
        rng.normal(size=(*gates, value_dim)),
    )
    wide = jnp.float32
    dtypes = dtype, dtype, dtype, wide, wide, dtype
    return [jnp.asarray(x, d) for x, d in zip(numbers, dtypes, strict=True)]


def both_ways(rule, *numbers):
    """The output, and the gradients of all inputs."""
    *given, dout, segments = numbers
    out, backward = jax.vjp(lambda *x: rule(*x, segments), *given)
    return out, *backward(dout)


through_triton = jax.jit(functools.partial(both_ways, triton_gated_delta_rule))


@functools.partial(jax.jit, static_argnums=0)
def _stepped(rule, *numbers):
    return both_ways(rule, *numbers)


def _recurrence(q, k, v, g, beta, segments):
    """The definition, one row after the other, in the dtype of the arrays."""
    repeats, size = v.shape[1] // q.shape[1], q.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in (q, k))
    starts = jnp.append(True, segments[1:] != segments[:-1])

    def step(state, row):
        q, k, v, g, beta, is_start, is_row = row
        state = jnp.where(is_start, 0, state) * jnp.exp(g)[:, None, None]
        error = beta[:, None] * (v - jnp.einsum("hk,hke->he", k, state))
        state += k[:, :, None] * error[:, None]
        out = jnp.einsum("hk,hke->he", q, state) * size**-0.5
        return state, jnp.where(is_row, out, 0)

    state = jnp.zeros((v.shape[1], size, v.shape[2]), v.dtype)
    rows = q, k, v, g, beta, starts, segments >= 0
    return jax.lax.scan(step, state, rows)[1]


def exact(*numbers):
    """The output and the gradients in float64."""
    *given, segments = numbers
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in given]
        return [
            np.asarray(x) for x in _stepped(_recurrence, *wide, np.asarray(segments))
        ]


def check(numbers, segments, out_error, gradient_error):
    got = through_triton(*numbers, segments)
    wide = exact(*numbers, segments)
    assert relative_error(got[0], wide[0]) < out_error
    for actual, wanted in zip(got, wide, strict=True):
        # The gradient of a strong decay is a small difference of numbers near 1.
        scale = max(np.abs(wanted).max(), 0.1)
        assert np.abs(actual - wanted).max() < gradient_error * scale
        assert not np.asarray(actual)[np.asarray(segments) < 0].any()


def test_float32_equals_the_recurrence():
    segments = segments_of(RAGGED)
    check(drawn(len(segments)), segments, 3e-6, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_decays_may_be_of_any_kind(kind):
    segments = segments_of((70, 10))
    check(drawn(len(segments), **KINDS[kind]), segments, 3e-6, 2e-5)


def test_rows_that_correct_nothing_have_a_gradient_of_beta():
    segments = segments_of((70,))
    q, k, v, g, beta, dout = drawn(len(segments))
    check((q, k, v, g, beta.at[::3].set(0), dout), segments, 3e-6, 1e-5)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((2, 4, 16, 32), (5, 66)), ((1, 1, 128, 16), LONG), ((1, 3, 96, 32), (70,))],
)
def test_rounded_operands_cost_little_accuracy(shape, lengths):
    segments = segments_of(lengths)
    numbers = drawn(len(segments), jnp.float16, shape=shape)
    check(numbers, segments, 3e-3, 3e-3)


def test_nan_stays_in_its_sample():
    segments = np.asarray(segments_of(SHORT))
    numbers = drawn(len(segments))
    wanted = through_triton(*numbers, segments)
    bad = segments == 3
    row = np.flatnonzero(bad)[3]
    got = through_triton(*(x.at[row].set(jnp.nan) for x in numbers), segments)
    for actual, other in zip(got, wanted, strict=True):
        assert np.isnan(np.asarray(actual)[bad]).any()
        np.testing.assert_array_equal(actual[~bad], other[~bad])


def test_what_padding_holds_counts_for_nothing():
    segments = np.asarray(segments_of(SHORT))
    numbers = drawn(len(segments))
    wanted = through_triton(*numbers, segments)
    padding = segments < 0
    got = through_triton(*(x.at[padding].set(jnp.nan) for x in numbers), segments)
    for actual, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(actual, other)


def test_the_place_in_a_row_and_the_neighbours_change_no_bit():
    """Twice at the same place, and then another one beside other samples."""
    sample = drawn(100, seed=99)

    def rows_of_sample(lengths, number, seed):
        ends = np.cumsum(np.abs(lengths))
        rows = slice(ends[number] - 100, ends[number])
        others = drawn(int(ends[-1]), seed=seed)
        numbers = [x.at[rows].set(y) for x, y in zip(others, sample, strict=True)]
        got = through_triton(*numbers, segments_of(lengths))
        return [np.asarray(x)[rows] for x in got]

    alone = rows_of_sample((100,), 0, seed=1)
    for lengths, number in (((100, -28), 0), ((1, 70, -3, 100, 20), 3)):
        for actual, wanted in zip(
            rows_of_sample(lengths, number, seed=2), alone, strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)


def test_recomputing_it_changes_no_bit_and_keeps_nothing():
    segments = segments_of((10, 70))
    numbers = drawn(len(segments))
    remat = jax.checkpoint(triton_gated_delta_rule)
    recomputed = jax.jit(functools.partial(both_ways, remat))(*numbers, segments)
    kept = through_triton(*numbers, segments)
    for actual, wanted in zip(recomputed, kept, strict=True):
        np.testing.assert_array_equal(actual, wanted)

    def forward(q, k, v, g, beta, segments):
        given = q, k, v, g, beta
        return jax.vjp(lambda *x: remat(*x, segments), *given)[1]

    *given, _ = numbers
    kept = jax.tree.leaves(jax.eval_shape(forward, *given, segments))
    found = sum(x.size * x.dtype.itemsize for x in kept)
    inputs = sum(x.nbytes for x in (*given, segments))
    assert found <= inputs


def test_vmap_gives_the_values_of_a_loop():
    segments = segments_of((30, 50))
    each = [drawn(len(segments), seed=seed) for seed in (0, 1)]
    run = functools.partial(both_ways, triton_gated_delta_rule)
    run = jax.vmap(run, in_axes=(*[0] * 6, None))
    got = jax.jit(run)(*map(jnp.stack, zip(*each, strict=True)), segments)
    for i, numbers in enumerate(each):
        wanted = through_triton(*numbers, segments)
        for actual, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(actual[i], other)


# ---- compiled, without a GPU ---------------------------------------------------------

X, F32, I32 = "*bf16", "*fp32", "*i32"
PLACES = [I32] * 4
KERNELS = {
    "prepare": (kernels.delta_prepare, [X, X, F32, F32, *PLACES, F32, X, X]),
    "forward": (
        kernels.delta_forward,
        [X, X, X, F32, F32, X, X, *PLACES, I32, X, X, X],
    ),
    "backward": (
        kernels.delta_backward,
        [X, X, X, F32, F32, X, X, *PLACES, I32, X, X],
    ),
    "products": (
        kernels.delta_products,
        [*[X] * 5, F32, F32, *PLACES, X, X, F32, F32],
    ),
    "gradients": (
        kernels.delta_gradients,
        [*[X] * 5, F32, *[X] * 4, *PLACES, X, X, F32],
    ),
}
# The most bytes that a thread may spill: registers most of which it needs once a chunk.
SPILLED_BYTES = 320
ALWAYS = {
    ("gradients", 128, 32, 89),
    ("prepare", 96, 32, 80),
    ("prepare", 128, 48, 80),
    ("backward", 128, 48, 90),
}
COMPILED = [
    pytest.param(
        *case,
        marks=() if case in ALWAYS else pytest.mark.grid,
        id="-".join(map(str, case)),
    )
    for case in itertools.product(KERNELS, (64, 96, 128), (32, 48), (80, 89, 90, 120))
    if case[1:3] != (96, 48)
]


@pytest.mark.parametrize(("name", "size", "heads", "capability"), COMPILED)
def test_a_tile_fits_and_hardly_spills(name, size, heads, capability, monkeypatch):
    # Compiled kernels are kept where the tests' programs are kept.
    folder = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")
    kernel, pointers = KERNELS[name]
    tile = getattr(tiles_of(jnp.bfloat16, size, size, capability), name)
    constants = {"H": heads, "HK": 16, "K": size, "KP": 64 if size == 64 else 128}
    constants |= {"E": size, "SCALE": 0.1, "PRECISION": "tf32", "KEPT": True}
    facts = kernel_facts(
        kernel,
        pointers,
        constants | tile.sizes,
        capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert facts.local_bytes <= SPILLED_BYTES, facts
    assert facts.shared_bytes <= shared_memory_bytes(capability), facts


# ---- where it can run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim", "reason"),
    [
        (jnp.bfloat16, 128, 128, None),
        (jnp.float32, 64, 96, None),
        (jnp.int8, 128, 128, "dtype int8 is none of bfloat16, float16, float32"),
        (
            *(jnp.bfloat16, 256, 128),
            "keys have 256 features, which is none of 16, 32, 64, 96, 128",
        ),
    ],
)
def test_what_it_can_run(dtype, key_dim, value_dim, reason):
    shape = DeltaShape(
        num_key_heads=1,
        num_value_heads=2,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=4,
    )
    with forced_capability(89, num_sms=142):
        assert triton_delta_unsupported(dtype, shape) == reason
        assert delta_implementation(dtype, shape) == ("xla" if reason else "triton")


@pytest.mark.parametrize(
    ("dtype", "sizes", "compared"),
    [
        (jnp.bfloat16, (128, 128), True),
        (jnp.float16, (128, 128), True),
        (jnp.float32, (128, 128), False),
        (jnp.bfloat16, (64, 128), False),
        (jnp.bfloat16, (128, 64), False),
    ],
)
def test_hopper_has_its_own_products_where_they_were_compared(
    dtype, sizes, compared, monkeypatch
):
    asked = []

    def target(*, hopper):
        asked.append(hopper)
        return present_target()

    monkeypatch.setattr(triton_gated_delta, "present_target", target)
    *given, _ = drawn(10, dtype, shape=(1, 1, *sizes))
    jax.eval_shape(triton_gated_delta_rule, *given, segments_of((10,)))
    assert asked == [compared]
