"""A stream is planned stretch by stretch, and is one legal schedule as a whole."""

import dataclasses
import itertools
import random
import threading

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    pack_ticks,
    padded_tokens,
    simulate,
    violations,
)
from jaxlora.scheduler.lanes import Tick, ticks_of
from jaxlora.scheduler.pack.fill import balanced, evened, fill_ticks
from jaxlora.scheduler.pack.jobs import JobQueue, job_batches
from jaxlora.scheduler.stream.state import Position, Rules, StreamState, advance
from jaxlora.scheduler.stream.stream import PlanAhead, Stretch, next_stretch
from tests.scheduler.strategies import seeds

LIMITS = Limits(capacity=512, block_tokens=16)


def whole_stream(positions, lengths, rules):
    """Yields all ticks of jobs that begin together and run to their ends."""
    state = StreamState()
    for position in positions:
        if position.batch < position.num_batches:
            state = state.with_job(position)
    while (stretch := next_stretch(state, lengths, rules)).ticks:
        yield from stretch.ticks
        state = stretch.after


def rules(
    num_stages=1,
    data=1,
    fsdp=1,
    *,
    packer="joint",
    buckets=(512,),
    shapes_from=0,
) -> Rules:
    half = AffineCost(base=0.0, per_token=0.5 / num_stages, per_square=0.0)
    return Rules(
        limits=LIMITS,
        lanes=Lanes(data=data, fsdp=fsdp, pipeline=Pipeline.one_f_one_b(num_stages)),
        cost=CostModel.uniform(
            num_stages, forward=half, backward=half, buckets=buckets
        ),
        shapes_from=shapes_from,
        packer=packer,
        num_batches=2,
    )


def test_lanes_of_a_tick_have_the_shape_of_the_longest():
    """And all of them take its time."""
    rng = random.Random(0)
    samples = [
        Sample(owner=job, batch=batch, index=i, num_tokens=rng.choice((20, 300)))
        for job, batch, i in itertools.product(range(2), range(6), range(6))
    ]
    one_pass = AffineCost(base=8.0, per_token=1.0, per_square=0.0)
    given = dataclasses.replace(
        rules(num_stages=4, data=2),
        cost=CostModel.uniform(
            4, forward=one_pass, backward=one_pass, buckets=(128, 512)
        ),
    )
    packed = pack_ticks(samples, LIMITS, "joint", given.lanes, given.cost)
    found = simulate(packed, given.cost, given.lanes.pipeline, num_lanes=2)
    times = (found.forward_end - found.forward_start)[0]
    rows = set()
    for tick, time in zip(ticks_of(packed.microbatches, 2), times, strict=True):
        rows.add(given.rows(0, tick))
        assert time == pytest.approx(
            one_pass(given.rows(0, tick), 0) if any(tick) else 0
        )
    assert rows == {128, 512}


class Mix:
    """Random jobs: their numbers of batches, batch sizes and lengths."""

    def __init__(self, seed: int, num_jobs: int = 4):
        rng = random.Random(seed)
        self.tokens = [
            [
                [rng.randint(1, 300) for _ in range(rng.randint(1, 6))]
                for _ in range(rng.randint(1, 14))
            ]
            for _ in range(num_jobs)
        ]

    def lengths(self, job: int, batch: int) -> list[int]:
        return self.tokens[job][batch]

    def position(self, job: int, *, slot: int | None = None, batch: int = 0):
        batches = self.tokens[job]
        return Position(
            job=job,
            owner=job if slot is None else slot,
            batch=batch,
            num_batches=len(batches),
            batch_tokens=sum(map(sum, batches)) / len(batches),
        )

    @property
    def positions(self) -> list[Position]:
        return [self.position(job) for job in range(len(self.tokens))]

    @property
    def samples(self) -> list[Sample]:
        return [
            Sample(owner=job, batch=batch, index=i, num_tokens=n)
            for job, batches in enumerate(self.tokens)
            for batch, tokens in enumerate(batches)
            for i, n in enumerate(tokens)
        ]


KINDS = {
    "one device": rules(),
    "stages": rules(4),
    "lanes": rules(2, fsdp=3),
    "replicas": rules(2, data=2),
    "replicas with lanes": rules(1, data=2, fsdp=2),
    "shapes": rules(buckets=(128, 512), shapes_from=6),
    "shapes of lanes": rules(fsdp=2, buckets=(256, 512), shapes_from=4),
    "greedy": rules(3, packer="greedy"),
    "greedy lanes": rules(2, fsdp=2, packer="greedy"),
}


def schedule_of(ticks, limits: Limits = LIMITS) -> Schedule:
    return Schedule(microbatches=tuple(m for t in ticks for m in t), limits=limits)


