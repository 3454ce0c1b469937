"""Tests that local search keeps schedules legal and lowers their cost."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    joint,
    violations,
)
from jaxlora.scheduler.windows.cursor import WorkModel
from jaxlora.scheduler.windows.local_search import LocalSearch
from tests.scheduler.strategies import LIMITS, costs, job_mixes, window_sum

PER_TOKEN = AffineCost(base=0, per_token=1, per_square=0)
ONE_BATCH = {"committed": 10**6, "lookahead": 0, "trades_per_slot": 0}


def search(microbatches, pipeline, cost, *, limits=LIMITS, earliest=None, num=None):
    """Makes a search in the first `num` microbatches; the others are fixed."""
    work = WorkModel.from_cost(cost)
    slots = [[work.item(s) for s in m] for m in microbatches]
    jobs = {s.owner for m in microbatches for s in m}
    earliest = {job: 0 for job in jobs} | (earliest or {})
    return LocalSearch(
        slots[:num], earliest, limits, pipeline, cost, before=[],
        after=slots[num:] if num else [],
    )  # fmt: skip


def schedule(slots, limits=LIMITS):
    microbatches = (
        tuple(sorted((i[2] for i in slot), key=lambda s: (s.owner, s.index)))
        for slot in slots
    )
    return Schedule(microbatches=tuple(microbatches), limits=limits)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(samples=job_mixes(), num_stages=st.integers(1, 8), data=st.data())
def test_never_costs_more_and_keeps_every_rule(samples, num_stages, data):
    pipeline = Pipeline.one_f_one_b(num_stages)
    cost = data.draw(costs(num_stages))
    effort = joint.Effort(
        fill_targets=(data.draw(st.sampled_from([0.6, 1.0])),), **ONE_BATCH
    )
    plain = joint.pack(samples, LIMITS, pipeline, cost, effort)
    found = search(plain.microbatches, pipeline, cost)
    better = schedule(found.run(max_trades=400))
    assert violations(better, samples, distance=num_stages) == []
    assert window_sum(better, cost) <= window_sum(plain, cost) * (1 + 1e-9)
    # The costs that are updated during the search equal those computed from scratch.
    assert found.costs == search(better.microbatches, pipeline, cost).costs
    assert found.slowest == search(better.microbatches, pipeline, cost).slowest


def microbatches(*slots):
    """Makes microbatches from (job, batch, tokens)."""
    index = iter(range(10**6))
    return [
        tuple(
            Sample(owner=j, batch=b, index=next(index), num_tokens=n)
            for j, b, n in slot
        )
        for slot in slots
    ]


def trade(slots, num_stages=2, capacity=512, **kwargs):
    """Returns the tokens in each slot after a search."""
    cost = CostModel.uniform(num_stages, forward=PER_TOKEN, backward=PER_TOKEN)
    limits = Limits(capacity=capacity, block_tokens=1)
    found = search(
        microbatches(*slots), Pipeline.one_f_one_b(num_stages), cost, limits=limits,
        **kwargs,
    )  # fmt: skip
    return [sum(i[1] for i in slot) for slot in found.run(max_trades=1000)]


def test_moves_samples_from_slow_to_fast_slots():
    assert trade([[(0, 0, 50), (0, 0, 50)], [(1, 0, 40), (1, 0, 10)]]) == [90, 60]
    assert trade([[(0, 0, 60), (1, 0, 40)], [(2, 0, 20)]]) == [60, 60]


def test_does_nothing_without_trades():
    cost = CostModel.uniform(2, forward=PER_TOKEN, backward=PER_TOKEN)
    slots = microbatches([(0, 0, 60), (1, 0, 40)], [(2, 0, 20)])
    found = search(slots, Pipeline.one_f_one_b(2), cost)
    assert schedule(found.run(max_trades=0)).microbatches == tuple(slots)


def test_moves_nothing_past_the_next_batch():
    """Job 0 must end in slot 0, because its next batch starts in slot 2."""
    slots = [[(0, 0, 60), (0, 0, 40)], [(1, 0, 10)], [(0, 1, 50)]]
    assert trade(slots) == [100, 10, 50]


def test_moves_nothing_before_it_may_run():
    slots = [[(1, 0, 10)], [(0, 0, 60), (0, 0, 40)]]
    assert trade(slots, earliest={0: 1}) == [10, 100]
    assert trade(slots, earliest={0: 0}) != [10, 100]


def test_mixes_no_batches():
    slots = [[(0, 0, 60), (0, 0, 40)], [], [(0, 1, 50)], [], []]
    assert trade(slots)[2] == 50


def test_moves_nothing_over_the_capacity():
    slots = [[(0, 0, 60), (1, 0, 40)], [(2, 0, 20)]]
    assert trade(slots, capacity=100) == [60, 60]
    cost = CostModel.uniform(2, forward=PER_TOKEN, backward=PER_TOKEN)
    limits = Limits(capacity=128, block_tokens=64)
    found = search(
        microbatches([(0, 0, 60), (1, 0, 40)], [(2, 0, 20), (2, 0, 50)]),
        Pipeline.one_f_one_b(2), cost, limits=limits,
    )  # fmt: skip
    # Samples of another job would need a third block.
    assert [len(s) for s in found.run(max_trades=100)] == [2, 2]


def test_leaves_no_slot_empty():
    assert trade([[(0, 0, 100)], [(1, 0, 10)]]) == [100, 10]


@pytest.mark.parametrize("last_stage", [0.5, 1.0, 2.0])
def test_counts_a_slower_or_faster_last_stage(last_stage):
    cost = CostModel.uniform(
        3, forward=PER_TOKEN, backward=PER_TOKEN, last_stage=last_stage
    )
    slots = microbatches([(0, 0, 30)], [(1, 0, 50)], [(2, 0, 10)], [(3, 0, 40)])
    limits = Limits(capacity=512, block_tokens=1)
    found = search(slots, Pipeline.one_f_one_b(3), cost, limits=limits)
    whole = Schedule(microbatches=tuple(slots), limits=limits)
    # Costs are fractions of a full microbatch's time on the fastest stage.
    unit = 2 * 512 * min(1.0, last_stage)
    assert sum(found.slowest) * unit == pytest.approx(window_sum(whole, cost))
