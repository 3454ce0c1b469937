"""Kernels of row-wise functions give the functions, and s as shrink gives it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.modules.rowwise import NormRows, swiglu_gradient_rows, swiglu_rows
from jaxlora.pallas_kernels import (
    Dropout,
    Projection,
    RowArguments,
    dropout_keys,
    kernel_settings,
    unsupported_producer,
)
from jaxlora.pallas_kernels.dropout import mask_words
from jaxlora.pallas_kernels.mosaic.mask import make_mask
from jaxlora.pallas_kernels.mosaic.products import Side, produce, shrink
from jaxlora.pallas_kernels.operands import make_blocks
from tests.deviceless import compile_deviceless
from tests.drawn import Draws
from tests.oracle import assert_as_accurate_as
from tests.pallas_kernels.fused import mosaic_kernels
from tests.pallas_kernels.problems import given_mask

SLOTS = np.array([2, -1, 0, 1], np.int32)
ROWS, NUM_SLOTS = 64 * len(SLOTS), 3
LIVE = np.repeat(SLOTS >= 0, 64)


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


def softmax_and_relu(x, largest, total, y):
    """The second result has no values of rows, and a call with its own gradient."""
    share = jnp.exp(x.astype(jnp.float32) - largest) / total
    return share.astype(x.dtype), jax.nn.relu(x) - y


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def masks_of(kind, num_sides, k):
    if kind is None:
        return []
    step, rate = jnp.zeros(NUM_SLOTS, jnp.int32), jnp.array([0.0, 0.5, 0.2])
    token, blocks = jnp.arange(ROWS, dtype=jnp.int32), jnp.asarray(SLOTS)
    keys = [dropout_keys(step, step, layer=0, projection=p) for p in range(num_sides)]
    if kind == "words":
        return list(map(make_mask, mask_words(jnp.stack(keys), blocks, token, k)))
    problem = {"block_adapter": blocks, "x": jnp.zeros((ROWS, k))}
    drops = [Dropout(key, rate, token) for key in keys]
    return [make_mask(given_mask(problem | {"dropout": drop})) for drop in drops]


# Function, number of tiles, of rows and of features, results of the sides, masks,
# features, rank.
CASES = {
    "norm": (NormRows(1e-5), 1, 1, 1, (0, 0), "words", 384, 16),
    "offset norm": (NormRows(1e-5, offset=True), 1, 1, 1, (0,), "bits", 128, 128),
    "swiglu": (swiglu_rows, 2, 0, 0, (0,), "words", 256, 16),
    "swiglu backward": (swiglu_gradient_rows, 3, 0, 0, (0, 1), None, 256, 32),
    "softmax": (softmax_and_relu, 1, 2, 1, (1, 0), None, 256, 16),
}


class Problem:
    """A case with random arguments."""

    def __init__(self, name, dtype=jnp.bfloat16):
        self.function, *numbers, self.sides, self.kind, k, self.rank = CASES[name]
        num_tiles, num_rows, num_features = numbers
        draws = Draws(0)
        normal = lambda *shape: draws.normal(*shape, dtype=dtype)
        self.tiles = [2 * normal(ROWS, k) for _ in range(num_tiles)]
        self.rows = [jnp.asarray(np.exp(draws.normal(ROWS)))] * num_rows
        self.features = [1 + normal(k) / 8] * num_features
        self.a = [normal(NUM_SLOTS, self.rank, k) for _ in self.sides]
        self.masks = masks_of(self.kind, len(self.sides), k)

    def settings_and_blocks(self):
        """Returns the settings of each side, and the slots of the blocks."""
        row = jnp.full((len(self.sides), NUM_SLOTS), self.rank)
        rate = jnp.broadcast_to(jnp.array([0.0, 0.5, 0.2]), row.shape)
        given = jnp.full(row.shape, 1.5), row, rate if self.kind else None
        blocks = make_blocks(jnp.asarray(SLOTS), NUM_SLOTS, ROWS)
        return kernel_settings(*given), blocks

    def run(self):
        """Returns the results and s."""

        @jax.jit
        def run(tiles, rows, features, a, masks):
            settings, blocks = self.settings_and_blocks()
            given = zip(self.sides, a, settings, strict=True)
            sides = [Side(result=i, a=a, settings=own) for i, a, own in given]
            arguments = RowArguments(tiles, rows, features)
            return produce(self.function, arguments, sides, blocks, masks)

        made = run(self.tiles, self.rows, self.features, self.a, self.masks)
        return jax.tree.map(np.asarray, made)

    def shrunk(self, results):
        """Returns s of each side, made of the results."""

        @jax.jit
        def run(results, a, masks):
            settings, blocks = self.settings_and_blocks()
            found = []
            for p, result in enumerate(self.sides):
                own = slice(p, p + 1)
                given = a[own], settings[own], blocks, masks[own]
                found += shrink(results[result], *given)
            return found

        return map(np.asarray, run(results, self.a, self.masks))

    def plain(self, dtype):
        """Returns the results in plain JAX in a dtype."""
        tiles = (tile.astype(dtype) for tile in self.tiles)
        features = (one[None].astype(dtype) for one in self.features)
        return self.function(*tiles, *(row[:, None] for row in self.rows), *features)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_function_and_s_that_of_shrink(name):
    problem = Problem(name)
    results, s = problem.run()
    each = problem.plain(jnp.bfloat16), problem.plain(jnp.float32)
    for got, plain, exact in zip(results, *each, strict=True):
        assert_as_accurate_as(actual=got, baseline=plain, exact=exact)
    for got, want in zip(s, problem.shrunk(results), strict=True):
        np.testing.assert_array_equal(got[LIVE], want[LIVE])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_and_slots_are_isolated_and_bits_are_the_same_twice():
    """Padding, a row of slot 0 and all of slot 1 are NaN; others keep their bits."""
    problem = Problem("norm")
    clean = problem.run()
    for one, other in zip(*map(jax.tree.leaves, (clean, problem.run())), strict=True):
        np.testing.assert_array_equal(one, other)
    (x,) = problem.tiles
    bad = np.repeat(np.isin(SLOTS, (-1, 1)), 64)
    bad[128 + 5] = True
    problem.tiles = [jnp.where(bad[:, None], jnp.nan, x)]
    problem.a = [a.at[1].set(jnp.nan) for a in problem.a]
    for one, other in zip(*map(jax.tree.leaves, (clean, problem.run())), strict=True):
        np.testing.assert_array_equal(one[~bad], other[~bad])


@pytest.mark.parametrize(
    ("shape", "rank", "num_sides", "reason"),
    [
        ((64, 128), 16, 1, None),
        ((64, 192), 16, 1, "192 features are not multiples of 64 and 128"),
        ((96, 128), 16, 1, "the 96 rows"),
        ((64, 128), 256, 8, "8 side products of rank 256 leave no room"),
    ],
)
def test_what_a_kernel_cannot_run_has_a_reason(shape, rank, num_sides, reason):
    x, k = jnp.zeros(shape, jnp.bfloat16), shape[1]
    one = Projection(
        w=jnp.zeros((k, 128), jnp.bfloat16),
        a=jnp.zeros((2, k, rank)),
        b=jnp.zeros((2, rank, 128)),
        scaling=jnp.ones(2),
    )
    arguments = RowArguments([x], [x[:, 0]], [x[0]])
    given = NormRows(1e-5), arguments, [one] * num_sides
    found = unsupported_producer(*given, implementation="mosaic")
    assert found is None if reason is None else reason in found
    elsewhere = unsupported_producer(*given, implementation="xla")
    assert elsewhere is not None and "has no such kernels" in elsewhere


def test_a_sum_is_refused():
    problem = Problem("swiglu")
    problem.function = lambda x, y: (x - jnp.sum(y, axis=1, keepdims=True),)
    with pytest.raises(ValueError, match="calls reduce_sum, but only element-wise"):
        problem.run()


@pytest.mark.grid
def test_kernels_for_an_h200_spill_no_registers(tmp_path):
    out = tmp_path / "out"
    compile_deviceless("tests.pallas_kernels.h200_producers", out)
    spills = [line for line in out.read_text().splitlines() if "spill stores" in line]
    assert len(spills) == 8
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
