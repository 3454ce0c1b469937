"""The Triton kernels of dA, dB and ds match the definition, in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import dropout_keys, kernel_settings, mask_words
from jaxlora.pallas_kernels.dropout import keep_mask
from jaxlora.pallas_kernels.operands import make_blocks
from jaxlora.pallas_kernels.triton.dual import dual
from jaxlora.pallas_kernels.triton.launch import Tile
from jaxlora.pallas_kernels.triton.outer import outer
from jaxlora.pallas_kernels.triton.target import interpreted, present_target
from tests import drawn
from tests.pallas_kernels import triton_interpreter

# Slot 1 has two parts; slot 2 is switched off; slot 3 has no rows.
SLOTS = [0, 1, -1, 2, *[1] * 16, 0]
NUM_SLOTS, RANKS, SCALING = 4, (16, 5, 16, 3), (0.5, 2.0, 0.0, 1.0)
RATES = (0.0, 0.3, 0.5, 0.1)
TILE = Tile(sizes={"BN": 128, "BK": 128}, num_warps=4, num_stages=3)


@pytest.fixture(autouse=True)
def _interpreter():
    with interpreted(triton_interpreter.run):
        yield


def run(kernel, *arguments, slots=SLOTS, tile=TILE):
    """Runs a kernel as one program, which takes less time than single operations."""

    def program(slots, arguments):
        blocks = make_blocks(slots, NUM_SLOTS, 64 * slots.shape[0])
        return kernel(*arguments, blocks, target=present_target(), tile=tile)

    return jax.tree.map(np.asarray, jax.jit(program)(np.asarray(slots), arguments))


def normal(seed, *shape):
    """Draws an array of NumPy, of which rows are taken without compiling anything."""
    return np.array(drawn.normal(seed, shape, jnp.float16))


def settings_of(ranks=RANKS, num_projections=1):
    scaling, rank, rate = (
        jnp.tile(jnp.array(values), (num_projections, 1))
        for values in (SCALING, ranks, RATES)
    )
    return kernel_settings(scaling, rank, rate)


def rows_of(slot_of_block, slot):
    return np.repeat(np.asarray(slot_of_block) == slot, 64)


def factor_of(slot):
    return SCALING[slot] / (1 - RATES[slot])


def arguments_of_dual(n, r=16):
    t = 64 * len(SLOTS)
    dy, s, b = normal(0, t, n), normal(1, t, r), normal(2, NUM_SLOTS, r, n)
    # Nothing is read that belongs to padding, or to a slot that is switched off.
    unread = rows_of(SLOTS, -1) | rows_of(SLOTS, 2)
    for x in (dy, s):
        x[unread] = np.nan
    return dy, s, b


@pytest.mark.parametrize(("n", "r", "chunks"), [(200, 16, 1), (128, 128, 2)])
def test_ds_and_db_match_their_definition(n, r, chunks):
    dy, s, b = arguments_of_dual(n, r)
    ranks = (16, r, r, 3)
    s[rows_of(SLOTS, 0), 64:] = np.nan  # the chunks that slot 0 lacks
    (settings,) = settings_of(ranks)
    ds, db = run(dual, dy, s, b, settings)
    assert ds.dtype == dy.dtype and db.dtype == jnp.float32
    for slot in range(NUM_SLOTS):
        rows, own = rows_of(SLOTS, slot), 64 * chunks if slot == 1 else min(r, 64)
        dy_, s_, b_ = (np.asarray(x, np.float64) for x in (dy[rows], s[rows], b[slot]))
        if SCALING[slot] == 0:
            assert not ds[rows].any() and not db[slot].any()
            continue
        want = factor_of(slot) * dy_ @ b_[:own].T
        np.testing.assert_allclose(ds[rows, :own], want, rtol=2e-3, atol=2e-2)
        want = s_[:, :own].T @ dy_
        np.testing.assert_allclose(db[slot, :own], want, rtol=1e-4, atol=1e-4)
        assert not ds[rows, own:].any() and not db[slot, own:].any()
    assert not ds[rows_of(SLOTS, -1)].any()


def test_da_matches_its_definition():
    k, t, num_projections = 200, 64 * len(SLOTS), 2
    unread = rows_of(SLOTS, -1) | rows_of(SLOTS, 2)
    x = normal(0, t, k)
    x[unread] = np.nan
    ds = [normal(1 + i, t, 16) for i in range(num_projections)]
    places = np.full((num_projections, 1), 4), np.arange(num_projections)[:, None]
    index = np.random.default_rng(7).permutation(t).astype(np.int32)

    @jax.jit
    def made(slots, index):
        keys = dropout_keys(jnp.arange(NUM_SLOTS), jnp.full(NUM_SLOTS, 3), *places)
        return keys, mask_words(keys, slots, index, k)

    keys, words = made(np.array(SLOTS), index)
    keep = jax.jit(keep_mask, static_argnums=3)
    settings = settings_of(num_projections=num_projections)
    das = run(outer, x, ds, settings, words)
    for key, ds_, da in zip(np.asarray(keys), ds, das, strict=True):
        for slot in range(NUM_SLOTS):
            rows = rows_of(SLOTS, slot)
            if SCALING[slot] == 0:
                assert not da[slot].any()
                continue
            own = key[slot][None], np.float32(RATES[slot : slot + 1])
            mask = keep(*own, index[rows][None], k)[0]
            masked = np.where(mask, np.asarray(x, np.float64)[rows], 0)
            want = masked.T @ np.asarray(ds_, np.float64)[rows]
            np.testing.assert_allclose(da[slot], want, rtol=1e-4, atol=1e-4)


def test_without_dropout_da_needs_no_words():
    x, ds = normal(0, 128, 128), normal(1, 128, 16)
    (da,) = run(outer, x, [ds], settings_of(), [], slots=[0, 1], tile=None)
    want = np.asarray(x, np.float64)[64:].T @ np.asarray(ds, np.float64)[64:]
    np.testing.assert_allclose(da[1], want, rtol=1e-4, atol=1e-4)


def test_a_slots_gradients_depend_on_its_own_rows_alone():
    dy, s, b = arguments_of_dual(128)
    (settings,) = settings_of()

    def gradients(kept):
        rows, slots = np.repeat(kept, 64), np.array(SLOTS)[kept]
        ds, db = run(dual, dy[rows], s[rows], b, settings, slots=slots)
        (da,) = run(outer, dy[rows], [s[rows]], [settings], [], slots=slots)
        return ds[rows_of(slots, 1)], db[1], da[1]

    together = gradients(np.full(len(SLOTS), True))
    alone = gradients(np.asarray(SLOTS) == 1)
    for got, want in zip(together, alone, strict=True):
        np.testing.assert_array_equal(got, want)
