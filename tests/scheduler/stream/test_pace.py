"""Running jobs get equal shares, or end together; higher priorities come first."""

import collections
import random

import pytest

from jaxlora.scheduler import AffineCost, CostModel, Lanes, Limits, Pipeline
from jaxlora.scheduler.stream.state import Position, Rules, StreamState
from jaxlora.scheduler.stream.stream import next_stretch

CAPACITY = 512
PACES = ("together", "equal")


def rules(pace, num_stages=1, data=1):
    half = AffineCost(base=0.0, per_token=0.5 / num_stages, per_square=0.0)
    return Rules(
        limits=Limits(capacity=CAPACITY, block_tokens=16),
        lanes=Lanes(data=data, pipeline=Pipeline.one_f_one_b(num_stages)),
        cost=CostModel.uniform(
            num_stages, forward=half, backward=half, buckets=(CAPACITY,)
        ),
        pace=pace,
    )


class Jobs:
    """Jobs of (steps, samples of a batch), whose samples have 8 to 120 tokens."""

    def __init__(self, *jobs, priorities=()):
        rng = random.Random(str(jobs))
        self.tokens = [
            [[rng.randint(8, 120) for _ in range(size)] for _ in range(steps)]
            for steps, size in jobs
        ]
        self.priorities = dict(enumerate(priorities))

    def lengths(self, job, batch):
        return self.tokens[job][batch]

    def position(self, job):
        batches = self.tokens[job]
        return Position(
            job=job,
            owner=job,
            batch=0,
            num_batches=len(batches),
            batch_tokens=sum(map(sum, batches)) / len(batches),
            priority=self.priorities.get(job, 0),
        )

    def run(self, of, join_at=None):
        """Returns the ticks; `join_at` has the tick at which each job joins."""
        join_at = join_at or dict.fromkeys(range(len(self.tokens)), 0)
        state, ticks = StreamState(), []
        while True:
            for job in [job for job, at in join_at.items() if at <= len(ticks)]:
                del join_at[job]
                state = state.with_job(self.position(job), of.pace)
            stretch = next_stretch(state, self.lengths, of)
            if not stretch.ticks and not join_at:
                return ticks
            if not stretch.ticks:  # nothing runs until the next job joins
                join_at[min(join_at, key=join_at.__getitem__)] = 0
            ticks += stretch.ticks
            state = stretch.after


def tokens_by_job(ticks):
    found = collections.Counter()
    for tick in ticks:
        for sample in (s for microbatch in tick for s in microbatch):
            found[sample.owner] += sample.num_tokens
    return found


def last_ticks(ticks):
    """Number of the tick with the last sample of each job, in order of the jobs."""
    last = {s.owner: i for i, tick in enumerate(ticks) for m in tick for s in m}
    return [last[owner] for owner in sorted(last)]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(
    "jobs, least",
    [
        (((400, 16), (800, 16), (200, 16)), 0.93),
        # A job with small batches runs at most one of them in each tick.
        (((400, 8), (800, 4), (200, 16)), 0.45),
        (((300, 9), (900, 9), (600, 3)), 0.45),
    ],
)
def test_jobs_get_the_same_number_of_tokens(jobs, least, data):
    """However many steps they have."""
    ticks = Jobs(*jobs).run(rules("equal", data=data))
    for part in (0.1, 0.2, 0.3):  # all are running
        found = tokens_by_job(ticks[: round(part * len(ticks))])
        assert min(found.values()) > least * max(found.values())


def test_a_job_that_joins_gets_its_share_at_once():
    """It does not wait until it has caught up, nor do the others."""
    made, of = Jobs((600, 8), (600, 8), (100, 8)), rules("equal")
    ticks = made.run(of, {0: 0, 1: 0, 2: 120})
    start = min(i for i, t in enumerate(ticks) for m in t for s in m if s.owner == 2)
    found = tokens_by_job(ticks[start : start + 90])
    assert 120 <= start < 150
    assert max(found.values()) - min(found.values()) < 3 * 8 * 120


@pytest.mark.parametrize("pace", PACES)
def test_a_job_that_joins_does_not_catch_up_with_a_lower_priority(pace):
    """One that has waited for long has all of its share left."""
    made = Jobs(*[(300, 8)] * 5, priorities=(0, 1, 1, 1, 1))
    ticks = made.run(rules(pace), {0: 0, 1: 0, 2: 0, 3: 0, 4: 200})
    start = min(i for i, t in enumerate(ticks) for m in t for s in m if s.owner == 4)
    found = tokens_by_job(ticks[start : start + 120])
    assert found[4] < 1.5 * min(found[job] for job in (1, 2, 3))


def test_a_short_job_does_not_wait_for_long_ones():
    made = Jobs(*[(600, 6)] * 4, (60, 6))
    ends = {pace: last_ticks(made.run(rules(pace))) for pace in PACES}
    assert ends["equal"][-1] < 0.2 * max(ends["equal"])
    assert ends["together"][-1] > 0.9 * max(ends["together"])


def test_equal_shares_take_hardly_longer_in_all():
    """A job that needs all ticks that are left takes its part of each of them."""
    made = Jobs(*((50 * (i + 1), 3) for i in range(8)))
    ends = {pace: last_ticks(made.run(rules(pace))) for pace in PACES}
    assert max(ends["equal"]) < 1.05 * max(ends["together"])
    assert sum(ends["equal"]) < 0.85 * sum(ends["together"])


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_job_of_higher_priority_runs_as_if_it_was_alone(pace, num_stages):
    made = Jobs((300, 16), (300, 16), (100, 16), priorities=(0, 0, 1))
    alone = Jobs((300, 16), (300, 16), (100, 16))
    of = rules(pace, num_stages)
    first = last_ticks(made.run(of))[2]
    least = last_ticks(alone.run(of, {2: 0}))[0]
    assert first <= least + 2
    assert last_ticks(alone.run(of))[2] > 1.5 * least or num_stages > 1


@pytest.mark.parametrize("seed", range(4))
def test_priorities_and_paces_keep_all_rules(seed):
    """Jobs join and end; `next_stretch` checks each tick, and all batches run."""
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 150), rng.randint(1, 12)) for _ in range(6)]
    made = Jobs(*sizes, priorities=[rng.randint(-2, 2) for _ in sizes])
    of = rules(rng.choice(PACES), rng.choice((1, 4)), rng.choice((1, 2)))
    ticks = made.run(of, {job: rng.randint(0, 60) for job in range(6)})
    all_tokens = {job: sum(map(sum, made.tokens[job])) for job in range(6)}
    assert tokens_by_job(ticks) == all_tokens