def check(ticks, samples, of: Rules) -> None:
    """Checks by code that does not know of streams."""
    lanes, schedule = of.lanes, schedule_of(ticks, of.limits)
    distance = lanes.pipeline.distance
    assert not violations(
        schedule, samples, distance=distance, num_lanes=lanes.num_lanes
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(6))
def test_the_stretches_are_one_legal_schedule(kind, seed):
    mix, of = Mix(seed), KINDS[kind]
    ticks = list(whole_stream(mix.positions, mix.lengths, of))
    check(ticks, mix.samples, of)


def with_max_samples(of: Rules, max_samples: int) -> Rules:
    limits = dataclasses.replace(of.limits, max_samples=max_samples)
    return dataclasses.replace(of, limits=limits)


@pytest.mark.parametrize("max_samples", [1, 3])
@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("greedy")])
def test_microbatches_keep_the_most_samples(kind, max_samples):
    mix, of = Mix(3), with_max_samples(KINDS[kind], max_samples)
    ticks = list(whole_stream(mix.positions, mix.lengths, of))
    check(ticks, mix.samples, of)
    assert max(len(m) for tick in ticks for m in tick) == max_samples


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("greedy")])
def test_microbatches_keep_the_most_jobs(kind):
    mix, of = Mix(3), KINDS[kind]
    limits = dataclasses.replace(of.limits, max_jobs=2)
    of = dataclasses.replace(of, limits=limits)
    ticks = list(whole_stream(mix.positions, mix.lengths, of))
    check(ticks, mix.samples, of)
    assert max(len({s.owner for s in m}) for tick in ticks for m in tick) == 2


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("buckets", [(), (512,)])
@pytest.mark.parametrize("most", [{"max_samples": 2}, {"max_jobs": 2}])
def test_plans_keep_the_most_samples_and_jobs(num_stages, buckets, most):
    """Those of whole jobs, too, whatever order is the fastest."""
    of = rules(num_stages, buckets=buckets)
    limits = dataclasses.replace(LIMITS, **most)
    for lanes in (of.lanes, dataclasses.replace(of.lanes, data=2)):
        samples = Mix(5, num_jobs=3).samples
        found = pack_ticks(samples, limits, "joint", lanes, of.cost)
        assert not violations(
            found, samples, distance=num_stages, num_lanes=lanes.num_lanes
        )


