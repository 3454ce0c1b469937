"""Random jobs, pipelines and costs for property tests."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    Simulation,
)
from jaxlora.scheduler.lanes import ticks_of

LIMITS = Limits(capacity=512, block_tokens=32)


def seeds(count: int, now: int = 2) -> list:
    """Returns seeds of random cases; those from `now` on run before a release."""
    later = range(now, count)
    return [*range(now), *(pytest.param(i, marks=pytest.mark.grid) for i in later)]


def sample(job, batch, index, tokens) -> Sample:
    """Makes a sample from positional arguments."""
    return Sample(owner=job, batch=batch, index=index, num_tokens=tokens)


def window_sum(schedule: Schedule, cost: CostModel) -> float:
    """Sums, over all cycles, the time of the slowest microbatch in the pipeline.

    In cycle t, stage s runs the forward and backward pass of microbatch t - s.
    """
    times = np.add(*cost.schedule_times(schedule))
    num_stages, num = times.shape
    cycles = np.zeros((num_stages, num + num_stages - 1))
    for s in range(num_stages):
        cycles[s, s : s + num] = times[s]
    return float(cycles.max(axis=0).sum())


@st.composite
def mixes(draw, max_jobs=6, max_samples=8):
    """Jobs with different numbers of global batches, of different sizes."""
    lengths = st.lists(st.integers(1, 512), min_size=1, max_size=max_samples)
    batches = st.lists(lengths, min_size=1, max_size=4)
    return [
        sample(3 * job, 2 + number, i, tokens)
        for job, of_job in enumerate(draw(st.lists(batches, max_size=max_jobs)))
        for number, of_batch in enumerate(of_job)
        for i, tokens in enumerate(of_batch)
    ]


@st.composite
def job_mixes(draw, max_jobs=5, max_batches=5, max_batch=8):
    """Jobs with different numbers of batches of different sizes and sample lengths."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(["uniform", "lognormal", "heavy"]))
    out = []
    for job in range(draw(st.integers(1, max_jobs))):
        for batch in range(draw(st.integers(1, max_batches))):
            size = draw(st.integers(1, max_batch))
            out += [
                Sample(owner=job, batch=batch, index=i, num_tokens=n)
                for i, n in enumerate(_lengths(shape, size, rng))
            ]
    return out


def _lengths(shape: str, size: int, rng: np.random.Generator) -> list[int]:
    drawn = {
        "uniform": lambda: rng.uniform(1, LIMITS.capacity, size),
        "lognormal": lambda: rng.lognormal(4.5, 0.6, size),
        "heavy": lambda: 20 * (1 + rng.pareto(1.2, size)),
    }[shape]()
    return [int(n) for n in np.clip(drawn, 1, LIMITS.capacity)]


def pipelines():
    """Pipelines of 1 to 16 stages, with the distance of 1F1B or a longer one."""
    return st.builds(
        lambda s, is_long: Pipeline(num_stages=s, distance=2 * s - 1 if is_long else s),
        st.integers(1, 16),
        st.booleans(),
    )


@st.composite
def costs(draw, num_stages):
    """Affine costs; the last stage may be slower."""
    affine = st.builds(
        AffineCost,
        base=st.sampled_from([0.0, 30.0, 300.0]),
        per_token=st.sampled_from([0.5, 1.0, 2.0]),
        per_square=st.sampled_from([0.0, 1e-3]),
    )
    return CostModel.uniform(
        num_stages,
        forward=draw(affine),
        backward=draw(affine),
        last_stage=draw(st.sampled_from([1.0, 1.3])),
        communication=draw(st.sampled_from([0.0, 17.0])),
    )


def num_stale_batches(
    schedule: Schedule, pipeline: Pipeline, ran: Simulation, num_lanes: int = 1
) -> int:
    """Counts batches that start on a stage before it has taken their job's last step.

    They would be trained with stale weights.
    """
    ticks = ticks_of(schedule.microbatches, num_lanes)
    start, end = ran.forward_start, ran.backward_end
    positions: dict[tuple[int, int], list[int]] = {}
    for i, tick in enumerate(ticks):
        for key in {(s.owner, s.batch) for microbatch in tick for s in microbatch}:
            positions.setdefault(key, []).append(i)
    delays = np.array([pipeline.step_delay(s) for s in range(pipeline.num_stages)])
    num_stale = 0
    for previous, following in itertools.pairwise(sorted(positions)):
        if previous[0] == following[0]:
            step_after = np.minimum(positions[previous][-1] + delays, len(ticks) - 1)
            stepped = end[np.arange(len(end)), step_after]
            started = start[:, positions[following]].min(axis=1)
            # Both are sums of the same times, but in different orders.
            num_stale += bool((started < stepped - 1e-9 * abs(stepped)).any())
    return num_stale
