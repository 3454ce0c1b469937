"""Tests the simulator against worked examples and a definition of 1F1B."""

import dataclasses
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    StageCost,
    lower_bound,
    pack_ticks,
    simulate,
)
from tests.scheduler.strategies import (
    LIMITS,
    costs,
    job_mixes,
    num_stale_batches,
    window_sum,
)

UNIT = Limits(capacity=100, block_tokens=1)
PER_TOKEN = AffineCost(base=0, per_token=1, per_square=0)


def stream(*lengths):
    """A schedule with one sample per microbatch, each of its own job; 0 is a no-op."""
    return Schedule(
        microbatches=tuple(
            (Sample(owner=i, batch=0, index=0, num_tokens=n),) if n else ()
            for i, n in enumerate(lengths)
        ),
        limits=UNIT,
    )


def equal(num_stages, **kwargs):
    return CostModel.uniform(
        num_stages, forward=PER_TOKEN, backward=PER_TOKEN * 2, **kwargs
    )


def run(schedule, cost):
    return simulate(schedule, cost, Pipeline.one_f_one_b(cost.num_stages))


def defined_end(schedule, cost, in_flight, num_lanes):
    """The makespan by the definition of 1F1B: a pass starts when it no longer waits."""
    ticks = list(itertools.batched(schedule.microbatches, num_lanes))
    num_stages, num = cost.num_stages, len(ticks)
    after, time = {}, {}
    for s in range(num_stages):
        # From one stage to the next, the warm-up falls by as even steps as possible.
        falls = (in_flight - 1) * (num_stages - 1 - s) / max(1, num_stages - 1)
        warm_up = min(math.ceil(falls) if s else in_flight - 1, num)
        order = [("F", s, m) for m in range(warm_up)]
        for m in range(num):
            if m + warm_up < num:
                order.append(("F", s, m + warm_up))
            order.append(("B", s, m))
        for m, tick in enumerate(ticks):
            stage = cost.stages[s]
            sizes = [cost.size(lane, schedule.limits) for lane in tick if lane]
            time["F", s, m] = max((stage.forward(*n) for n in sizes), default=0.0)
            time["B", s, m] = max((stage.backward(*n) for n in sizes), default=0.0)
            after["F", s, m], after["B", s, m] = [], []
            if sizes and s > 0:
                after["F", s, m].append((("F", s - 1, m), cost.communication))
            if sizes and s < num_stages - 1:
                after["B", s, m].append((("B", s + 1, m), cost.communication))
        for one, next_one in itertools.pairwise(order):
            after[next_one].append((one, 0.0))
    end = dict.fromkeys(time, 0.0)
    for _ in range(len(time) + 1):
        new = {
            p: time[p] + max((end[q] + delay for q, delay in after[p]), default=0.0)
            for p in time
        }
        if new == end:
            return max(end.values(), default=0.0)
        end = new
    raise AssertionError("the order has a cycle")


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    samples=job_mixes(max_jobs=3, max_batches=3, max_batch=4),
    num_stages=st.integers(1, 5),
    wider=st.integers(0, 3),
    num_lanes=st.integers(1, 3),
    data=st.data(),
)
def test_equals_the_definition(samples, num_stages, wider, num_lanes, data):
    cost = data.draw(costs(num_stages))
    in_flight = num_stages + wider
    pipeline = Pipeline.one_f_one_b(num_stages, in_flight)
    lanes = Lanes(fsdp=num_lanes, pipeline=pipeline)
    schedule = pack_ticks(samples, LIMITS, "joint", lanes, cost)
    ran = simulate(schedule, cost, pipeline, num_lanes=num_lanes)
    end = defined_end(schedule, cost, in_flight, num_lanes)
    assert ran.makespan == pytest.approx(end)
    assert num_stale_batches(schedule, pipeline, ran, num_lanes) == 0
    bound = lower_bound(samples, LIMITS, pipeline, cost, num_lanes=num_lanes)
    assert bound.makespan <= ran.makespan * (1 + 1e-9)
    assert bound.microbatches * num_lanes <= len(schedule.microbatches)
    work = ran.forward_end - ran.forward_start + ran.backward_end - ran.backward_start
    assert ran.bubble == pytest.approx(1 - work.sum() / num_stages / ran.makespan)
    np.testing.assert_allclose(ran.utilization, work.sum(axis=1) / ran.makespan)


