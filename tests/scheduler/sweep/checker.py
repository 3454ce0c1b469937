"""Checks plans of sweeps and enumerates small ones, without code of the planner."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlora.scheduler.sweep import (
    AnalyticCosts,
    Configuration,
    Costs,
    Group,
    GroupCosts,
    StepLine,
    Sweep,
    SweepPlan,
)

CLOSE = 1e-6


def round_seconds(
    costs: Costs, running: Sequence[Configuration], degree: int, slot_rank: int
) -> float:
    """Returns the seconds of a round."""
    lines = list(costs.fixed_seconds(degree))
    for c in running:
        for i, seconds in enumerate(costs.seconds_of(c, degree, slot_rank)):
            lines[i] += seconds
    return max(lines)


def faults(plan: SweepPlan, costs: Costs) -> list[str]:
    """Returns what is wrong with a plan, in words."""
    out = []
    names = sorted(r.configuration.name for g in plan.groups for r in g.runs)
    if names != sorted(c.name for c in plan.sweep.configurations):
        out.append("not every configuration runs exactly once")
    for group in plan.groups:
        out += _faults_of_group(group, costs, plan.sweep)
    for one, two in itertools.combinations(plan.groups, 2):
        together = min(one.end, two.end) - max(one.start, two.start)
        if set(one.gpus) & set(two.gpus) and together > CLOSE * plan.makespan:
            out.append("two groups have the same GPU at the same time")
    return out


def _faults_of_group(group: Group, costs: Costs, sweep: Sweep) -> Iterator[str]:
    degree, rank = group.degree, group.slot_rank
    if degree & (degree - 1) or degree > sweep.max_degree:
        yield f"a group has {degree} GPUs"
    if len(set(group.gpus)) < degree or not set(group.gpus) <= {*range(sweep.num_gpus)}:
        yield f"a group has the GPUs {group.gpus}"
    if costs.free_bytes(degree) <= 0:
        yield f"the base does not fit into {degree} GPUs"
    if not math.isclose(group.end, max(r.end for r in group.runs)):
        yield "a group does not end with its last configuration"
    if rank < max(r.configuration.rank for r in group.runs):
        yield "a configuration has a larger rank than its slot"
    # Steps made, from the planned times alone.
    steps = dict.fromkeys(range(len(group.runs)), 0.0)
    times = sorted({group.start, *(t for r in group.runs for t in (r.start, r.end))})
    for left, right in itertools.pairwise(times):
        on = [i for i, r in enumerate(group.runs) if r.start <= left and right <= r.end]
        running = [group.runs[i].configuration for i in on]
        slots = [group.runs[i].slot for i in on]
        if not on or len(set(slots)) < len(on):
            yield "a group is idle, or two configurations share a slot"
            return
        held = sum(costs.bytes_of(c, degree, rank) for c in running)
        if held > costs.free_bytes(degree) * (1 + CLOSE):
            yield f"configurations hold {held} bytes of {costs.free_bytes(degree)}"
        for i in on:
            steps[i] += (right - left) / round_seconds(costs, running, degree, rank)
    for i, run in enumerate(group.runs):
        if not math.isclose(steps[i], run.configuration.num_steps, rel_tol=CLOSE):
            yield f"{run.configuration.name} makes {steps[i]} steps"


def played(
    queue: Sequence[Configuration], costs: Costs, degree: int, slot_rank: int
) -> float:
    """Plays a queue round by round: each round, whatever fits starts."""
    waiting, running, seconds = list(queue), [], 0.0
    while waiting or running:
        for c in list(waiting):
            held = [x for x, _ in running] + [c]
            size = sum(costs.bytes_of(x, degree, slot_rank) for x in held)
            if size <= costs.free_bytes(degree) * (1 + 1e-9):
                running.append([c, c.num_steps])
                waiting.remove(c)
        seconds += round_seconds(costs, [c for c, _ in running], degree, slot_rank)
        for one in running:
            one[1] -= 1
        running = [one for one in running if one[1]]
    return seconds


def optimum(sweep: Sweep, costs: Costs) -> float:
    """Returns the shortest makespan over all fixed groups and all queues."""
    return min(
        best
        for degrees in _partitions(sweep.num_gpus, sweep.degrees)
        if (best := _best_assignment(sweep.configurations, degrees, costs)) is not None
    )


def _partitions(gpus: int, degrees: Sequence[int]) -> Iterator[list[int]]:
    yield []
    for i, degree in enumerate(degrees):
        if degree <= gpus:
            for rest in _partitions(gpus - degree, degrees[: i + 1]):
                yield [degree, *rest]


def _best_assignment(
    configurations: Sequence[Configuration], degrees: Sequence[int], costs: Costs
) -> float | None:
    known: dict = {}

    def seconds(group: tuple[Configuration, ...], degree: int) -> float:
        if (group, degree) not in known:
            rank = max(c.rank for c in group)
            fits = costs.free_bytes(degree) > 0 and all(
                costs.bytes_of(c, degree, rank) <= costs.free_bytes(degree)
                for c in group
            )
            orders = itertools.permutations(group) if fits else ()
            known[group, degree] = min(
                (played(order, costs, degree, rank) for order in orders),
                default=math.inf,
            )
        return known[group, degree]

    best = math.inf
    for groups in itertools.product(range(len(degrees)), repeat=len(configurations)):
        parts = [
            tuple(c for c, g in zip(configurations, groups, strict=True) if g == i)
            for i in range(len(degrees))
        ]
        if degrees:
            ends = [seconds(p, d) for p, d in zip(parts, degrees, strict=True) if p]
            best = min(best, max(ends))
    return None if best == math.inf else best


def random_costs(rng: np.random.Generator, *, pads_ranks: bool) -> AnalyticCosts:
    """Makes costs of up to 8 GPUs, with one or two lines."""
    base, speed, by_degree = rng.uniform(0.2, 1.6), rng.uniform(1.2, 1.9), {}
    activations = 0.0 if pads_ranks else rng.uniform(0, 2e-4)
    second = rng.random() < 0.5
    for i, degree in enumerate((1, 2, 4, 8)):
        lines = [StepLine(fixed=1.0, per_token=2e-5, per_rank=1e-4)]
        if second:
            lines.append(StepLine(fixed=0.2, per_token=4e-4, per_rank_token=1e-6))
        by_degree[degree] = GroupCosts(
            step=tuple(line.slowed(speed**-i) for line in lines),
            free_bytes=degree - base + 0.7,
            bytes_per_rank=0.6 / 64,
            bytes_per_token=activations,
            most_tokens=2048,
        )
    return AnalyticCosts(by_degree=by_degree, pads_ranks=pads_ranks)


def random_sweep(
    rng: np.random.Generator,
    count: int,
    num_gpus: int,
    steps: Sequence[int] = (40, 80, 160, 320),
) -> Sweep:
    """Makes a sweep over ranks, batch sizes and steps."""
    configurations = tuple(
        Configuration(
            name=f"c{i}",
            rank=int(rng.choice([8, 16, 32, 64])),
            batch_size=int(rng.choice([1, 2, 4])),
            num_steps=int(rng.choice(steps)),
            sample_tokens=512,
        )
        for i in range(count)
    )
    return Sweep(configurations=configurations, num_gpus=num_gpus)
