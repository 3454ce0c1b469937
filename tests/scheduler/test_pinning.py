"""Tests pinning jobs to replicas."""

import pytest

from jaxlora.scheduler import Lanes, Pipeline
from jaxlora.scheduler.pinning import (
    Load,
    choose_slots,
    decide_pinning,
    estimate_ticks,
)

CAPACITY = 1000
TWO = Lanes(data=2)


def load(num_batches, batch_tokens) -> Load:
    return Load(num_batches=num_batches, batch_tokens=batch_tokens)


def test_deals_jobs_that_are_balanced():
    found = decide_pinning([load(10, 3000)] * 4, TWO, CAPACITY, num_slots=3)
    assert found.lanes == Lanes(data=2, slots_per_replica=2)
    figures = "60 ticks if pinned, 60 if shared"
    assert found.reason == f"each job runs on one replica: {figures}"


@pytest.mark.parametrize(
    "loads, num_slots, reason",
    [
        ([load(10, 3000)], 4, "at most 1 jobs run"),
        ([load(10, 3000)] * 4, 1, "at most 1 jobs run"),
        ([load(10, 3000)] * 3, 3, "60 ticks if pinned, 45 if shared"),
        ([load(40, 3000), load(10, 3000)], 2, "120 ticks if pinned, 75 if shared"),
    ],
)
def test_shares_jobs_where_pinning_would_be_slower(loads, num_slots, reason):
    found = decide_pinning(loads, TWO, CAPACITY, num_slots)
    assert found.lanes == TWO and reason in found.reason


def test_one_replica_shares_its_jobs():
    lanes = Lanes(fsdp=2, slots_per_replica=3)
    found = decide_pinning([load(1, 1)] * 3, lanes, CAPACITY, 3)
    assert found.lanes == Lanes(fsdp=2) and found.reason == "there is one replica"


def test_small_batches_are_pinned_unless_a_replica_lacks_lanes():
    # A batch takes a tick in any case, however many lanes it has.
    small = [load(10, 500)] * 4
    assert decide_pinning(small, TWO, CAPACITY, 4).lanes.pinned


def test_estimates_ticks():
    loads = [load(10, 500), load(4, 4000)]
    assert estimate_ticks(loads, TWO, CAPACITY, 2) == 10.5  # the tokens
    deep = Lanes(data=2, pipeline=Pipeline.one_f_one_b(4))
    assert estimate_ticks(loads, deep, CAPACITY, 2) == 40  # the chain of the first
    assert estimate_ticks(loads, deep, CAPACITY, 1) == 60  # one after the other
    assert estimate_ticks([], TWO, CAPACITY, 1) == 0


def test_new_jobs_balance_the_replicas():
    lanes = Lanes(data=2, slots_per_replica=3)
    new = {0: 10.0, 1: 30.0, 2: 15.0, 3: 25.0}
    assert choose_slots(new, {}, lanes) == {1: 0, 3: 3, 2: 4, 0: 1}
    # Running jobs stay where they are, so a busy replica gets fewer jobs.
    assert choose_slots(new, {1: 100.0}, lanes) == {1: 3, 3: 4, 2: 5, 0: 0}
    with pytest.raises(ValueError, match="4 wait, and free slots: 3"):
        choose_slots(new, {0: 1.0, 1: 1.0, 5: 1.0}, lanes)
