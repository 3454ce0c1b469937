"""Tests of the Hopper kernels alone; test_fused.py has those of all fused ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxlora.pallas_kernels import kernel_settings
from jaxlora.pallas_kernels.mosaic import layer, outer, products, ring, shrink
from jaxlora.pallas_kernels.operands import make_blocks
from tests.drawn import normal
from tests.oracle import relative_error
from tests.pallas_kernels.fused import (
    MOSAIC,
    ON_HOPPER,
    linear_both_ways,
    mosaic_kernels,
)


@pytest.fixture(autouse=True)
def _kernels():
    with mosaic_kernels():
        yield


def test_a_ring_that_wraps_around_matches_the_definition(monkeypatch):
    """Rings of as many stages as fit would need more steps to wrap around."""
    if not ON_HOPPER:
        fewer = lambda *room: min(ring.stages_that_fit(*room), 4)
        for role in (outer, shrink):
            monkeypatch.setattr(role, "stages_that_fit", fewer)
    num_steps = 24 if ON_HOPPER else 6
    sizes = {"blocks": (0,) * 9, "k": 64 * num_steps, "n": 128}
    MOSAIC.check(*MOSAIC.problem(**sizes, ranks=(8,), rates=(0.3,)))


def test_the_width_of_the_tiles_changes_no_bit(monkeypatch):
    """A tile of 256 columns has columns outside; those of 128 are the default here."""
    p, rank = MOSAIC.problem((0,), k=192, n=192, ranks=(8,), rates=(0.3,))
    results = []
    for width in (256, 192):
        monkeypatch.setattr(products, "columns_for", lambda *_, width=width: width)
        for traced in (layer.forward, layer.backward, linear_both_ways):
            traced.clear_cache()
        results.append(MOSAIC.run(p, rank))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


def test_scratch_comes_by_name_and_in_the_order_of_its_ring():
    """By default, JAX sorts names, and shared memory with them."""
    one, other = (ring.Smem.flat(n) for n in (64, 32))
    shape = ring.RingShape.of(1, 1, z_smem=one, a_smem=(other, None), b_smem=None)
    assert [list(group) for group in shape.groups()] == [["z_smem", "a_smem"]]
    found = []

    @plgpu.kernel(
        out_type=[],
        scratch_types={"arrays": shape.groups(), "barriers": shape.barriers()},
    )
    def kernel(*, arrays, barriers):
        (smem,) = arrays
        found.append([smem["z_smem"].shape, smem["a_smem"][0].shape, *barriers])

    jaxpr = str(jax.make_jaxpr(kernel)())
    assert found == [[(64,), (32,), *shape.barriers()]]
    assert jaxpr.index("u32[64]") < jaxpr.index("u32[32]")


MANY_SLOTS, FEW_SLOTS = [17, 3, 0, 10], [17, 3]


@pytest.mark.parametrize(
    ("transposed", "num_blocks"),
    [
        pytest.param(False, MANY_SLOTS, marks=pytest.mark.grid),
        pytest.param(True, MANY_SLOTS, marks=pytest.mark.grid),
        (True, FEW_SLOTS),
    ],
)
def test_a_gradient_in_parts_depends_on_its_own_rows_alone(transposed, num_blocks):
    """The slots have two parts, one and none. 32 blocks are many for two slots."""
    num_slots = len(num_blocks)
    owner = np.repeat(np.arange(num_slots), num_blocks)
    owner = np.pad(owner, (0, 32 - len(owner)), constant_values=-1)
    owner = np.random.default_rng(0).permutation(owner)
    wide, narrow = (normal(n, (len(owner) * 64, n), jnp.bfloat16) for n in (128, 16))

    @jax.jit
    def run(x, s, slots):
        blocks = make_blocks(slots, num_slots, len(x))
        one = (1, num_slots)
        settings = kernel_settings(jnp.ones(one), jnp.full(one, 16), None)
        return products.outer(
            x, [s], settings, blocks, [], transposed=transposed, splits=4
        )[0]

    def gradient(kept):
        x, s = (np.asarray(z)[np.repeat(kept, 64)] for z in (wide, narrow))
        return run(x, s, owner[kept].astype(np.int32))

    got = np.asarray(gradient(np.full(len(owner), True)))
    for slot in range(num_slots):
        rows = np.repeat(owner == slot, 64)
        x, s = (np.asarray(z, np.float64)[rows] for z in (wide, narrow))
        want = s.T @ x if transposed else x.T @ s
        np.testing.assert_allclose(got[slot], want, rtol=1e-4, atol=1e-4)
        if slot < 2:  # one with two parts, and one with one
            alone = gradient(owner == slot)
            np.testing.assert_array_equal(np.asarray(alone)[slot], got[slot])


def test_many_small_slots_share_the_parts_of_a_tile():
    """With 18 parts and one split there are two items; slot 17 has no rows."""
    owner = np.random.default_rng(1).permutation([*range(17), -1])
    wide, narrow = (normal(n, (len(owner) * 64, n), jnp.bfloat16) for n in (192, 16))

    @jax.jit
    def run(wide, narrow, owner):
        blocks = make_blocks(owner, 18, len(wide))
        one = kernel_settings(jnp.ones((1, 18)), jnp.full((1, 18), 16), None)
        options = {"transposed": False, "splits": 1}
        work, _ = products.outer_work(wide, [narrow], one, blocks, [], **options)
        assert work.num_items == 2 * 2
        return products.outer(wide, [narrow], one, blocks, [], **options)[0]

    got = run(wide, narrow, owner.astype(np.int32))
    for slot in range(18):
        rows = np.repeat(owner == slot, 64)
        x, s = (np.asarray(z, np.float64)[rows] for z in (wide, narrow))
        np.testing.assert_allclose(got[slot], x.T @ s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 72}, "72 x 192 features are not multiples of 64"),
        ({"n": 64}, "128 x 64 features are not multiples of 64, at least 128"),
        ({"dtype": jnp.float32}, "float32 is neither bfloat16 nor float16"),
        ({"ranks": (8, 3, 16, 300)}, "rank 300 is larger than 256"),
        ({"block": 32}, "32 rows are not a multiple of 64"),
    ],
)
def test_unsupported_layers_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MOSAIC.run(*MOSAIC.problem(**change))


def test_blocks_are_sorted_by_slot_in_their_own_order():
    blocks = jnp.array([2, -1, 0, 2, 1, -1], jnp.int32)
    found = make_blocks(blocks, 4, 6 * 128)
    key = np.repeat(np.where(np.asarray(blocks) < 0, 4, blocks), 2)
    np.testing.assert_array_equal(found.order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(found.starts, [0, 2, 4, 8, 8])
    assert relative_error(found.slot, np.repeat(blocks, 2)) == 0
