"""A stream that is saved at any point goes on with the same microbatches."""

import dataclasses
import random

import pydantic
import pytest

from jaxlora.plan.stream_plan import StreamPlan, StreamTick
from jaxlora.run.saved_run import SavedStream
from tests.scheduler.strategies import seeds
from tests.scheduler.stream.test_stream import KINDS, Mix

NUM_SLOTS = 4


class Course:
    """A run without devices: jobs start, step and leave as a random sequence says.

    Attributes:
        plan: The stream.
        steps: Optimizer steps of the job in each slot.
    """

    def __init__(self, mix: Mix, rules, lag: int):
        self.mix, self.plan, self.lag = mix, StreamPlan(rules, mix.lengths), lag
        self.in_slot: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.in_flight: list[StreamTick] = []
        self.waiting = list(range(len(mix.tokens)))

    def fill_slots(self) -> None:
        for slot in range(NUM_SLOTS):
            is_free = slot not in self.in_slot and self.plan.is_free(slot)
            if is_free and self.waiting:
                job = self.in_slot[slot] = self.waiting.pop(0)
                self.steps[slot] = 0
                self.plan.start(self.mix.position(job, slot=slot))

    def leave(self, slot: int) -> None:
        self.plan.drop(slot)
        del self.in_slot[slot], self.steps[slot]
        for key in [key for key in self.left if key[0] == slot]:
            del self.left[key]

    def tick(self) -> StreamTick | None:
        """Takes a tick, and reports the steps of one that was taken `lag` before."""
        taken = self.plan.take()
        if taken is not None:
            self.in_flight.append(taken)
        if self.in_flight and (taken is None or len(self.in_flight) > self.lag):
            self.report(self.in_flight.pop(0))
        return taken

    def report(self, taken: StreamTick) -> None:
        for s in () if taken.is_held else tuple(taken.samples):
            key = s.owner, s.batch
            size = len(self.mix.lengths(self.in_slot[s.owner], s.batch))
            self.left[key] = self.left.get(key, size) - 1
            if not self.left[key]:
                del self.left[key]
                assert self.steps[s.owner] == s.batch
                self.steps[s.owner] += 1
                self.plan.note_step(s.owner)

    def ended(self) -> list[int]:
        return [
            slot
            for slot, job in self.in_slot.items()
            if self.steps[slot] == len(self.mix.tokens[job])
        ]

    def resumed(self) -> "Course":
        """Returns the run as another process goes on with it."""
        adapter = pydantic.TypeAdapter(SavedStream)
        saved = self.plan.saved("jobs", [])
        read = adapter.validate_json(adapter.dump_json(saved))
        assert read == saved
        other = Course(self.mix, self.plan._rules, self.lag)
        other.in_slot, other.steps = dict(self.in_slot), dict(self.steps)
        other.waiting = list(self.waiting)
        assert other.plan.restore(read, self.steps, self.in_slot, "jobs")
        return other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(5))
def test_a_saved_stream_goes_on_alike(kind, seed):
    """Jobs that leave or join afterwards change the same ticks in both runs."""
    rng = random.Random(seed)
    rules = KINDS[kind]
    lag = 2 * rules.lanes.pipeline.num_stages
    one = Course(Mix(seed, num_jobs=7), rules, lag)
    one.fill_slots()
    for _ in range(rng.randint(1, 15)):
        one.tick()
        for slot in one.ended():
            one.leave(slot)
        one.fill_slots()
    other = one.resumed()
    num_repeated = len(other.plan._fixed)
    for _ in range(num_repeated):
        assert other.tick() is not None
    compared = 0
    for _ in range(200):
        ours, theirs = one.tick(), other.tick()
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.tick, ours.rows) == (theirs.tick, theirs.rows)
            compared += 1
        leaving = {*one.ended()} & {*other.ended()}
        if rng.random() < 0.1 and one.in_slot:
            leaving |= {rng.choice(sorted(one.in_slot))} & other.in_slot.keys()
        for slot in leaving:
            one.leave(slot)
            other.leave(slot)
        one.fill_slots()
        other.fill_slots()
        assert one.in_slot == other.in_slot
        if not one.in_slot:
            break
    assert not one.in_slot and not other.in_slot
    assert compared


def run_on(course: Course) -> list:
    """Runs until nothing is left, as a trainer does; returns the ticks."""
    ticks = []
    while True:
        taken = course.tick()
        if taken is not None:
            ticks.append((taken.tick, taken.rows))
        for slot in course.ended():
            course.leave(slot)
        course.fill_slots()
        if taken is None and not course.in_flight:
            return ticks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(4))
