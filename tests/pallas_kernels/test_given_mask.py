"""Masks that the caller gives are packed, checked and applied as defined."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import (
    GivenMask,
    Projection,
    kernel_settings,
    multi_lora_linear,
    multi_lora_linears,
    pack_mask,
    unpack_mask,
)
from jaxlora.pallas_kernels import given_mask as packing
from tests.oracle import relative_error
from tests.pallas_kernels.problems import (
    AS_FOR_USERS,
    compiled_both_ways,
    given_mask,
    problem,
)
from tests.pallas_kernels.reference import multi_lora_linear_reference


def random_mask(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.7)


def packed(kept):
    """Packs a mask by one program, which is always traced."""
    return jax.jit(lambda kept: pack_mask(kept))(kept)


unpacked = jax.jit(unpack_mask, static_argnums=1)


@pytest.mark.parametrize("shape", [(64, 32), (128, 5), (80, 24), (1, 1)])
def test_a_packed_mask_is_unpacked(shape):
    kept = random_mask(shape)
    bits = packed(kept)
    assert bits.shape == (2 * -(-shape[0] // 64), shape[1])
    np.testing.assert_array_equal(unpacked(bits, shape[0]), kept)


def test_large_masks_are_packed_in_pieces_of_rows(monkeypatch):
    kept = random_mask((700, 9))
    whole = packed(kept)
    for piece in (64 * 9, 1000, 3000):
        monkeypatch.setattr(packing, "_PIECE", piece)
        np.testing.assert_array_equal(packed(kept), whole)


def test_a_token_has_the_documented_bit():
    for token in (0, 1, 7, 8, 16, 63, 64, 127):
        (block, inside), word = divmod(token, 64), np.zeros((4, 1), np.uint32)
        j, h, low = inside // 16, inside // 8 % 2, inside % 8
        word[2 * block + h] = 1 << (8 * j + low)
        kept = np.arange(128)[:, None] == token
        np.testing.assert_array_equal(packed(kept), word)


def test_packing_stores_no_integer_per_element():
    """The widest array in memory is the mask itself."""
    kept = jax.ShapeDtypeStruct((1024, 512), jnp.bool)
    compiled = jax.jit(pack_mask).lower(kept).compile(AS_FOR_USERS)
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 512


def problem_with_nan():
    """Returns arguments with a given mask, and NaN in x where the mask drops."""
    p, _ = problem(k=40, n=24, ranks=(8, 3, 1, 5), block=16, dtype=jnp.float32)
    kept = random_mask(p["x"].shape)
    inverse = 1 / (1 - np.array([0.3, 0.3, 0.5, 0.0], np.float32))
    return p | {"dropout": GivenMask(packed(kept), jnp.asarray(inverse))}, kept


def test_it_matches_the_formula():
    p, kept = problem_with_nan()

    def formula(x, w, a, b, scaling, block_adapter, bias, dropout):
        slot = np.repeat(block_adapter, 16)
        factor = (scaling * dropout.inverse_keep)[slot, None]
        s = jnp.einsum("tk,tkr->tr", jnp.where(kept, x, 0), a[slot])
        y = x @ w + bias + factor * jnp.einsum("tr,trn->tn", s, b[slot])
        return jnp.where((slot >= 0)[:, None], y, 0)

    wanted = compiled_both_ways(formula, p)
    for op in (multi_lora_linear, multi_lora_linear_reference):
        for got, want in zip(compiled_both_ways(op, p), wanted, strict=True):
            assert relative_error(got, want) < 1e-5


def test_nan_in_a_dropped_feature_reaches_no_adapter():
    p, kept = problem_with_nan()
    x = np.asarray(p["x"])
    dropped = p | {"x": jnp.asarray(np.where(kept, x, np.float32(np.nan)))}
    zeroed = p | {"x": jnp.asarray(np.where(kept, x, np.float32(0)))}
    *_, da, db = compiled_both_ways(multi_lora_linear, dropped)
    *_, da_wanted, db_wanted = compiled_both_ways(multi_lora_linear, zeroed)
    np.testing.assert_array_equal(da, da_wanted)
    np.testing.assert_array_equal(db, db_wanted)


def test_the_mask_of_a_key_can_be_given():
    """The same elements are dropped, so all bits are the same."""
    p, _ = problem(k=40, n=24, block=16)
    wanted = compiled_both_ways(multi_lora_linear, p)
    given = p | {"dropout": given_mask(p)}
    got = compiled_both_ways(multi_lora_linear, given)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": jnp.zeros((4, 128), jnp.uint32)}, r"\(4, 128\) .*wanted \(10, 128\)"),
        ({"bits": jnp.zeros((10, 128), jnp.int32)}, "dtype int32, wanted .* uint32"),
        ({"inverse_keep": jnp.ones(3)}, r"shape \(3,\), wanted \(4,\): one factor"),
    ],
)
def test_a_mask_of_another_shape_is_refused(change, message):
    p, _ = problem()
    mask = dataclasses.replace(given_mask(p), **change)
    with pytest.raises(ValueError, match=message):
        multi_lora_linear(**p | {"dropout": mask})


def test_settings_and_other_kinds_of_dropout_are_refused():
    p, _ = problem()
    x, blocks, drop = p.pop("x"), p.pop("block_adapter"), p.pop("dropout")
    mask = given_mask(p | {"x": x, "block_adapter": blocks, "dropout": drop})
    one, other = (Projection(**p, dropout=each) for each in (mask, drop))
    with pytest.raises(ValueError, match="got Dropout and GivenMask"):
        multi_lora_linears(x, [one, other], blocks)
    (settings,) = kernel_settings(jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int32), None)
    with pytest.raises(ValueError, match="Leave settings out"):
        multi_lora_linears(x, [dataclasses.replace(one, settings=settings)], blocks)
