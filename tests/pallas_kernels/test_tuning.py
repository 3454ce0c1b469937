"""How work is shared out: legal for any sizes, and sensible for common ones."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxlora.pallas_kernels.mosaic.tuning import (
    MAX_SPLITS,
    Beside,
    Gradient,
    band_for,
    beside,
    splits_for,
)

gradients = st.lists(
    st.builds(
        Gradient,
        items=st.integers(1, 2000),
        steps=st.floats(0.1, 256),
        masks=st.integers(0, 4),
    ),
    max_size=3,
)


@given(st.integers(1, 4000), st.integers(2, 256), gradients, st.integers(2, 132))
def test_any_work_is_shared_out(tiles, steps, gradients, num_sms):
    plan = beside(tiles, steps, gradients, num_sms)
    assert 0 <= plan.apart < num_sms
    assert len(plan.items) == len(gradients)
    for one, items in zip(gradients, plan.items, strict=True):
        assert 0 <= items <= one.items
        assert plan.apart or not items


def test_multiprocessors_that_a_product_leaves_idle_do_gradients():
    # 1024 tiles take 8 rounds on 128 multiprocessors as on 132.
    plan = beside(1024, 64, [Gradient(items=96, steps=32.0, masks=0)], 132)
    assert plan == Beside(apart=4, items=(96,))


def test_none_is_kept_apart_where_that_costs_a_round():
    small = [Gradient(items=8, steps=1.0, masks=0)]
    assert beside(132, 64, small, 132).apart == 0


@given(st.integers(128, 32768), st.integers(1, 132))
def test_gradients_keep_the_multiprocessors_busy(features, num_sms):
    splits = splits_for("unknown device", features, num_sms)
    items = math.ceil(features / 128) * splits
    assert 1 <= splits <= MAX_SPLITS
    assert items >= 0.9 * num_sms or splits == MAX_SPLITS


def test_an_unknown_device_is_no_error():
    assert band_for("unknown device", 8192, 4096, 4096) > 0