def test_short_samples_share_microbatches_with_long_ones():
    """A plan that knows the room has fewer microbatches than one that is split."""
    mix, of = Mix(0), rules()
    mix.tokens = [[[6] * 40] * 8, [[250]] * 16]
    plain = list(whole_stream(mix.positions, mix.lengths, of))
    split = sum(-(-len(m) // 21) for (m,) in plain)
    known = list(whole_stream(mix.positions, mix.lengths, with_max_samples(of, 21)))
    assert len(plain) == len(known) == 16
    assert split == 24


def random_mix(*jobs: tuple[int, int]) -> Mix:
    """Jobs with a number of batches, and of samples in each."""
    rng, mix = random.Random(0), Mix(0)
    mix.tokens = [
        [[rng.randint(20, 200) for _ in range(size)] for _ in range(num)]
        for num, size in jobs
    ]
    return mix


def shares(mix: Mix, ticks) -> list[float]:
    """Returns the part of each job's tokens that some ticks have."""
    done = [0] * len(mix.tokens)
    for s in (s for tick in ticks for m in tick for s in m):
        done[s.owner] += s.num_tokens
    return [n / sum(map(sum, of)) for n, of in zip(done, mix.tokens, strict=True)]


@pytest.mark.parametrize("kind", ["one device", "stages", "lanes"])
@pytest.mark.parametrize(
    "jobs",
    [((80, 8), (40, 8), (20, 8), (20, 4)), ((40, 2), (40, 4), (40, 8), (40, 16))],
)
def test_no_job_waits_for_longer_ones(kind, jobs):
    """Each has at least its share; on one device, where all need room, no more."""
    mix = random_mix(*jobs)
    ticks = list(whole_stream(mix.positions, mix.lengths, KINDS[kind]))
    for part in (0.25, 0.5):  # at the end, those that need the most ticks come first
        found = shares(mix, ticks[: round(part * len(ticks))])
        assert min(found) > part - 0.1
        assert max(found) < part + 0.1 or kind != "one device"


@pytest.mark.parametrize("num", [10, 120])
def test_a_job_that_joins_has_its_share_at_once(num):
    """It neither waits for the others, nor do they wait until it has caught up."""
    mix, of = random_mix((120, 8), (120, 8), (num, 8)), rules()
    state = StreamState().with_job(mix.position(0)).with_job(mix.position(1))
    while state.positions[0].batch < 60:
        state = next_stretch(state, mix.lengths, of).after
    before = [1 - p.num_left / 120 for p in state.positions]
    state, ticks = state.with_job(mix.position(2)), []
    while (stretch := next_stretch(state, mix.lengths, of)).ticks:
        ticks += stretch.ticks
        state = stretch.after
    assert any(s.owner == 2 for tick in ticks[:8] for m in tick for s in m)
    for half in (0.25, 0.5, 0.75):
        found = shares(mix, ticks[: round(half * len(ticks))])
        rest = [f / (1 - b) for f, b in zip(found, [*before, 0.0], strict=True)]
        assert half - 0.12 < min(rest) <= max(rest) < half + 0.12


@pytest.mark.parametrize("kind", ["one device", "stages"])
@pytest.mark.parametrize("seed", range(4))
def test_it_takes_as_long_as_one_plan_over_everything(kind, seed):
    mix, of = Mix(seed, num_jobs=8), KINDS[kind]
    streamed = schedule_of(whole_stream(mix.positions, mix.lengths, of))
    whole = pack_ticks(mix.samples, LIMITS, "joint", of.lanes, of.cost)
    pipeline = of.lanes.pipeline
    times = [simulate(s, of.cost, pipeline).makespan for s in (streamed, whole)]
    assert times[0] <= times[1] * 1.001


@pytest.mark.parametrize(
    "num_stages, num_lanes, buckets",
    [(1, 2, ()), (1, 8, ()), (2, 4, (128, 256, 512)), (4, 2, (512,))],
)
def test_lanes_take_as_long_as_one_plan_over_everything(num_stages, num_lanes, buckets):
    """A stream has the targets, ramps and polishing of a plan of all samples."""
    of = rules(num_stages, fsdp=num_lanes, buckets=buckets)
    times = []
    for seed in range(2):
        mix = Mix(seed, num_jobs=6)
        streamed = schedule_of(whole_stream(mix.positions, mix.lengths, of))
        whole = pack_ticks(mix.samples, LIMITS, "joint", of.lanes, of.cost)
        time = lambda s: (
            simulate(s, of.cost, of.lanes.pipeline, num_lanes=num_lanes).makespan
        )
        queue = JobQueue.of(job_batches(mix.samples), LIMITS, of.lanes, of.cost)
        ticks = fill_ticks(queue, LIMITS, of.lanes)
        even = (evened(tick, LIMITS, num_lanes, of.cost) for tick in ticks)
        plain = schedule_of(balanced(even, num_lanes))
        times.append((time(streamed), time(whole), time(plain)))
    streamed, whole, plain = map(sum, zip(*times, strict=True))
    assert streamed <= whole * 1.03 and streamed <= plain, times


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(6))
def test_jobs_join_and_leave_between_any_two_ticks(kind, seed):
    """Planned ticks that have not run are planned anew; all rules hold throughout."""
    rng, mix, of = random.Random(seed), Mix(seed, num_jobs=6), KINDS[kind]
    num_slots = 4
    state, waiting, stopped = StreamState(), list(range(6)), set()
    in_slot: dict[int, int] = {}
    ran: list[Tick] = []  # whose samples name their job
    while True:
        for slot in range(num_slots):
            if slot not in in_slot and waiting:
                job = in_slot[slot] = waiting.pop(0)
                position = mix.position(job, slot=slot)
                ready = dataclasses.replace(position, ready=state.tick)
                state = state.with_job(ready)
        stretch = next_stretch(state, mix.lengths, of)
        if not stretch.ticks:
            break
        some = stretch.ticks[: rng.randint(1, len(stretch.ticks))]
        state = advance(state, some, mix.lengths, of)
        if len(some) == len(stretch.ticks):
            assert state == stretch.after
            state = stretch.after
        for tick in some:
            ran.append(
                tuple(
                    tuple(dataclasses.replace(s, owner=in_slot[s.owner]) for s in m)
                    for m in tick
                )
            )
        left = {p.owner for p in state.positions}
        if rng.random() < 0.2 and left:
            leaves = rng.choice(sorted(left))
            stopped.add(in_slot[leaves])
            state = state.without(leaves)
            left.discard(leaves)
        in_slot = {slot: job for slot, job in in_slot.items() if slot in left}
    samples = [s for tick in ran for m in tick for s in m]
    distance, num_lanes = of.lanes.pipeline.distance, of.lanes.num_lanes
    schedule = schedule_of(ran)
    assert not violations(schedule, samples, distance=distance, num_lanes=num_lanes)
    whole = {s for s in mix.samples if s.owner not in stopped}
    assert whole <= set(samples) <= set(mix.samples)


def test_shapes_are_used_from_a_tick_on():
    """Before it, all ticks have one shape, and are those of a run with one."""
    mix, num = Mix(0, num_jobs=2), 4
    one, some = rules(fsdp=2), KINDS["shapes of lanes"]
    of_one, of_some = (
        list(whole_stream(mix.positions, mix.lengths, of)) for of in (one, some)
    )
    same = [a == b for a, b in zip(of_one, of_some, strict=False)]
    assert all(same[:num]) and not all(same)
    rows = [some.rows(number, tick) for number, tick in enumerate(of_some)]
    assert set(rows[:num]) == {512} and 256 in rows[num:]
    for tick, num in zip(of_some, rows, strict=True):
        longest = max(padded_tokens(m, LIMITS) for m in tick)
        assert longest <= num


def test_an_unknown_or_early_sample_is_refused():
    mix, of = Mix(0), KINDS["stages"]
    state = StreamState()
    for position in mix.positions:
        state = state.with_job(position)
    first = mix.samples[0]
    whole = tuple(s for s in mix.samples if s.owner == 0 and s.batch == 0)
    for wrong, why in (
        (dataclasses.replace(first, index=99), r"samples \[99\] of slot 0"),
        (dataclasses.replace(first, batch=1), r"has batches \[1\] of slot 0"),
        (dataclasses.replace(first, num_tokens=999), "over its capacity"),
        (dataclasses.replace(first, num_tokens=first.num_tokens + 1), "other lengths"),
    ):
        with pytest.raises(RuntimeError, match=why):
            advance(state, [((wrong,),)], mix.lengths, of)
    after = advance(state, [((s,),) for s in whole], mix.lengths, of)
    (moved,) = [p for p in after.positions if p.owner == 0]
    assert moved.batch == 1 and moved.left is None
    assert moved.ready == len(whole) - 1 + of.lanes.pipeline.distance
    early = Sample(owner=0, batch=1, index=0, num_tokens=mix.lengths(0, 1)[0])
    with pytest.raises(RuntimeError, match="may run from tick"):
        advance(after, [((early,),)], mix.lengths, of)


def test_two_jobs_cannot_have_one_slot():
    mix = Mix(0)
    state = StreamState().with_job(mix.position(0))
    with pytest.raises(ValueError, match="slot 0 has a job already"):
        state.with_job(mix.position(1, slot=0))


def test_a_sample_over_the_capacity_is_refused():
    of, position = KINDS["one device"], Mix(0).position(0)
    with pytest.raises(ValueError, match="over the capacity of 512 tokens"):
        next_stretch(StreamState().with_job(position), lambda job, batch: [513], of)


# ---- in the background ---------------------------------------------------------------


def state_of(tick: int) -> StreamState:
    return StreamState(tick=tick)


def plan(state: StreamState) -> Stretch:
    return Stretch(ticks=(), after=dataclasses.replace(state, tick=state.tick + 1))


def test_takes_the_prepared_plan():
    threads = []

    def recording(state):
        threads.append(threading.current_thread())
        return plan(state)

    with PlanAhead(recording) as plans:
        first = plans.take(state_of(0))
        assert not first.ahead and first.stretch == plan(state_of(0))
        plans.prepare(state_of(3))
        second = plans.take(state_of(3))
        assert second.ahead and second.stretch == plan(state_of(3))
        assert not plans.take(state_of(3)).ahead  # a plan can only be taken once
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, True]