def test_one_microbatch_passes_all_stages_twice():
    ran = run(stream(10), equal(3))
    assert ran.makespan == 3 * 10 + 3 * 20
    np.testing.assert_array_equal(ran.forward_start[:, 0], [0, 10, 20])
    np.testing.assert_array_equal(ran.backward_end[:, 0], [90, 70, 50])
    assert ran.bubble == pytest.approx(2 / 3)
    assert ran.utilization == pytest.approx((1 / 3,) * 3)


def test_equal_microbatches_only_have_ramp_bubbles():
    ran = run(stream(*[10] * 9), equal(4))
    assert ran.makespan == (9 + 3) * 30
    assert ran.bubble == pytest.approx(3 / 12)


def test_two_stages():
    """Stage 1 runs F0 until 20, B0 until 40, F1 until 60 and B1 until 100."""
    ran = run(stream(10, 20), equal(2))
    np.testing.assert_array_equal(ran.forward_start, [[0, 10], [10, 40]])
    np.testing.assert_array_equal(ran.backward_start, [[40, 100], [20, 60]])
    assert ran.makespan == 140
    assert ran.bubble == pytest.approx(1 - 180 / 280)


def test_one_stage_never_waits():
    ran = run(stream(10, 0, 20), equal(1))
    assert ran.makespan == 90
    assert ran.bubble == 0


def test_a_slower_last_stage_and_communication():
    ran = run(stream(10), equal(2, last_stage=1.5, communication=7))
    assert ran.makespan == 10 + 7 + 15 + 30 + 7 + 20


def test_stages_may_all_differ():
    stages = tuple(StageCost(forward=PER_TOKEN * k, backward=PER_TOKEN) for k in (1, 4))
    assert run(stream(10), CostModel(stages=stages)).makespan == 10 + 40 + 20


def test_a_no_op_only_takes_a_place_in_the_order():
    plain, with_no_ops = stream(10, 10), stream(10, 0, 0, 10)
    assert run(with_no_ops, equal(3)).makespan > run(plain, equal(3)).makespan
    assert run(stream(0, 0), equal(3)).makespan == 0
    assert run(stream(), equal(3)).makespan == 0


def test_a_microbatch_costs_its_bucket():
    assert run(stream(10, 16), equal(1, buckets=(16, 32))).makespan == 2 * 48
    with pytest.raises(ValueError, match=r"40 tokens fits in none of the buckets \(16"):
        run(stream(40), equal(1, buckets=(16, 32)))


def test_padding_may_take_less_time_than_tokens():
    costs = equal(1, buckets=(16, 32), padding=0.5)
    found = run(stream(10, 0, 18), costs)
    assert found.makespan == (10 + 6 / 2 + 18 + 14 / 2) * 3


@pytest.mark.parametrize("num_stages, in_flight", [(2, 2), (3, 3), (8, 8), (3, 5)])
def test_weights_are_stale_one_tick_too_early(num_stages, in_flight):
    """A distance of W0 is enough; with W0 - 1, stages have not taken the step yet."""
    pipeline = Pipeline.one_f_one_b(num_stages, in_flight)

    def at_distance(distance):
        a = Sample(owner=0, batch=0, index=0, num_tokens=10)
        b = dataclasses.replace(a, batch=1)
        others = stream(*[10] * distance).microbatches[1:]
        fill = tuple((dataclasses.replace(m[0], owner=9 + m[0].owner),) for m in others)
        return Schedule(microbatches=((a,), *fill, (b,)), limits=UNIT)

    for distance, num_stale in ((in_flight, 0), (in_flight - 1, 1)):
        schedule = at_distance(distance)
        ran = simulate(schedule, equal(num_stages), pipeline)
        assert num_stale_batches(schedule, pipeline, ran) == num_stale


