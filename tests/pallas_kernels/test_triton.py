"""Tests of the Triton kernels alone; test_fused.py has those of all fused ones."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlora.pallas_kernels import LinearShape, Projection, multi_lora_linears
from jaxlora.pallas_kernels.triton import target
from tests.pallas_kernels.fused import triton_back_ends

BACK_ENDS = triton_back_ends()


@pytest.fixture(params=BACK_ENDS)
def fused(request):
    """Returns the back end, whose kernels can run until the test ends."""
    found = BACK_ENDS[request.param]
    with found.kernels():
        yield found


def test_features_may_be_any_multiple_of_8(fused):
    p, rank = fused.problem((0, -1, 1), k=72, n=136, ranks=(8, 70), rates=(0.1, 0.5))
    results = fused.check(p, rank)
    transposed = fused.run(p | {"w": p["w"].T}, rank, w_transposed=True)
    for got, want in zip(transposed, results, strict=True):
        np.testing.assert_array_equal(got, want)


def test_features_may_be_fewer_than_a_tiles(fused):
    fused.check(*fused.problem((0, 1), k=8, n=16, ranks=(1, 3), rates=None))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_of_padding_are_zero_whatever_they_hold(fused):
    """One tile of 128 rows is all padding, and one is half padding."""
    p, rank = fused.problem((0, -1, -1, -1), n=128, ranks=(8,), rates=(0.5,))
    padding = np.repeat(np.asarray(p["block_adapter"]) < 0, 64)
    q = p | {"x": jnp.where(padding[:, None], jnp.nan, p["x"])}
    y, dx, da, db = fused.run(q, rank)
    assert not np.asarray(y)[padding].any() and not np.asarray(dx)[padding].any()
    for got, want in zip((y, dx, da, db), fused.run(p, rank), strict=True):
        np.testing.assert_array_equal(got, want)


def test_one_launch_takes_three_linears_and_others_follow(fused):
    """Each linear has a mask of its own."""
    p, rank = fused.problem((0, 1), n=64, ranks=(4, 8), rates=(0.2, 0.0))
    x, blocks, drop = p.pop("x"), p.pop("block_adapter"), p.pop("dropout")
    each = [
        dataclasses.replace(drop, key=drop.key + jnp.uint32(i % 3)) for i in range(4)
    ]
    linears = [Projection(**p, rank=rank, dropout=one) for one in each]
    y = multi_lora_linears(x, linears, blocks, implementation=fused.implementation)
    assert not np.array_equal(y[0], y[2])
    np.testing.assert_array_equal(y[0], y[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 68}, "68 x 64 features are not multiples of 8"),
        ({"dtype": jnp.float32}, "float32 is neither bfloat16 nor float16"),
        ({"rank": 300}, "rank 300 is larger than 256"),
        ({"block_tokens": 32}, "32 rows are not a multiple of 64"),
    ],
)
def test_unsupported_layers_are_refused(fused, change, message):
    shape = LinearShape(
        dtype=jnp.bfloat16, in_features=64, out_features=64, rank=8, block_tokens=64
    )
    assert target.unsupported(shape) is None
    reason = target.unsupported(dataclasses.replace(shape, **change))
    assert reason is not None and message in reason