def test_an_unexpected_state_is_planned_again():
    with PlanAhead(plan) as plans:
        plans.prepare(state_of(3))
        taken = plans.take(state_of(4))
        assert not taken.ahead and taken.stretch == plan(state_of(4))


def test_waits_for_a_late_plan():
    go = threading.Event()

    def slow(state):
        assert go.wait(10)
        return plan(state)

    with PlanAhead(slow) as plans:
        plans.prepare(state_of(0))
        threading.Timer(0.05, go.set).start()
        taken = plans.take(state_of(0))
    assert taken.ahead and taken.waited_seconds > 0.02
    assert taken.stretch == plan(state_of(0))


@pytest.mark.parametrize("ahead", [False, True])
def test_errors_are_raised_when_the_plan_is_taken(ahead):
    def fails(state):
        if state.tick == 0:
            raise RuntimeError("a bug")
        return plan(state)

    with PlanAhead(fails) as plans:
        if ahead:
            plans.prepare(state_of(0))
        with pytest.raises(RuntimeError, match="a bug"):
            plans.take(state_of(0))
        assert plans.take(state_of(1)).stretch == plan(state_of(1))


def test_closes_while_a_plan_is_in_progress():
    go = threading.Event()
    plans = PlanAhead(lambda state: go.wait(10))
    plans.prepare(state_of(0))
    plans.close()
    go.set()