def test_weights_are_stale_after_the_last_microbatch_of_a_batch():
    """The first microbatch of the batch is far enough away, but the last one is not."""
    first, last = (Sample(owner=0, batch=0, index=i, num_tokens=10) for i in (0, 1))
    after = Sample(owner=0, batch=1, index=0, num_tokens=10)
    other = Sample(owner=1, batch=0, index=0, num_tokens=10)
    slots = ((first,), (other,), (last,), (after,))
    schedule = Schedule(microbatches=slots, limits=UNIT)
    pipeline = Pipeline.one_f_one_b(3)
    assert num_stale_batches(schedule, pipeline, run(schedule, equal(3))) == 1


def test_more_ticks_in_flight_hide_transfers():
    cost, schedule = equal(3, communication=3), stream(*[10] * 40)
    ran = [
        simulate(schedule, cost, Pipeline.one_f_one_b(3, in_flight))
        for in_flight in (3, 4, 5)
    ]
    assert ran[0].makespan > ran[1].makespan > ran[2].makespan
    assert ran[2].makespan == 42 * 30 + 4 * 3  # only the ramps
    default = simulate(schedule, cost, Pipeline.one_f_one_b(3))
    np.testing.assert_array_equal(default.forward_end, ran[0].forward_end)


def test_optimizer_steps_know_the_norm_of_all_stages():
    """A stage has taken the step before the first tick that needs it, and not sooner.

    Stage 0 has then finished the tick that completes the batch.
    """
    for num_stages, in_flight in ((1, 1), (2, 2), (4, 4), (4, 5), (4, 7), (5, 12)):
        pipeline = Pipeline.one_f_one_b(num_stages, in_flight)
        ran = simulate(stream(*[10] * 30), equal(num_stages), pipeline)
        for stage in range(num_stages):
            stepped = ran.backward_end[stage, 9 + pipeline.step_delay(stage)]
            following = ran.forward_start[stage, 9 + pipeline.distance]
            assert ran.backward_end[0, 9] <= stepped <= following
            assert ran.forward_end[stage, 8 + pipeline.distance] <= stepped


def test_a_tick_takes_as_long_as_its_slowest_lane():
    ran = simulate(stream(10, 4, 0, 7), equal(1), Pipeline(), num_lanes=2)
    assert ran.makespan == 3 * (10 + 7)
    with pytest.raises(ValueError, match="3, is not a multiple of num_lanes"):
        simulate(stream(10, 4, 7), equal(1), Pipeline(), num_lanes=2)


def test_window_sum():
    """With two stages, each cycle costs the larger of two consecutive microbatches."""
    schedule = stream(10, 30, 20, 0, 5)
    assert window_sum(schedule, equal(2)) == 3 * (10 + 30 + 30 + 20 + 5 + 5)
    assert window_sum(schedule, equal(1)) == 3 * (10 + 30 + 20 + 5)
    assert window_sum(stream(), equal(2)) == 0


def test_window_sum_with_a_slower_stage():
    cost = equal(2, last_stage=2)
    assert window_sum(stream(10, 15), cost) == 3 * (10 + 20 + 30)


def test_refuses_costs_of_another_pipeline():
    with pytest.raises(ValueError, match="2 stages and the pipeline 3"):
        simulate(stream(1), equal(2), Pipeline.one_f_one_b(3))


def test_costs_are_checked():
    with pytest.raises(ValueError, match="negative coefficient"):
        AffineCost(base=-1, per_token=1, per_square=0)
    with pytest.raises(ValueError, match=r"must ascend, got \(32, 16\)"):
        equal(2, buckets=(32, 16))
    with pytest.raises(ValueError, match="at least one stage"):
        CostModel(stages=())
    with pytest.raises(ValueError, match="communication=-1"):
        equal(2, communication=-1)
    with pytest.raises(ValueError, match=r"padding=1.5 must be a share"):
        equal(2, padding=1.5)
