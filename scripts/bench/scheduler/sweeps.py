"""Plans sweeps of 120 LoRA configurations on 8 GPUs, and of 5,000 on 512.

The first table has the six models of PLoRA's Figure 4 on eight A100 with 40 GB: the
speed of this project's planner, of PLoRA's own, and of packs in a row, over one
configuration at a time on the fewest GPUs. The mix of batch sizes and the number of
samples that fill a GPU decide these figures, so each line names both. All times but
those of planning are simulated, so that any CPU will do.

Prints tables. With --output-dir, writes sweeps.jsonl and sweeps.md.

    python -m scripts.bench sweeps --quick
    python -m scripts.bench sweeps --output-dir bench
"""

import argparse
import dataclasses
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

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
    sequential_packs,
)
from scripts.bench.report import (
    Row,
    Rows,
    about,
    add_output_dir,
    titled_tables,
    versions,
)

TOKENS, RANKS = 1024, (8, 16, 32, 64, 128)
GPU_BYTES, LOAD_FACTOR = 40e9, 0.95  # of which the 7B model holds 10 adapters
FLOPS = 0.5 * 312e12  # half of an A100's rate
DOUBLING = 0.9  # share of their speed that GPUs keep if a group is doubled
# From the 20.4 GB of two adapters of rank 64 against 18.2 GB of one, for each token,
# layer and feature, beside the adapter's own memory by appendix A.1.
ACTIVATION_BYTES = 8.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a base model, and PLoRA's speed over the fewest GPUs by Figure 4."""

    parameters: float
    num_layers: int
    hidden: int
    kv: int
    mlp: int
    paper: float


MODELS = {
    "Qwen2.5-3B": Model(
        parameters=3.09e9, num_layers=36, hidden=2048, kv=256, mlp=11008, paper=7.08
    ),
    "Qwen2.5-7B": Model(
        parameters=7.62e9, num_layers=28, hidden=3584, kv=512, mlp=18944, paper=6.52
    ),
    "Qwen2.5-14B": Model(
        parameters=14.8e9, num_layers=48, hidden=5120, kv=1024, mlp=13824, paper=6.51
    ),
    "Qwen2.5-32B": Model(
        parameters=32.8e9, num_layers=64, hidden=5120, kv=1024, mlp=27648, paper=6.33
    ),
    "Llama-3.2-3B": Model(
        parameters=3.21e9, num_layers=28, hidden=3072, kv=1024, mlp=8192, paper=7.52
    ),
    "Llama-3.1-8B": Model(
        parameters=8.03e9, num_layers=32, hidden=4096, kv=1024, mlp=14336, paper=6.78
    ),
}
# Batch sizes of the configurations, and samples of 1,024 tokens that fill a GPU.
MIXES = (
    ((1,), 16),
    ((1, 2), 16),
    ((1, 2, 4), 16),
    ((1, 2, 4, 8, 16, 32), 8),
)


def costs(model: Model, full: int) -> AnalyticCosts:
    """Makes the costs of a model on A100 GPUs.

    A round takes nine tenths of the time that `full` samples on each GPU take, and a
    tenth in proportion to its samples, until they fill the GPUs; then all of it is in
    proportion. With eight samples, this is the paper's 10 % from batch 1 to batch 8.
    """
    sizes = model.hidden, model.kv, model.mlp
    h, kv, mlp = sizes
    matrices = [(h, h), (h, kv), (h, kv), (h, h), (h, mlp), (h, mlp), (mlp, h)]
    memory = {"matrices": matrices, "num_layers": model.num_layers}
    features = model.num_layers * h
    by_degree = {}
    for degree in (1, 2, 4, 8):
        speed = degree * DOUBLING ** math.log2(degree)
        per_token = 4 * model.parameters / FLOPS / speed
        flat = 0.9 * full * TOKENS * degree * per_token
        by_degree[degree] = GroupCosts(
            step=(
                StepLine(fixed=flat, per_token=0.1 * per_token),
                StepLine(fixed=0.0, per_token=per_token),
            ),
            free_bytes=LOAD_FACTOR * GPU_BYTES * degree - 2 * model.parameters,
            bytes_per_rank=plora.adapter_bytes(1, 4 * TOKENS, **memory),
            bytes_per_token=ACTIVATION_BYTES * features,
            most_tokens=4 * TOKENS,  # beyond it, gradients accumulate
        )
    return AnalyticCosts(by_degree=by_degree, pads_ranks=False)


