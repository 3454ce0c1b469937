"""`multi_lora_linear` agrees with its definition, and no slot changes another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    Dropout,
    Projection,
    dropout_keys,
    kernel_settings,
    mask_words,
    multi_lora_linear,
    multi_lora_linears,
)
from jaxlora.pallas_kernels.dropout import inverse_keep, keep_mask
from tests.drawn import Draws, normal
from tests.oracle import assert_as_accurate_as, relative_error
from tests.pallas_kernels.reference import multi_lora_linear_reference

K, N, R, G, BLOCK = 24, 40, 8, 4, 16
BLOCK_ADAPTER = np.array([2, 0, -1, 2, 1], np.int32)  # slot 3 is absent
RANKS = (8, 3, 1, 5)
RATES = (0.0, 0.5, 0.1, 0.2)


def problem(dtype=jnp.float32):
    draws = Draws(0)
    t = BLOCK * len(BLOCK_ADAPTER)
    live = np.arange(R) < np.array(RANKS)[:, None]  # G R
    drawn = lambda *shape: np.asarray(draws.normal(*shape))
    arrays = {
        "x": drawn(t, K).astype(dtype),
        "w": (drawn(K, N) * K**-0.5).astype(dtype),
        "a": drawn(G, K, R) * live[:, None, :],
        "b": drawn(G, R, N) * live[:, :, None],
        "scaling": np.array([2.0, 0.5, 1.0, 3.0], np.float32),
        "block_adapter": BLOCK_ADAPTER,
        "bias": drawn(N).astype(dtype),
    }
    return jax.tree.map(jnp.asarray, arrays)


keys_of = jax.jit(dropout_keys, static_argnames=("layer", "projection"))


def dropout(step=3):
    t = BLOCK * len(BLOCK_ADAPTER)
    keys = keys_of(np.arange(G), np.full(G, step), layer=1, projection=2)
    return Dropout(keys, jnp.array(RATES), jnp.asarray(np.arange(t) * 7 % t))


def run(op, p, **options):
    """Runs an op by one program; the definition reads the slots when it is traced."""
    slots = {"block_adapter": p["block_adapter"]}
    return jax.jit(lambda p: op(**p | slots, **options))(p)


@pytest.mark.parametrize("mask", [None, dropout()], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matches_the_definition(dtype, mask):
    p = problem(dtype)
    exact = run(multi_lora_linear_reference, p, dropout=mask)
    low = {k: v.astype(dtype) if k in "xwab" else v for k, v in p.items()}
    with jax.numpy_dtype_promotion("standard"):
        plain = run(multi_lora_linear_reference, low, dropout=mask).astype(dtype)
    actual = run(multi_lora_linear, p, dropout=mask)
    assert_as_accurate_as(actual=actual, baseline=plain, exact=exact)


@pytest.mark.parametrize("mask", [None, dropout()], ids=["plain", "dropout"])
def test_gradients_match_those_of_the_definition(mask):
    p = problem()
    weight = normal(9, (p["x"].shape[0], N))

    def total(op, x, a, b):
        return (op(**(p | {"x": x, "a": a, "b": b}), dropout=mask) * weight).sum()

    actual, wanted = (
        jax.jit(jax.grad(functools.partial(total, op), argnums=(0, 1, 2)))(
            p["x"], p["a"], p["b"]
        )
        for op in (multi_lora_linear, multi_lora_linear_reference)
    )
    for name, got, want in zip("xab", actual, wanted, strict=True):
        assert relative_error(got, want) < 1e-5, name
    assert not actual[1][3].any(), "an absent adapter has a gradient"
    assert not actual[1][1][:, 3:].any(), "padding of the rank has a gradient"


def test_the_base_is_frozen():
    p = problem()

    def total(w, bias):
        return multi_lora_linear(**(p | {"w": w, "bias": bias})).sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(p["w"], p["bias"]):
        assert not np.asarray(gradient).any()


def test_zero_b_is_the_base_layer_to_the_bit():
    p = problem()
    p["b"] = jnp.zeros_like(p["b"])
    wanted = jnp.matmul(p["x"], p["w"]) + p["bias"]
    wanted = jnp.where(np.repeat(BLOCK_ADAPTER >= 0, BLOCK)[:, None], wanted, 0)
    actual = run(multi_lora_linear, p, dropout=dropout())
    np.testing.assert_array_equal(actual, wanted)


def test_storage_of_the_base_changes_nothing():
    p = problem()
    wanted = run(multi_lora_linear, p)
    w = np.asarray(p["w"])
    stack = np.stack([np.full_like(w, np.nan), w])
    for other in (
        {"w": w.T, "w_transposed": True},
        {"w": stack, "layer": 1},
        {"w": stack.transpose(0, 2, 1), "w_transposed": True, "layer": jnp.int32(1)},
    ):
        options = {k: v for k, v in other.items() if k != "w"}
        found = run(multi_lora_linear, p | {"w": jnp.asarray(other["w"])}, **options)
        assert relative_error(found, wanted) < 1e-6


def test_renaming_adapters_changes_no_bit():
    p = problem()
    order = np.array([3, 1, 0, 2])  # new slot i holds old adapter order[i]
    place = np.argsort(order)
    renamed = p | {k: p[k][order] for k in ("a", "b", "scaling")}
    blocks = np.where(BLOCK_ADAPTER >= 0, place[np.maximum(BLOCK_ADAPTER, 0)], -1)
    renamed["block_adapter"] = jnp.asarray(blocks, jnp.int32)
    both = (run(multi_lora_linear, one) for one in (renamed, p))
    np.testing.assert_array_equal(*both)


@jax.jit
def both_ways(p, a, b, x, dy):
    run = lambda a, b, x: multi_lora_linear(**(p | {"a": a, "b": b, "x": x}))
    y, vjp = jax.vjp(run, a, b, x)
    return y, *vjp(dy)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("slot", range(G))
def test_a_diverged_adapter_touches_no_other_row(slot, bad):
    """This includes padding rows, which compute with slot 0 and discard the result."""
    p = problem() | {"dropout": dropout()}
    others = np.repeat(slot != BLOCK_ADAPTER, BLOCK)
    dy = np.asarray(normal(4, (len(others), N)))
    sick_a = np.array(p["a"])
    sick_a[slot] = bad
    dy_sick = np.where(others[:, None], dy, np.float32(bad))
    clean, da, db, dx = map(np.asarray, both_ways(p, p["a"], p["b"], p["x"], dy))
    found = both_ways(p, sick_a, p["b"], p["x"], dy_sick)
    sick, da_sick, db_sick, dx_sick = map(np.asarray, found)
    np.testing.assert_array_equal(sick[others], clean[others])
    rest = np.arange(G) != slot
    np.testing.assert_array_equal(da_sick[rest], da[rest])
    np.testing.assert_array_equal(db_sick[rest], db[rest])
    np.testing.assert_array_equal(dx_sick[others], dx[others])


masks_of = jax.jit(keep_mask, static_argnums=3)


def mask_of(*, seed=0, step=0, layer=0, projection=0, rate=0.3, tokens=None):
    tokens = np.arange(512) if tokens is None else tokens
    key = keys_of(np.array([seed]), np.array([step]), layer, projection)
    return np.asarray(masks_of(key, np.array([rate], np.float32), tokens[None], 256))[0]


def is_kept(seed, step, linear, token, feature, rate) -> bool:
    """The definition of the masks in Python's integers; `linear` counts from 0.

    Checkpoints resume with the same masks, so another definition would break them.
    """

    def mix(h):
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        return h ^ h >> 16

    def key(salt):
        h = mix((mix(seed ^ salt) + step * 0xC2B2AE35) % 2**32)
        return mix(h ^ (linear + 1) * 0x27D4EB2F % 2**32)

    h = mix((token * 0x9E3779B1 + key(0x9E3779B9)) % 2**32)
    word = mix((feature * 0x85EBCA77 + key(0x85EBCA6B)) % 2**32)
    return ((h | 1) * word + mix(h ^ 0x68E31DA4)) % 2**32 >= round(rate * 2**32)


def test_masks_are_those_of_their_definition():
    tokens = np.array([0, 1, 7, 63, 64, 100_000])
    for seed, step, layer, projection in (
        (0, 0, 0, 0),
        (7, 3, 2, 5),
        (2**31 - 1,) * 2 + (31, 6),
    ):
        where = {"seed": seed, "step": step, "layer": layer, "projection": projection}
        kept = mask_of(rate=0.25, tokens=tokens, **where)
        for row, token in enumerate(tokens.tolist()):
            wanted = [
                is_kept(seed, step, 64 * layer + projection, token, feature, 0.25)
                for feature in range(256)
            ]
            assert kept[row].tolist() == wanted, (where, token)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_dropout_rate(rate):
    kept = mask_of(rate=rate)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) <= 4 * deviation
    for axis in (0, 1):  # each token and each feature has the rate, too
        line = np.sqrt(rate * (1 - rate) / kept.shape[axis])
        assert np.abs(kept.mean(axis) - (1 - rate)).max() <= 5.5 * line


def test_kept_features_are_scaled_so_that_their_mean_stays():
    rates = jnp.array([0.0, 0.5, 0.75])
    np.testing.assert_allclose(inverse_keep(rates), [1, 2, 4], rtol=1e-6)


@pytest.mark.parametrize("change", ["seed", "step", "layer", "projection"])
def test_dropout_streams_are_independent(change):
    one, other = mask_of(), mask_of(**{change: 1})
    agree = (one == other).mean()
    wanted = 0.7**2 + 0.3**2
    assert abs(agree - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / one.size)


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (0, 2), (1, 1), (16, 0)])
def test_masks_of_adjacent_elements_are_independent(shift):
    kept = mask_of()
    rows, columns = shift
    one = kept[rows:, columns:]
    other = kept[: kept.shape[0] - rows, : kept.shape[1] - columns]
    wanted = 0.7**2 + 0.3**2
    error = abs((one == other).mean() - wanted)
    assert error < 4 * np.sqrt(wanted * (1 - wanted) / one.size)


def test_dropout_follows_the_token_not_its_row():
    tokens = np.random.default_rng(0).permutation(512)
    np.testing.assert_array_equal(mask_of(tokens=tokens), mask_of()[tokens])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((81, K))}, "81 rows, not a multiple of the NB=5"),
        ({"x": jnp.zeros((80, K + 1))}, r"shapes do not match: x \(80, 25\)"),
        ({"b": jnp.zeros((G, R + 1, N))}, "must share G and R"),
        ({"w": jnp.zeros((K, N), jnp.bfloat16)}, "share a dtype, got float32"),
        (
            {"implementation": "cuda"},
            "Use one of: mosaic, triton, xla",
        ),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        multi_lora_linear(**(problem() | change))


@functools.partial(jax.jit, static_argnums=0)
def settings_of(num_slots):
    ones = jnp.ones((2, num_slots))
    return kernel_settings(ones, ones.astype(jnp.int32), None)


@pytest.mark.parametrize("num_slots", [G - 1, G + 1])
def test_settings_for_other_slots_are_refused(num_slots):
    p = problem()
    x, blocks = p.pop("x"), p.pop("block_adapter")
    (settings, _) = settings_of(num_slots)
    message = rf"'factor': \(2, {num_slots}\).* wanted \(P, 4\).* kernel_settings"
    with pytest.raises(ValueError, match=message):
        multi_lora_linears(x, [Projection(**p, settings=settings)], blocks)
    (settings, _) = settings_of(G)
    run = lambda x: multi_lora_linears(x, [Projection(**p, settings=settings)], blocks)
    jax.eval_shape(run, x)


def test_words_give_the_masks_of_keys_for_any_number_of_rows():
    """Words are in tiles of 64 rows; here are five blocks of 16, one of padding."""
    slot, rate = np.array([2, 0, -1, 1, 2]), np.array([0.1, 0.5, 0.3], np.float32)
    index = np.random.default_rng(0).permutation(80).astype(np.int32)
    seed, step = np.array([3, 4, 5]), np.array([0, 7, 1])
    places = np.array([[0], [5]]), np.array([[1], [2]])

    @jax.jit
    def both_ways(slot, rate, index, seed, step):
        words = mask_words(dropout_keys(seed, step, *places), slot, index, 40)
        keys = [dropout_keys(seed, step, *place) for place in ((0, 1), (5, 2))]
        by_words = [Dropout(None, rate, index, one) for one in words]
        by_keys = [Dropout(key, rate, index) for key in keys]
        blocks = jnp.maximum(slot, 0)
        return [[x.keep(blocks, (80, 40)) for x in one] for one in (by_words, by_keys)]

    for found, wanted in zip(*both_ways(slot, rate, index, seed, step), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert 0 < np.sum(found) < found.size
