"""The quantizing shrink kernel gives XLA's e4m3 to the bit, and shrink's s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import Dropout, dropout_keys, kernel_settings
from jaxlora.pallas_kernels.dropout import mask_words
from jaxlora.pallas_kernels.mosaic.mask import make_mask
from jaxlora.pallas_kernels.mosaic.products import (
    quantize_shrink,
    shrink,
)
from jaxlora.pallas_kernels.operands import make_blocks
from tests.drawn import Draws
from tests.pallas_kernels.fused import mosaic_kernels
from tests.pallas_kernels.problems import given_mask

SLOTS = np.array([2, -1, 0, 1], np.int32)
NUM_SLOTS, LARGEST = 3, 448.0


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


@functools.partial(jax.jit, static_argnums=(0, 2))
def _masks(kind, x, num_projections):
    if kind is None:
        return []
    step = jnp.zeros(NUM_SLOTS, jnp.int32)
    rate, token = jnp.array([0.0, 0.5, 0.2]), jnp.arange(len(x), dtype=jnp.int32)
    keys = jnp.stack(
        [
            dropout_keys(step, step, layer=0, projection=p)
            for p in range(num_projections)
        ]
    )
    if kind == "words":
        blocks = jnp.asarray(SLOTS)
        return list(map(make_mask, mask_words(keys, blocks, token, x.shape[1])))
    problem = {"block_adapter": jnp.asarray(SLOTS), "x": x}
    drops = [Dropout(key, rate, token) for key in keys]
    return [make_mask(given_mask(problem | {"dropout": drop})) for drop in drops]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("k", "rank", "num_projections", "dtype", "masks", "has_factors"),
    [
        (128, 16, 1, jnp.bfloat16, None, True),
        (384, 16, 2, jnp.float16, "words", False),
        pytest.param(128, 128, 3, jnp.bfloat16, "bits", False, marks=pytest.mark.grid),
    ],
    ids=["factors", "masks", "too many ranks for one read"],
)
def test_rows_are_quantized_beside_s(
    k, rank, num_projections, dtype, masks, has_factors
):
    """Slot 1 adapts nothing, but its rows are quantized; a row and padding are NaN."""
    draws = Draws(0)
    x = np.array(draws.normal(64 * len(SLOTS), k, dtype=dtype))
    x[64:128], x[5], x[7] = np.nan, np.nan, 0
    x = jnp.asarray(x)
    shape = (NUM_SLOTS, rank, k)
    a = [draws.normal(*shape, dtype=dtype) for _ in range(num_projections)]
    features = jnp.exp(draws.normal(k)) if has_factors else None
    scaled = x.astype(jnp.float32) * (1 if features is None else features)
    scale = jnp.maximum(jnp.abs(scaled).max(axis=1) / LARGEST, 1e-30)
    inverse = 1 / scale

    @jax.jit
    def run(x, a, masks, inverse, features):
        row = jnp.full((num_projections, NUM_SLOTS), rank).at[:, 1].set(0)
        rate = jnp.broadcast_to(jnp.array([0.0, 0.5, 0.2]), row.shape)
        settings = kernel_settings(jnp.ones(row.shape), row, rate if masks else None)
        blocks = make_blocks(jnp.asarray(SLOTS), NUM_SLOTS, len(x))
        given = settings, blocks, masks
        got = quantize_shrink(x, a, *given, inverse=inverse, features=features)
        return got.xq, got.s, got.folded, shrink(x, a, *given)

    made = run(x, a, _masks(masks, x, num_projections), inverse, features)
    xq, *of_sides = jax.tree.map(np.asarray, made)
    rows = np.repeat(SLOTS >= 0, 64)
    want = (scaled * inverse[:, None]).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(
        np.asarray(xq, np.float32)[rows], np.asarray(want, np.float32)[rows]
    )
    assert not np.asarray(xq, np.float32)[7].any()
    rows = np.repeat(SLOTS != 1, 64) & rows
    rows[5] = False
    for s, folded, plain in zip(*of_sides, strict=True):
        np.testing.assert_array_equal(s[rows], plain[rows])
        np.testing.assert_allclose(  # s is rounded after it is folded, or before
            np.asarray(folded, np.float32)[rows],
            np.asarray(s, np.float32)[rows] * inverse[rows, None],
            rtol=float(jnp.finfo(dtype).eps),
        )
