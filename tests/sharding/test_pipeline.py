"""Tests the order of work of a pipeline."""

import itertools

import pytest

from jaxlora.scheduler.types import Pipeline
from jaxlora.sharding.pipeline import one_f_one_b

SIZES = [(7, 1, 1), (1, 3, 3), (2, 4, 4), (9, 4, 4), (9, 3, 5), (3, 2, 6)]


def order(sizes):
    """Passes and steps in the order in which they are dispatched."""
    work = []
    num_ticks, num_stages, width = sizes
    for one in one_f_one_b(lambda tick: tick < num_ticks, num_stages, width):
        work += [(p.kind, p.stage, p.tick) for p in one.passes]
        work += [("step", stage, tick) for stage, tick in one.stepping]
        if one.finished is not None:
            work.append(("finished", None, one.finished))
    return work


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_pass_comes_once_and_after_what_it_needs(sizes):
    num_ticks, num_stages, _ = sizes
    place = {work: i for i, work in enumerate(order(sizes))}
    assert len(place) == len(order(sizes))
    last = num_stages - 1
    for tick in range(num_ticks):
        chain = [("forward", s, tick) for s in range(last)]
        chain += [("forward_backward", last, tick)]
        chain += [("backward", s, tick) for s in reversed(range(last))]
        chain += [("step", s, tick) for s in range(num_stages)]
        chain += [("finished", None, tick)]
        places = [place.pop(work) for work in chain]
        assert places == sorted(places)
    assert not place, "work of other ticks"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_next_batch_reads_stepped_weights_from_distance_w_on(sizes):
    """A forward pass W ticks later follows the step of its stage; W - 1 does not."""
    num_ticks, num_stages, width = sizes
    place = {work: i for i, work in enumerate(order(sizes))}

    def forward(stage: int, tick: int) -> int:
        kind = "forward_backward" if stage == num_stages - 1 else "forward"
        return place[kind, stage, tick]

    for tick, stage in itertools.product(range(num_ticks - width), range(num_stages)):
        assert place["step", stage, tick] < forward(stage, tick + width)
        if stage == 0 and num_stages > 1:
            assert place["step", 0, tick] > forward(0, tick + width - 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_stage_steps_as_soon_as_the_first_one_has_finished_the_tick(sizes):
    """No sooner, as it needs their norms; one that is ahead steps before the others."""
    num_ticks, num_stages, width = sizes
    pipeline = Pipeline(num_stages=num_stages, in_flight=width)
    rounds = one_f_one_b(lambda tick: tick < num_ticks, num_stages, width)
    for number, one in enumerate(rounds):
        for stage, tick in one.stepping:
            assert number == tick + pipeline.step_delay(stage)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ticks_in_flight_are_bounded(sizes):
    num_ticks, num_stages, width = sizes
    for stage in range(num_stages - 1):
        in_flight = most = 0
        for kind, where, _ in order(sizes):
            if where == stage:
                in_flight += (kind == "forward") - (kind == "backward")
                most = max(most, in_flight)
        pipeline = Pipeline(num_stages=num_stages, in_flight=width)
        assert most == min(pipeline.warm_up(stage) + 1, num_ticks)


def test_fewer_ticks_in_flight_than_stages_are_refused():
    with pytest.raises(ValueError, match="at least the number of stages, 3"):
        next(one_f_one_b(lambda tick: tick < 5, 3, 2))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_tick_is_asked_for_once_and_only_when_it_is_needed(sizes):
    """What comes next may depend on all that has happened before."""
    num_ticks, num_stages, width = sizes
    asked = []

    def has_tick(tick):
        asked.append(tick)
        return tick < num_ticks

    for number, one in enumerate(one_f_one_b(has_tick, num_stages, width)):
        assert asked == list(range(min(number + width, num_ticks + 1)))
        assert {p.tick for p in one.passes} <= set(
            range(min(number + width, num_ticks))
        )
