"""Tests the planner of sweeps, its bounds, and the plans it is compared with."""

import dataclasses
import math

import numpy as np
import pytest

from jaxlora.scheduler.sweep import (
    AnalyticCosts,
    Configuration,
    GroupCosts,
    StepLine,
    Sweep,
    fewest_gpus,
    one_at_a_time,
    plan_sweep,
    sequential_packs,
)
from jaxlora.scheduler.sweep.report import (
    comparison_table,
    draw_sweep,
    group_table,
)
from jaxlora.scheduler.sweep.rounds import Kinds, play
from jaxlora.scheduler.tables import format_seconds
from scripts.bench.scheduler import sweeps
from tests.scheduler.strategies import seeds
from tests.scheduler.sweep.checker import (
    faults,
    optimum,
    played,
    random_costs,
    random_sweep,
)


def configuration(name="a", rank=8, batch_size=1, num_steps=10) -> Configuration:
    return Configuration(
        name=name,
        rank=rank,
        batch_size=batch_size,
        num_steps=num_steps,
        sample_tokens=512,
    )


def sweep_of(*configurations, num_gpus=8) -> Sweep:
    return Sweep(configurations=configurations, num_gpus=num_gpus)


def cases():
    for seed in range(12):
        rng = np.random.default_rng([1, seed])
        count, gpus = int(rng.integers(1, 18)), int(rng.integers(4, 20))
        yield random_sweep(rng, count, gpus), random_costs(rng, pads_ranks=seed % 2 > 0)


@pytest.mark.parametrize("seed", seeds(12, now=6))
def test_plans_keep_every_rule_and_no_plan_beats_its_bound(seed):
    sweep, costs = list(cases())[seed]
    planned = plan_sweep(sweep, costs)
    bound, fewest = planned.bound, fewest_gpus(sweep, costs)
    plans = [planned.plan, sequential_packs(sweep, costs, fewest)]
    plans += [one_at_a_time(sweep, costs, degree) for degree in (fewest, 4)]
    for plan in plans:
        assert not faults(plan, costs)
        assert plan.makespan >= bound.any_plan * (1 - 1e-6)
    for plan in (plans[0], *plans[2:]):  # packs change their groups
        assert plan.makespan >= bound.fixed_groups * (1 - 1e-6)
    assert bound.any_plan <= bound.fixed_groups
    assert planned.plan.makespan <= 1.001 * min(plan.makespan for plan in plans)


@pytest.mark.parametrize("seed", seeds(12, now=6))
def test_no_bound_exceeds_an_enumerated_optimum(seed):
    rng = np.random.default_rng([2, seed])
    sweep = random_sweep(
        rng, int(rng.integers(2, 5)), int(rng.integers(2, 5)), range(1, 12)
    )
    costs = random_costs(rng, pads_ranks=seed % 2 > 0)
    best, planned = optimum(sweep, costs), plan_sweep(sweep, costs)
    assert planned.bound.any_plan <= planned.bound.fixed_groups <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= planned.plan.makespan <= 1.15 * best


