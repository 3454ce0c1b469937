"""Replicas with microbatches of other sizes get samples that fit, and equal work."""

import dataclasses

import numpy as np
import pytest

from jaxlora.scheduler import AffineCost, CostModel, Lanes, Limits, Pipeline
from jaxlora.scheduler.lanes import Replica
from jaxlora.scheduler.stream.state import Position, Rules, StreamState
from jaxlora.scheduler.stream.stream import next_stretch
from tests.scheduler.strategies import seeds

BLOCK, WEIGHTS = 16, 20  # tokens of a block, and of equal cost as reading the weights
CAPACITIES = [(512, 128), (512, 320, 128, 128), (256, 256), (1024, 48, 48)]


def rules(capacities, distance=2) -> Rules:
    half = AffineCost(base=0.0, per_token=0.5, per_square=0.0)
    return Rules(
        limits=Limits(capacity=capacities[0], block_tokens=BLOCK),
        lanes=Lanes(
            pipeline=Pipeline(distance=distance, in_flight=2),
            replicas=tuple(Replica(capacity=n, work=n + WEIGHTS) for n in capacities),
        ),
        cost=CostModel.uniform(1, forward=half, backward=half, buckets=capacities[:1]),
    )


class Mix:
    """Random jobs: their numbers of batches, batch sizes and lengths."""

    def __init__(self, seed: int, longest: int, num_jobs: int, batch_size: int):
        rng = np.random.default_rng(seed)
        self.sizes = rng.integers(1, 2 * batch_size, num_jobs)
        self.steps = rng.integers(1, 30, num_jobs)
        self._seed, self._longest = seed, longest

    def lengths(self, job: int, batch: int) -> list[int]:
        rng = np.random.default_rng((self._seed, job, batch))
        drawn = np.exp(rng.normal(3.5, 1.0, self.sizes[job]))
        return np.clip(drawn, 1, self._longest).astype(int).tolist()

    def state(self) -> StreamState:
        state = StreamState()
        for job, steps in enumerate(self.steps):
            position = Position(
                job=job,
                owner=job,
                batch=0,
                num_batches=int(steps),
                batch_tokens=40.0 * self.sizes[job],
            )
            state = state.with_job(position)
        return state

    def stream(self, rules: Rules) -> list:
        ticks, state = [], self.state()
        while (stretch := next_stretch(state, self.lengths, rules)).ticks:
            ticks += stretch.ticks
            state = stretch.after
        return ticks


def padded(microbatch) -> int:
    tokens: dict[int, int] = {}
    for s in microbatch:
        tokens[s.owner] = tokens.get(s.owner, 0) + s.num_tokens
    return sum(-(-n // BLOCK) * BLOCK for n in tokens.values())


@pytest.mark.parametrize("capacities", CAPACITIES)
@pytest.mark.parametrize("seed", seeds(4))
def test_every_sample_runs_once_where_it_fits(capacities, seed):
    mix, own = Mix(seed, capacities[0], 1 + 3 * seed, 12), rules(capacities)
    ticks = mix.stream(own)
    ran, last = set(), {}
    for number, tick in enumerate(ticks):
        for lane, microbatch in zip(own.lanes.unlike, tick, strict=True):
            assert padded(microbatch) <= lane.capacity
            for s in microbatch:
                key = s.owner, s.batch, s.index
                assert key not in ran
                assert s.num_tokens == mix.lengths(s.owner, s.batch)[s.index]
                ran.add(key)
                last[s.owner, s.batch] = number
                if s.batch:  # the batch before was complete two ticks ago
                    assert number >= last[s.owner, s.batch - 1] + 2
    assert len(ran) == sum(
        len(mix.lengths(job, batch))
        for job, steps in enumerate(mix.steps)
        for batch in range(steps)
    )


@pytest.mark.parametrize(
    ("capacities", "work"),
    [((512, 128), (532, 148)), ((512, 200, 128), (512, 192, 128))],
)
def test_a_replica_runs_as_many_microbatches_as_it_has_time_for(capacities, work):
    pairs = zip(capacities, work, strict=True)
    lanes = Lanes(replicas=tuple(Replica(capacity=c, work=w) for c, w in pairs))
    counts = np.zeros(len(capacities), int)
    for tick in range(200):
        for lane in lanes.open_lanes(tick):
            assert lane == lanes.unlike[lane.number]
            counts[lane.replica] += 1
        assert (abs(counts * np.array(work) - (tick + 1) * work[0]) <= work[0]).all()


@pytest.mark.parametrize("capacities", CAPACITIES)
def test_replicas_end_together(capacities):
    """Full microbatches, and within a few ticks of the least time that there can be."""
    own = rules(capacities)
    mix = Mix(7, capacities[0] // 2, 12, 24)
    ticks = mix.stream(own)
    busy = np.zeros(len(capacities))
    for tick in ticks:
        for lane, microbatch in zip(own.lanes.unlike, tick, strict=True):
            replica = own.lanes.replicas[lane.replica]
            busy[lane.replica] += replica.work if microbatch else 0
    lengths = np.array([s.num_tokens for tick in ticks for m in tick for s in m])
    # The first replicas have to run all samples that are too long for the others.
    least = []
    for number in range(len(capacities)):
        fits_elsewhere = max(capacities[number + 1 :], default=0)
        speed = sum(one.capacity / one.work for one in own.lanes.replicas[: number + 1])
        least.append(lengths[lengths > fits_elsewhere].sum() / speed)
    whole = own.lanes.replicas[0].work
    assert busy.max() <= 1.1 * max(least) + 3 * whole
    if max(least) == least[-1]:
        assert busy.min() >= 0.9 * busy.max() - 2 * whole


def test_a_stretch_follows_from_the_state():
    """Also when it is planned anew in the middle of batches, as a job joins."""
    own, mix = rules((512, 128)), Mix(3, 400, 6, 10)
    first = next_stretch(mix.state(), mix.lengths, own)
    assert next_stretch(mix.state(), mix.lengths, own) == first
    late = Position(job=9, owner=9, batch=0, num_batches=3, batch_tokens=99.0)
    late = dataclasses.replace(late, ready=first.after.tick)
    state = first.after.with_job(late)

    def lengths(job, batch):
        return [30, 300, 90] if job == 9 else mix.lengths(job, batch)

    second = next_stretch(state, lengths, own)
    ran = {s.owner for tick in second.ticks for m in tick for s in m}
    assert 9 in ran


def test_replicas_are_given_from_the_largest_to_the_smallest():
    small, large = Replica(capacity=64, work=64), Replica(capacity=128, work=128)
    with pytest.raises(ValueError, match="from the largest to the smallest"):
        Lanes(replicas=(small, large))
