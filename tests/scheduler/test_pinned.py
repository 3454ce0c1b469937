"""Plans of the benchmark's kinds of jobs stay as short as they were measured."""

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Schedule,
    lower_bound,
    pack_ticks,
    simulate,
)
from jaxlora.scheduler.stream.state import Rules
from scripts.bench.mesh.fixed_ticks import pack_stream
from scripts.bench.scheduler.benchmark import KINDS

BLOCK = 64


@pytest.mark.parametrize(
    ("num_lanes", "num_stages", "kind", "most"),
    [
        (1, 4, "1 job", 1.121),
        (1, 4, "4 jobs, heavy tail", 1.051),
        (1, 4, "4 jobs, batches of 1", 1.49),
        (2, 4, "1 job", 1.1),
        (2, 4, "4 jobs, heavy tail", 1.27),
        (8, 1, "4 jobs", 1.018),
    ],
)
def test_makespans_over_the_bound(num_lanes, num_stages, kind, most):
    samples, n = KINDS[kind].samples(), num_lanes
    limits = Limits(capacity=KINDS[kind].capacity, block_tokens=BLOCK)
    lanes = Lanes(data=n, pipeline=Pipeline.one_f_one_b(num_stages))
    cost = CostModel.uniform(
        num_stages,
        forward=AffineCost(base=256.0, per_token=1.0, per_square=2e-5),
        backward=AffineCost(base=256.0, per_token=1.0, per_square=5e-5),
    )
    packed = pack_ticks(samples, limits, "joint", lanes, cost)
    found = simulate(packed, cost, lanes.pipeline, num_lanes=n).makespan
    bound = lower_bound(samples, limits, lanes.pipeline, cost, num_lanes=n)
    assert found <= most * bound.makespan


def streamed(kind: str, num_lanes: int, num_stages: int, cost: CostModel) -> Schedule:
    """Returns the microbatches of a stream."""
    lanes = Lanes(data=num_lanes, pipeline=Pipeline.one_f_one_b(num_stages))
    limits = Limits(capacity=KINDS[kind].capacity, block_tokens=BLOCK)
    rules = Rules(limits=limits, lanes=lanes, cost=cost)
    return pack_stream(KINDS[kind].samples(), rules)


def shaped(kind: str, num_stages: int, padding: float) -> CostModel:
    """Returns costs of one compiled shape, whose padding takes a share of the time."""
    capacity, buckets = KINDS[kind].capacity, ()
    base, per_token = 0.5 * padding * capacity, 0.5 * (1 - padding)
    if padding == 1:  # all microbatches have the time of their shape
        base, per_token, buckets = 0.0, 0.5, (capacity,)
    one = AffineCost(base=base, per_token=per_token, per_square=0.0)
    return CostModel.uniform(num_stages, forward=one, backward=one, buckets=buckets)


@pytest.mark.parametrize(
    ("num_lanes", "num_stages", "kind", "num_ticks"),
    [
        (1, 1, "4 jobs, heavy tail", 40),
        (1, 4, "1 job", 36),
        (1, 8, "1 job ten times 3 others", 171),
        (2, 1, "16 jobs", 89),
        (2, 4, "4 jobs", 35),
        (8, 4, "16 jobs", 32),
    ],
)
def test_ticks_of_streams_are_as_few_as_they_were(
    num_lanes, num_stages, kind, num_ticks
):
    cost = shaped(kind, num_stages, 1.0)
    packed = streamed(kind, num_lanes, num_stages, cost)
    assert len(packed.microbatches) == num_ticks * num_lanes


@pytest.mark.parametrize(
    ("num_lanes", "kind", "most"),
    [(1, "1 job", 0.88), (1, "4 jobs, batches of 1", 0.69), (2, "1 job", 0.77)],
)
def test_the_share_of_padding_makes_streams_shorter(num_lanes, kind, most):
    true = shaped(kind, 4, 0.24)
    times = []
    for cost in (true, shaped(kind, 4, 1.0)):
        plan = streamed(kind, num_lanes, 4, cost)
        pipeline = Pipeline.one_f_one_b(4)
        times.append(simulate(plan, true, pipeline, num_lanes=num_lanes).makespan)
    assert times[0] <= most * times[1]
