"""Tests planning windows in the background."""

import threading

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    get_packer,
)
from jaxlora.scheduler.stream import PlanAhead

LIMITS = Limits(capacity=64, block_tokens=8)


def window(first: int, count: int = 3) -> tuple[Sample, ...]:
    return tuple(
        Sample(owner=j, batch=b, index=i, num_tokens=5 + (7 * i + 3 * j + b) % 40)
        for j in range(3)
        for b in range(first, first + count)
        for i in range(4)
    )


def pack(samples) -> Schedule:
    token = AffineCost(base=0.0, per_token=0.5, per_square=0.0)
    cost = CostModel.uniform(1, forward=token, backward=token, buckets=(64,))
    return get_packer("joint")(samples, LIMITS, Pipeline(), cost)


def test_takes_the_prepared_plan():
    threads = []

    def recording(samples):
        threads.append(threading.current_thread())
        return pack(samples)

    with PlanAhead(recording) as plans:
        first = plans.take(window(0))
        assert not first.ahead and first.schedule == pack(window(0))
        plans.prepare(window(3))
        second = plans.take(list(window(3)))
        assert second.ahead and second.schedule == pack(window(3))
        assert not plans.take(window(3)).ahead  # a plan can only be taken once
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, True]


def test_an_unexpected_window_is_planned_again():
    with PlanAhead(pack) as plans:
        plans.prepare(window(3))
        taken = plans.take(window(3)[:-1])
        assert not taken.ahead and taken.schedule == pack(window(3)[:-1])


def test_waits_for_a_late_plan():
    go = threading.Event()

    def slow(samples):
        assert go.wait(10)
        return pack(samples)

    with PlanAhead(slow) as plans:
        plans.prepare(window(0))
        threading.Timer(0.05, go.set).start()
        taken = plans.take(window(0))
    assert taken.ahead and taken.waited_seconds > 0.02
    assert taken.schedule == pack(window(0))


@pytest.mark.parametrize("ahead", [False, True])
def test_errors_are_raised_when_the_plan_is_taken(ahead):
    def lossy(samples):
        whole = pack(samples)
        return Schedule(microbatches=whole.microbatches[1:], limits=LIMITS)

    long = (Sample(owner=0, batch=0, index=0, num_tokens=65),)
    for packer, samples, error, words in (
        (lossy, window(0), RuntimeError, "is not scheduled"),
        (pack, long, ValueError, "over the capacity of 64 tokens"),
    ):
        with PlanAhead(packer) as plans:
            if ahead:
                plans.prepare(samples)
            with pytest.raises(error, match=words):
                plans.take(samples)
            # The next window can still be planned.
            assert packer is lossy or plans.take(window(0)).schedule


def test_closes_while_a_plan_is_in_progress():
    go = threading.Event()
    plans = PlanAhead(lambda samples: go.wait(10))
    plans.prepare(window(0))
    plans.close()
    go.set()
