"""Tests PLoRA's planner against enumerated jobs, its theorem, and its paper."""

import itertools
import math

import numpy as np
import pytest

from jaxlora.scheduler.sweep import fewest_gpus, plan_sweep, plora, sequential_packs
from jaxlora.scheduler.sweep.rounds import Kinds
from tests.scheduler.sweep.checker import faults, random_costs, random_sweep
from tests.scheduler.sweep.test_sweep import configuration, padded, sweep_of


def seconds_of_job(kinds: Kinds, degree: int, counts) -> float:
    """Returns T of a job whose configurations start together, step by step."""
    shape, total = kinds.shape(degree, kinds.slot_ranks[-1]), 0.0
    for step in range(max(s for s, n in zip(kinds.steps, counts, strict=True) if n)):
        lines = list(shape.fixed)
        for k, n in enumerate(counts):
            if kinds.steps[k] > step:
                for i, seconds in enumerate(shape.seconds_of[k]):
                    lines[i] += n * seconds
        total += max(lines)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_a_job_has_the_highest_throughput(seed):
    rng = np.random.default_rng([4, seed])
    sweep = random_sweep(rng, 7, 4, (3, 5, 9))
    kinds = Kinds(sweep, random_costs(rng, pads_ranks=False))
    shape = kinds.shape(4, kinds.slot_ranks[-1])
    best = 0.0
    for counts in itertools.product(*(range(n + 1) for n in kinds.count)):
        size = sum(n * b for n, b in zip(counts, shape.bytes_of, strict=True))
        if any(counts) and size <= shape.free:
            ranks = sum(n * r for n, r in zip(counts, kinds.rank, strict=True))
            best = max(best, ranks / seconds_of_job(kinds, 4, counts))
    job, num_ilps = plora.fill_job(kinds, 4, tuple(kinds.count))
    assert job is not None and num_ilps > 0
    assert math.isclose(job.throughput, best, rel_tol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_plans_keep_every_rule(seed):
    rng = np.random.default_rng([6, seed])
    sweep = random_sweep(rng, 14, int(rng.integers(2, 5)))
    costs = random_costs(rng, pads_ranks=False)
    found, planned = plora.plan_jobs(sweep, costs), plan_sweep(sweep, costs)
    assert not faults(found.plan, costs)
    assert all(r.start == g.start for g in found.plan.groups for r in g.runs)
    assert found.plan.makespan >= planned.bound.any_plan
    packs = sequential_packs(sweep, costs, fewest_gpus(sweep, costs))
    assert planned.plan.makespan <= min(found.plan.makespan, packs.makespan)
    _check_theorem(found)


def _check_theorem(found: plora.PloraPlan) -> None:
    """Checks F / (W / G) <= AR where nothing idles before the last job starts."""
    plan = found.plan
    num_gpus, last = plan.sweep.num_gpus, max(plan.groups, key=lambda g: g.end)
    before = sum(g.degree * (min(g.end, last.start) - g.start) for g in plan.groups)
    others = [g for g in plan.groups if g is not last]
    if before >= num_gpus * last.start * (1 - 1e-9):
        work = 3600 * plan.gpu_hours
        assert plan.makespan / (work / num_gpus) <= found.approximation_ratio + 1e-9
    assert found.approximation_ratio >= 1 or not others
    # (25) with used and idle GPUs exchanged, against the formula as it is printed.
    before, length = last.start, plan.makespan - last.start
    used = last.degree / num_gpus
    if others:
        printed = 1 + length * used / (before + length * (1 - used))
        assert math.isclose(found.printed_ratio, printed)


def test_algorithm_1_solves_127_jobs_for_8_gpus():
    """Every sequence of degrees, as the algorithm is printed."""

    solved = []

    class Counted(plora.DTM):
        def _job(self, degree, left):
            solved.append(degree)
            shape = self._kinds.shapes[0]
            return plora.Job(shape=shape, counts=(1,), throughput=float(degree))

    sweep = sweep_of(*(configuration(f"c{i}") for i in range(9)))
    counted, policies = Counted(Kinds(sweep, padded())), []
    counted._helper(8, [], (9,), policies)
    assert len(solved) == 127 and len(policies) == 56


def test_memory_of_an_adapter():
    """Rank 64 on the attention of Qwen-2.5-7B; 4 times that with AdamW's state."""
    matrices = [(3584, 3584), (3584, 512), (3584, 512), (3584, 3584)]
    sizes = {"matrices": matrices, "num_layers": 28}
    values = 28 * 64 * (4 * 3584 + 2 * (3584 + 512))
    state = plora.adapter_bytes(64, 0, **sizes)
    assert state == 2 * 4 * values
    activations = plora.adapter_bytes(64, 1024, **sizes) - state
    assert activations == 2 * 28 * 4 * 1024 * 64


def test_refuses_what_the_paper_does_not_cover():
    with pytest.raises(ValueError, match="up to 8 GPUs, got 16"):
        plora.plan_jobs(sweep_of(configuration(), num_gpus=16), padded())
    with pytest.raises(ValueError, match="no padded ranks"):
        plora.plan_jobs(sweep_of(configuration()), padded())
