"""Tests timelines and their charts."""

import pytest

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    pack_ticks,
    simulate,
)
from jaxlora.scheduler.picture import draw
from jaxlora.scheduler.timeline import TimedPass, Timeline
from scripts.bench.scheduler.lengths import jobs

LIMITS = Limits(capacity=6144, block_tokens=64)
LANES = Lanes(fsdp=2, pipeline=Pipeline.one_f_one_b(4))
TOKEN = AffineCost(base=256, per_token=1, per_square=2e-5)
COST = CostModel.uniform(4, forward=TOKEN, backward=TOKEN * 2)


def work(stage, kind, tick, start, end) -> TimedPass:
    return TimedPass(stage=stage, kind=kind, tick=tick, start=start, end=end)


def simulated(samples):
    schedule = pack_ticks(samples, LIMITS, "joint", LANES, COST)
    return schedule, simulate(schedule, COST, LANES.pipeline, num_lanes=2)


def test_the_timeline_of_a_simulation():
    samples = jobs(["xsum", "cnn"], num_samples=[5, 9], batch_size=3)
    schedule, simulation = simulated(samples)
    timeline = Timeline.simulated(simulation)
    num_real = sum(
        any(schedule.microbatches[i : i + 2])
        for i in range(0, len(schedule.microbatches), 2)
    )
    assert len(timeline.passes) == 2 * 4 * num_real
    assert timeline.start == 0 and timeline.makespan == simulation.makespan
    assert timeline.bubble == pytest.approx(simulation.bubble)


def test_the_bubble_of_a_measured_timeline():
    passes = (
        work(0, "F", 0, 5.0, 6.0),
        work(1, "F", 0, 6.0, 7.0),
        work(1, "B", 0, 7.0, 9.0),
        work(0, "B", 0, 9.0, 11.0),
        work(0, "step", 0, 11.0, 12.0),
        work(1, "step", 0, 11.0, 12.0),
    )
    timeline = Timeline(passes=passes, num_stages=2)
    assert timeline.start == 5 and timeline.makespan == 7
    assert timeline.bubble == pytest.approx(1 - 8 / 14)
    empty = Timeline(passes=(), num_stages=2)
    assert empty.makespan == 0 and empty.bubble == 0


def test_impossible_passes_are_refused():
    for wrong in (work(2, "F", 0, 0.0, 1.0), work(0, "F", 0, 1.0, 0.5)):
        with pytest.raises(ValueError, match="ends before it starts, or is on none"):
            Timeline(passes=(wrong,), num_stages=2)


def test_charts(tmp_path):
    """A chart may show a measured timeline below the simulated one."""
    samples = jobs(["xsum", "cnn"], num_samples=[5, 9], batch_size=3)
    schedule, simulation = simulated(samples)
    timeline = Timeline.simulated(simulation)
    step = work(0, "step", 0, timeline.makespan, timeline.makespan + 99)
    measured = Timeline(passes=(*timeline.passes, step), num_stages=4)
    both = {"simulated": timeline, "measured": measured}
    for name, shown, options in (
        ("one.png", {"simulated": timeline}, {}),
        ("one.svg", {"simulated": timeline}, {}),
        ("part.svg", {"simulated": timeline}, {"until": 9000}),
        ("both.svg", both, {}),
    ):
        draw(schedule, shown, tmp_path / name, num_lanes=2, **options)
    assert (tmp_path / "one.png").stat().st_size > 5000
    sizes = {n: (tmp_path / f"{n}.svg").stat().st_size for n in ("one", "part", "both")}
    assert 5000 < sizes["part"] < sizes["one"] < sizes["both"]


def test_the_chart_of_an_empty_schedule(tmp_path):
    schedule, simulation = simulated([])
    nothing = {"simulated": Timeline.simulated(simulation)}
    draw(schedule, nothing, tmp_path / "nothing.png", num_lanes=2)