def test_an_interrupted_stream_goes_on_as_if_it_had_not_been(kind, seed):
    """Jobs that end while it drains make room for others in the same ticks."""
    rng, rules = random.Random(seed), KINDS[kind]
    lag = 2 * rules.lanes.pipeline.num_stages

    def start() -> Course:
        course = Course(Mix(seed, num_jobs=7), rules, lag)
        course.fill_slots()
        return course

    whole = run_on(start())
    for number in rng.sample(range(1, len(whole)), 4):
        cut = start()
        before = []
        for _ in range(number):
            taken = cut.tick()
            assert taken is not None
            before.append((taken.tick, taken.rows))
            for slot in cut.ended():
                cut.leave(slot)
            cut.fill_slots()
        cut.plan.stop()
        before += run_on(cut)
        resumed = cut.resumed()
        num_repeated = len(resumed.plan._fixed)
        resumed.fill_slots()
        after = run_on(resumed)
        assert before[len(before) - num_repeated :] == after[:num_repeated]
        found = before + after[num_repeated:]
        # A run that has nothing else to do ends after other numbers of no-ops.
        assert [t for t in found if any(t[0])] == [t for t in whole if any(t[0])]


def test_a_slot_that_was_left_is_free_once_no_tick_in_flight_has_its_rows():
    rules = KINDS["stages"]
    width = rules.lanes.pipeline.in_flight or rules.lanes.pipeline.num_stages
    course = Course(Mix(0, num_jobs=7), rules, lag=8)
    course.fill_slots()
    slot = next(iter(course.tick().samples)).owner
    course.leave(slot)
    for _ in range(width):
        assert not course.plan.is_free(slot)
        course.tick()
    assert course.plan.is_free(slot)


def test_saved_ticks_of_other_jobs_or_rules_are_not_used():
    mix = Mix(0)
    one = Course(mix, KINDS["stages"], 8)
    one.fill_slots()
    one.tick()
    saved = one.plan.saved("jobs", [])
    assert not StreamPlan(KINDS["stages"], mix.lengths).restore(saved, {}, {}, "others")
    assert not StreamPlan(KINDS["lanes"], mix.lengths).restore(saved, {}, {}, "jobs")
    again = StreamPlan(KINDS["stages"], mix.lengths)
    assert again.restore(saved, one.steps, one.in_slot, "jobs")


def test_the_tick_of_the_first_shapes_is_saved():
    """On a device of another speed, the plan would name another one."""
    mix, rules = Mix(2, num_jobs=6), KINDS["shapes"]
    one = Course(mix, dataclasses.replace(rules, shapes_from=1000), 2)
    one.fill_slots()
    one.tick()
    saved = one.plan.saved("jobs", [])
    other = Course(mix, dataclasses.replace(rules, shapes_from=0), 2)
    other.in_slot, other.steps = dict(one.in_slot), dict(one.steps)
    other.waiting = list(one.waiting)
    assert other.plan.restore(saved, one.steps, one.in_slot, "jobs")
    again = len(other.plan._fixed)
    rest = run_on(one)
    assert run_on(other)[again:] == rest and {rows for _, rows in rest} == {512}


def test_ticks_that_do_not_fit_the_data_are_refused():
    """As of a file that was changed: nothing runs that the rules forbid."""
    mix = Mix(1)
    one = Course(mix, KINDS["stages"], 8)
    one.fill_slots()
    one.tick()
    saved = one.plan.saved("jobs", [])
    (((first, *rest),), rows, dropped), *_ = saved.repeated

    def repeated(rows=rows, **changes: int):
        tick = ((dataclasses.replace(first, **changes), *rest),)
        return dataclasses.replace(saved, repeated=((tick, rows, dropped),))

    for wrong, error in (
        (dataclasses.replace(saved, planned=saved.planned[:1] * 2), RuntimeError),
        (repeated(num_tokens=first.num_tokens + 1), RuntimeError),
        (repeated(index=1000), LookupError),
        (repeated(index=-1), RuntimeError),
        (repeated(batch=1000), LookupError),
        (repeated(owner=99), RuntimeError),
        (repeated(rows=100), RuntimeError),
    ):
        plan = StreamPlan(KINDS["stages"], mix.lengths)
        with pytest.raises(error):
            plan.restore(wrong, one.steps, one.in_slot, "jobs")
