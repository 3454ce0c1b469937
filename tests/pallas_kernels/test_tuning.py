"""Tile choices are valid for any sizes, and as expected for common ones."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxlora.pallas_kernels.mosaic.tuning import (
    MAX_SPLITS,
    OuterCost,
    SidePlan,
    band_for,
    best_plan,
    columns_for,
    shares_for,
    splits_for,
)

outers = st.lists(
    st.builds(
        OuterCost,
        num_items=st.integers(1, 2000),
        steps_per_item=st.floats(0.1, 256),
        parts_per_item=st.floats(0.1, 256),
        num_masks=st.integers(0, 4),
    ),
    max_size=3,
)


@given(st.integers(1, 4000), st.integers(2, 256), outers, st.integers(2, 132))
def test_a_plan_exists_for_any_work(num_tiles, steps_per_tile, outers, num_sms):
    plan = best_plan(num_tiles, steps_per_tile, outers, num_sms)[1]
    assert 0 <= plan.num_side_sms < num_sms
    assert len(plan.num_side_items) == len(outers)
    for outer, num_items in zip(outers, plan.num_side_items, strict=True):
        assert 0 <= num_items <= outer.num_items
        assert plan.num_side_sms or not num_items


def test_multiprocessors_that_expand_leaves_idle_run_outer_products():
    # 1024 tiles take 8 rounds on 128 multiprocessors as on 132.
    outer = OuterCost(
        num_items=96, steps_per_item=32.0, parts_per_item=4.0, num_masks=0
    )
    plan = best_plan(1024, 64, [outer], 132)[1]
    assert plan == SidePlan(num_side_sms=4, num_side_items=(96,))


def test_no_side_multiprocessors_if_they_would_cost_a_round():
    small = [
        OuterCost(num_items=8, steps_per_item=1.0, parts_per_item=1.0, num_masks=0)
    ]
    assert best_plan(132, 64, small, 132)[1].num_side_sms == 0


def test_side_multiprocessors_take_no_longer_than_expand_with_short_parts():
    outers = [
        OuterCost(num_items=512, steps_per_item=8.0, parts_per_item=8.0, num_masks=n)
        for n in (0, 1)
    ]
    plan = best_plan(1024, 64, outers, 132)[1]
    assert plan.num_side_sms == 4
    assert 128 < plan.num_side_items[0] < 384  # all 512 would take twice as long
    assert plan.num_side_items[1] == 0


@given(st.integers(1, 30000), st.integers(1, 30000), st.integers(2, 132))
def test_narrow_tiles_shorten_the_rounds(t, n, num_sms):
    def time(columns):
        tiles = math.ceil(t / 128) * math.ceil(n / columns)
        return math.ceil(tiles / num_sms) * columns

    columns = columns_for(t, n, num_sms)
    assert columns in (128, 192, 256)
    if columns < 256:
        assert time(columns) <= 0.85 * time(256)
        assert time(columns) == min(map(time, (128, 192, 256)))


def test_tiles_of_small_models_are_narrow():
    found = {n: columns_for(8192, n, 132) for n in (192, 576, 1024, 1536, 4096, 14336)}
    assert found == {192: 128, 576: 192, 1024: 256, 1536: 256, 4096: 256, 14336: 256}


def test_outer_products_with_masks_are_not_left_to_a_short_last_round():
    """32,768 rows by 4,096: 33 rounds beside more side items take longer than 32."""
    outers = [
        OuterCost(num_items=128, steps_per_item=128.0, parts_per_item=4.0, num_masks=n)
        for n in (0, 1)
    ]
    assert best_plan(4096, 64, outers, 132)[1].num_side_sms == 4


def test_many_parts_are_shared_by_more_items():
    assert [shares_for(4, num_parts) for num_parts in (1, 16, 63, 64, 128)] == [
        *(4, 4, 4, 8, 16)
    ]


@given(st.integers(128, 32768), st.integers(1, 132))
def test_gradients_keep_the_multiprocessors_busy(num_features, num_sms):
    splits = splits_for("unknown device", num_features, num_sms)
    num_items = math.ceil(num_features / 128) * splits
    assert 1 <= splits <= MAX_SPLITS
    assert num_items >= 0.9 * num_sms or splits == MAX_SPLITS


def test_an_unknown_device_has_a_choice():
    assert band_for("unknown device", 8192, 4096, 4096) > 0