def paper_sweep(batches: Sequence[int], count: int = 120) -> Sweep:
    """Draws configurations from a grid, all on 8,000 samples, on eight GPUs."""
    copies = -(-count // (len(RANKS) * len(batches))) + 1
    grid = list(itertools.product(RANKS, batches, range(copies)))
    chosen = np.random.default_rng(0).choice(len(grid), count, replace=False)
    configurations = tuple(
        Configuration(
            name=f"rank{rank}-batch{batch}-{copy}",
            rank=rank,
            batch_size=batch,
            num_steps=8000 // batch,
            sample_tokens=TOKENS,
        )
        for rank, batch, copy in (grid[i] for i in sorted(chosen))
    )
    return Sweep(configurations=configurations, num_gpus=8)


def _timed(make: Callable) -> tuple[Any, float]:
    began = time.process_time()
    return make(), round(time.process_time() - began, 1)


def model_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the speeds of planners over one at a time on the fewest GPUs."""
    models = dict(itertools.islice(MODELS.items(), 1 if quick else None))
    for (batches, full), (name, model) in itertools.product(MIXES, models.items()):
        sweep, cost = paper_sweep(batches, 24 if quick else 120), costs(model, full)
        planned, seconds = _timed(lambda s=sweep, c=cost: plan_sweep(s, c))
        by_name, plora_seconds = _timed(lambda s=sweep, c=cost: plora.plan_jobs(s, c))
        degree, makespan = fewest_gpus(sweep, cost), planned.plan.makespan
        alone = one_at_a_time(sweep, cost, degree).makespan
        packs = sequential_packs(sweep, cost, degree).makespan
        yield {
            "table": "models",
            "batches": ", ".join(map(str, batches)),
            "full_at": full,
            "model": name,
            "fewest_gpus": degree,
            "hours": round(makespan / 3600, 2),
            "over_bound": round(planned.gap, 3),
            "planner": round(alone / makespan, 2),
            "plora": round(alone / by_name.plan.makespan, 2),
            "packs": round(alone / packs, 2),
            "all_gpus": round(alone / one_at_a_time(sweep, cost, 8).makespan, 2),
            "paper": model.paper,
            "plora_ar": round(by_name.approximation_ratio, 3),
            "plora_ar_25": round(by_name.printed_ratio, 3),
            "plora_ilps": by_name.num_ilps,
            "planning_s": seconds,
            "plora_s": plora_seconds,
        }


def rank_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields what slots by groups of ranks gain over equal slots for all.

    Slots have padded ranks and float32 state, as in this project's trainer.
    """
    for name in ("Qwen2.5-7B",) if quick else ("Qwen2.5-7B", "Qwen2.5-14B"):
        model = MODELS[name]
        sweep, base = paper_sweep((1, 2), 24 if quick else 120), costs(model, 16)
        groups = {
            degree: dataclasses.replace(
                group,
                free_bytes=group.free_bytes
                - degree * group.bytes_per_token * 16 * TOKENS / 4,
                bytes_per_rank=18 / 8 * group.bytes_per_rank,
                bytes_per_token=0.0,
            )
            for degree, group in base.by_degree.items()
        }
        padded = AnalyticCosts(by_degree=groups, pads_ranks=True)
        widest = tuple(
            dataclasses.replace(c, rank=max(RANKS)) for c in sweep.configurations
        )
        planned, seconds = _timed(lambda s=sweep, c=padded: plan_sweep(s, c))
        equal = plan_sweep(dataclasses.replace(sweep, configurations=widest), padded)
        ranks = sorted({group.slot_rank for group in planned.plan.groups})
        yield {
            "table": "ranks",
            "model": name,
            "slot_ranks": ", ".join(map(str, ranks)),
            "faster_than_equal_slots": round(
                equal.plan.makespan / planned.plan.makespan, 2
            ),
            "over_bound": round(planned.gap, 3),
            "planning_s": seconds,
        }


# Seconds of a round, and GB of the base, on GPUs of 40 GB.
RANDOM_MODELS = ((0.25, 15.2), (0.45, 29.6), (0.9, 65.0), (0.12, 6.5))


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
        alone = one_at_a_time(sweep, cost, fewest_gpus(sweep, cost))
        yield {
            "table": "bound",
            "configurations": count,
            "gpus": num_gpus,
            "seed": seed,
            "over_bound": round(planned.gap, 4),
            "over_bound_of_any_plan": round(
                planned.plan.makespan / planned.bound.any_plan, 3
            ),
            "over_fewest_gpus": round(alone.makespan / planned.plan.makespan, 2),
            "planning_s": seconds,
        }


_SHOWN = ("models", "ranks", "bound")


def tables(rows: Sequence[Row]) -> str:
    """Formats all rows."""
    return titled_tables(rows, _SHOWN)


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
    for row in itertools.chain(
        model_rows(args.quick), rank_rows(args.quick), bound_rows(args.quick)
    ):
        rows.add(row | end)
    print(rows.tables())
