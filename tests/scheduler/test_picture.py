"""Tests charts of schedules."""

from collections import defaultdict

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    pack_ticks,
    picture,
    simulate,
    tokens_by_job,
)
from jaxlora.scheduler.lanes import ticks_of
from scripts.bench.scheduler.lengths import jobs

LIMITS = Limits(capacity=6144, block_tokens=64)
LANES = Lanes(fsdp=2, pipeline=Pipeline.one_f_one_b(4))
TOKEN = AffineCost(base=256, per_token=1, per_square=2e-5)
COST = CostModel.uniform(4, forward=TOKEN, backward=TOKEN * 2)


def simulated(samples):
    schedule = pack_ticks(samples, LIMITS, "joint", LANES, COST)
    return schedule, simulate(schedule, COST, LANES.pipeline, num_lanes=2)


def test_the_bars_of_a_pass_are_the_jobs_of_its_tick(monkeypatch):
    samples = jobs(["xsum", "cnn"], num_samples=[5, 9], batch_size=3)
    schedule, simulation = simulated(samples)
    drawn: list = []
    monkeypatch.setattr(
        picture, "save_panels", lambda panels, *_, **__: drawn.extend(panels)
    )
    picture.draw(schedule, simulation, "none.png", num_lanes=2)
    heights = defaultdict(dict)
    for bar in drawn[0].bars:
        color, _ = bar.color
        heights[round(bar.low), bar.left, bar.right][color] = bar.high - bar.low
    ticks = ticks_of(schedule.microbatches, 2)
    assert len(heights) == 2 * 4 * sum(map(any, ticks))
    for starts, ends in (
        (simulation.forward_start, simulation.forward_end),
        (simulation.backward_start, simulation.backward_end),
    ):
        for number, tick in enumerate(ticks):
            tokens = tokens_by_job(s for m in tick for s in m)
            for stage in range(4 if tokens else 0):
                found = heights[stage, starts[stage, number], ends[stage, number]]
                total = sum(tokens.values())
                shares = {f"C{job}": 0.84 * n / total for job, n in tokens.items()}
                assert found == pytest.approx(shares)


def test_charts(tmp_path):
    samples = jobs(["xsum", "cnn"], num_samples=[5, 9], batch_size=3)
    for name, options in (
        ("one.png", {}),
        ("one.svg", {}),
        ("part.svg", {"until": 9000}),
    ):
        picture.draw(*simulated(samples), tmp_path / name, num_lanes=2, **options)
    assert (tmp_path / "one.png").stat().st_size > 5000
    sizes = [(tmp_path / f"{n}.svg").stat().st_size for n in ("part", "one")]
    assert 5000 < sizes[0] < sizes[1]
    picture.draw(*simulated([]), tmp_path / "nothing.png", num_lanes=2)