def test_bounds_are_exact_where_all_slots_are_full():
    sweep = sweep_of(*(configuration(f"c{i}") for i in range(16)), num_gpus=1)
    planned = plan_sweep(sweep, padded())  # eight at a time
    assert planned.plan.makespan == 20.0
    assert planned.bound.fixed_groups == pytest.approx(20.0, rel=2e-3)
    assert planned.bound.any_plan == pytest.approx(20.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_group_is_played_as_round_by_round(seed):
    rng = np.random.default_rng([3, seed])
    sweep = random_sweep(rng, 12, 8, range(1, 30))
    costs = random_costs(rng, pads_ranks=seed % 2 > 0)
    kinds = Kinds(sweep, costs)
    queue = [k for k, n in enumerate(kinds.count) for _ in range(n)]
    seconds, _ = play(kinds.shape(8, 64), kinds.steps, queue)
    order = [kinds.first[k] for k in queue]
    assert math.isclose(seconds, played(order, costs, 8, 64), rel_tol=1e-9)


def paper_like(seed: int, count: int, num_gpus: int) -> tuple[Sweep, AnalyticCosts]:
    """Ranks 8 to 128, batches of 1 to 8, equal samples; batch 1 to 8 costs 10 %."""
    rng = np.random.default_rng([5, seed])
    samples = rng.choice([3668, 7473, 8551, 635], 2 if count < 1000 else 4, False)
    kinds = [
        (r, b, int(n) // b)
        for n in samples
        for r in (8, 16, 32, 64, 128)
        for b in (1, 2, 4, 8)
    ]
    kinds = [
        kinds[i] for i in rng.permutation(len(kinds))[: max(20, len(kinds) * 2 // 3)]
    ]
    counts = rng.multinomial(count, np.ones(len(kinds)) / len(kinds))
    configurations = tuple(
        configuration(f"{i}-{j}", rank, batch, steps)
        for i, ((rank, batch, steps), n) in enumerate(zip(kinds, counts, strict=True))
        for j in range(n)
    )
    base, gpu = ((15.2, 40.0), (29.6, 40.0), (65.0, 40.0), (6.5, 40.0))[seed % 4]
    by_degree = {
        degree: GroupCosts(
            step=(
                StepLine(fixed=1 / s, per_token=0.1 / 7 / 512 / s, per_rank=2e-4 / s),
            ),
            free_bytes=0.95 * gpu * degree - base,
            bytes_per_rank=0.243 / 64 * 2,
            bytes_per_token=1.7 / 512,
        )
        for degree, s in ((1, 1.0), (2, 1.6), (4, 2.5), (8, 3.6))
    }
    costs = AnalyticCosts(by_degree=by_degree, pads_ranks=False)
    return sweep_of(*configurations, num_gpus=num_gpus), costs


def test_120_configurations_on_8_gpus_are_near_the_bound():
    sweep, costs = paper_like(14, 120, 8)
    planned = plan_sweep(sweep, costs)
    assert not faults(planned.plan, costs) and planned.gap <= 1.03


@pytest.mark.parametrize(
    "batches, count, found",
    [
        # The shortest of minutes of annealing over all layouts.
        ((1, 2, 4), 120, 27566),
        ((1, 2, 4, 8), 24, None),
    ],
)
def test_a_long_search_finds_little_more(batches, count, found):
    """Groups of different sizes, and queues in no order by length, are what is best."""
    sweep = sweeps.paper_sweep(batches, count)
    planned = plan_sweep(sweep, sweeps.costs(sweeps.MODELS["Qwen2.5-7B"], 16))
    assert planned.plan.makespan <= 1.03 * (found or planned.bound.fixed_groups)


def test_neither_a_second_call_nor_the_order_changes_a_plan():
    sweep, costs = paper_like(2, 24, 8)
    planned = plan_sweep(sweep, costs)
    assert plan_sweep(sweep, costs) == planned
    turned = dataclasses.replace(sweep, configurations=sweep.configurations[::-1])
    again = plan_sweep(turned, costs)
    assert again.bound == planned.bound
    assert again.plan.makespan == planned.plan.makespan


@pytest.mark.grid
@pytest.mark.parametrize(
    "seed, count, gpus, gap",
    [*((seed, 120, 8, 1.03) for seed in range(20)), (0, 5000, 512, 1.08)],
)
def test_larger_sweeps_are_near_the_bound(seed, count, gpus, gap):
    sweep, costs = paper_like(seed, count, gpus)
    planned = plan_sweep(sweep, costs)
    assert not faults(planned.plan, costs) and planned.gap <= gap


def padded(free_bytes: float = 64.0) -> AnalyticCosts:
    """One GPU has 8 slots of rank 8 or one slot of rank 64."""
    group = GroupCosts(
        step=(StepLine(fixed=1.0, per_token=0.0),),
        free_bytes=free_bytes,
        bytes_per_rank=1.0,
    )
    return AnalyticCosts(by_degree={1: group}, pads_ranks=True)


def test_similar_ranks_share_a_group():
    small = [configuration(f"small{i}", rank=8) for i in range(16)]
    large = [configuration(f"large{i}", rank=64) for i in range(2)]
    sweep = sweep_of(*small, *large, num_gpus=2)
    planned = plan_sweep(sweep, padded())
    assert not faults(planned.plan, padded())
    # One set of slots for all would have slots of rank 64, one on each GPU.
    assert planned.plan.makespan == 20.0
    shapes = {(g.slot_rank, g.num_slots) for g in planned.plan.groups}
    assert shapes == {(8, 8), (64, 1)}
    assert [g.round_tokens for g in planned.plan.groups] == [512, 8 * 512]


def test_hours_and_price():
    plan = plan_sweep(
        sweep_of(configuration(num_steps=1800), num_gpus=4), padded()
    ).plan
    assert plan.makespan == 1800 and plan.gpu_hours == 0.5
    assert plan.price(2.0) == 4.0  # all four GPUs, for half an hour


def test_one_at_a_time():
    costs = padded()
    sweep = sweep_of(*(configuration(f"c{i}") for i in range(5)), num_gpus=2)
    assert one_at_a_time(sweep, costs, 1).makespan == 30.0
    assert sequential_packs(sweep, costs, 1).makespan == 10.0
    packs = sequential_packs(sweep, padded(free_bytes=16.0), 1)
    assert [len(g.runs) for g in packs.groups] == [2, 2, 1] and packs.makespan == 20.0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sweep_of(), "at least one configuration"),
        (lambda: sweep_of(configuration(), configuration()), r"twice: \['a'\]"),
        (lambda: sweep_of(configuration(), num_gpus=0), "num_gpus=0"),
        (lambda: configuration(rank=0), "'a': rank=0"),
        (lambda: StepLine(fixed=-1.0, per_token=0.0), "negative time"),
        (
            lambda: plan_sweep(sweep_of(configuration("big", rank=65)), padded()),
            "'big' fits into no group of up to 8 GPUs",
        ),
        (
            lambda: one_at_a_time(sweep_of(configuration()), padded(), 2),
            "no groups of 2 GPUs",
        ),
        (
            lambda: dataclasses.replace(
                padded(),
                by_degree={
                    1: dataclasses.replace(padded().by_degree[1], bytes_per_token=1.0)
                },
            ),
            "bytes_per_token must be 0",
        ),
    ],
)
def test_refuses_what_cannot_be_planned(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_checker_sees_faults():
    sweep, costs = paper_like(3, 20, 8)
    plan = plan_sweep(sweep, costs).plan
    first, *rest = plan.groups
    run = first.runs[0]
    late = dataclasses.replace(run, end=run.end * 1.01)
    for wrong in (
        (first, first, *rest),
        rest,
        (dataclasses.replace(first, gpus=(9,)), *rest),
        (dataclasses.replace(first, gpus=first.gpus[:1]), *rest),
        (dataclasses.replace(first, runs=(late, *first.runs[1:])), *rest),
    ):
        assert faults(dataclasses.replace(plan, groups=tuple(wrong)), costs)


def test_tables_and_picture(tmp_path):
    sweep, costs = sweep_of(*map(configuration, "abc"), num_gpus=1), padded()
    planned = plan_sweep(sweep, costs)
    alone = {"one at a time": one_at_a_time(sweep, costs, 1)}
    lines = comparison_table(planned, alone, per_gpu_hour=36.0).splitlines()
    words = [line.split() for line in lines]
    assert " ".join(words[0]) == "makespan over the plan GPU-hours groups price"
    assert " ".join(words[1]) == "this plan 10 s 1.00 0.00 1 0.10"
    assert " ".join(words[2]) == "one at a time 30 s 3.00 0.01 3 0.30"
    assert words[3][-3:] == ["10", "s", "1.00"]
    table = group_table(planned.plan).splitlines()
    assert " ".join(table[1].split()) == "1 1 3 8 8 1536 3 10 s"
    draw_sweep({"plan": planned.plan, **alone}, tmp_path / "plan.svg")
    assert "one at a time" in (tmp_path / "plan.svg").read_text()
    assert [format_seconds(s) for s in (90, 180, 7200, 5e5)] == [
        "90 s",
        "3 min",
        "2 h",
        "5.79 d",
    ]
