"""Plans random sweeps of 120 LoRA configurations on 8 GPUs, and of 5,000 on 512.

The planner's makespan is compared with its bound, with one configuration at a time on
the fewest GPUs, and on 8 GPUs with PLoRA's planner. All times but those of planning are
simulated, so that any CPU will do.

Prints a table. With --output-dir, writes sweeps.jsonl and sweeps.md.

    jaxlora bench sweeps --quick
    jaxlora bench sweeps --output-dir bench
"""

import argparse
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlora.bench.options import add_output_dir
from jaxlora.bench.report import Row, Rows, about, table, versions
from jaxlora.scheduler.sweep import (
    AnalyticCosts,
    Configuration,
    GroupCosts,
    StepLine,
    Sweep,
    fewest_gpus,
    one_at_a_time,
    plan_sweep,
    plora,
)

TOKENS, RANKS = 1024, (8, 16, 32, 64, 128)
# Seconds of a round, and GB of the base, on GPUs of 40 GB.
RANDOM_MODELS = ((0.25, 15.2), (0.45, 29.6), (0.9, 65.0), (0.12, 6.5))


def _timed(make: Callable) -> tuple[Any, float]:
    began = time.process_time()
    return make(), round(time.process_time() - began, 1)


def random_case(seed: int, count: int, num_gpus: int) -> tuple[Sweep, AnalyticCosts]:
    """Draws kinds of configurations of several data sets; batch 1 to 8 costs 10 %."""
    rng = np.random.default_rng([5, seed])
    samples = rng.choice([3668, 7473, 8551, 635], 2 if count < 1000 else 4, False)
    kinds = list(itertools.product(samples, RANKS, (1, 2, 4, 8)))
    chosen = rng.permutation(len(kinds))[: max(20, len(kinds) * 2 // 3)]
    kinds = [kinds[i] for i in chosen]
    numbers = rng.multinomial(count, np.ones(len(kinds)) / len(kinds))
    configurations = tuple(
        Configuration(
            name=f"{i}-{j}",
            rank=rank,
            batch_size=batch,
            num_steps=int(total) // batch,
            sample_tokens=TOKENS,
        )
        for i, ((total, rank, batch), n) in enumerate(zip(kinds, numbers, strict=True))
        for j in range(n)
    )
    seconds, base = RANDOM_MODELS[seed % len(RANDOM_MODELS)]
    line = StepLine(
        fixed=seconds, per_token=seconds * 0.1 / 7 / TOKENS, per_rank=2e-4 * seconds
    )
    by_degree = {
        degree: GroupCosts(
            step=(line.slowed(1 / speed),),
            free_bytes=(0.95 * 40 * degree - base) * 1e9,
            bytes_per_rank=0.243e9 / 64 * 2,
            bytes_per_token=1.7e9 / TOKENS,
        )
        for degree, speed in ((1, 1.0), (2, 1.6), (4, 2.5), (8, 3.6))
    }
    sweep = Sweep(configurations=configurations, num_gpus=num_gpus)
    return sweep, AnalyticCosts(by_degree=by_degree, pads_ranks=False)


def bound_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields plans of random sweeps over their bound."""
    cases = [(seed, 120, 8) for seed in range(20)]
    cases += [(seed, 5000, 512) for seed in range(4)]
    for seed, count, num_gpus in [(0, 24, 8)] if quick else cases:
        sweep, cost = random_case(seed, count, num_gpus)
        planned, seconds = _timed(lambda s=sweep, c=cost: plan_sweep(s, c))
        alone = one_at_a_time(sweep, cost, fewest_gpus(sweep, cost)).makespan
        row = {
            "configurations": count,
            "gpus": num_gpus,
            "seed": seed,
            "over_bound": round(planned.gap, 4),
            "over_bound_of_any_plan": round(
                planned.plan.makespan / planned.bound.any_plan, 3
            ),
            "over_fewest_gpus": round(alone / planned.plan.makespan, 2),
            "planning_s": seconds,
        }
        if num_gpus <= 8:  # as Algorithm 1 solves thousands of programs for more
            other, seconds = _timed(lambda s=sweep, c=cost: plora.plan_jobs(s, c))
            row |= {
                "plora_over_fewest_gpus": round(alone / other.plan.makespan, 2),
                "plora_planning_s": seconds,
            }
        yield row


_HIDDEN = ("commit", "device", "versions", "date")


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows."""
    return table(rows, [key for key in (rows or [{}])[0] if key not in _HIDDEN])


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--quick", action="store_true", help="few and small cases")


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    end = about(f"{platform.machine()}, {os.cpu_count()} CPU cores") | {
        "versions": versions(("numpy", "scipy", "pulp", "highspy"))
    }
    rows = Rows(args.output_dir, "sweeps", tables)
    for row in bound_rows(args.quick):
        rows.add(row | end)
    print(rows.tables())
