"""Compares packers on synthetic sequence lengths.

These are LoRAFusion's algorithm with and without its parts, mLoRA's order, and the
default packer, on a 1F1B pipeline of four stages. Planning time is measured; all other
times are simulated, so that any CPU will do. The last table has the share of real
tokens in the microbatches that the trainer packs for one device, by the number of steps
that are packed together.

Prints tables. With --output-dir, writes scheduler.jsonl and scheduler.md.

    jaxlora bench scheduler --quick
    jaxlora bench scheduler --output-dir bench
"""

import argparse
import dataclasses
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlora.bench.options import add_output_dir
from jaxlora.bench.report import Row, Rows, about, pivot, sections, versions
from jaxlora.bench.scheduler import kinds
from jaxlora.bench.scheduler.lengths import (
    SHAPES,
    WORDS_AND_SIGMA,
    in_batches,
    jobs,
)
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    PackerName,
    Pipeline,
    Sample,
    Schedule,
    joint,
    lower_bound,
    simulate,
    violations,
)
from jaxlora.scheduler.algorithms import lorafusion, mlora
from jaxlora.scheduler.lanes import ONE_LANE
from jaxlora.scheduler.streams.stream import Position, Rules, whole_stream
from jaxlora.scheduler.types import batches_by_job
from jaxlora.train.plan.job_slots import fixed_shape_cost

STAGES = Pipeline.one_f_one_b(4)
BLOCK = 64  # tokens
CAPACITIES = (4096, 6144, 8192, 16384)
FOUR_JOBS = {name: (name,) * 4 for name in ("mix", *WORDS_AND_SIGMA, *SHAPES)} | {
    "het": (*WORDS_AND_SIGMA, "mix")
}
# Packers of the trainer's stream. `greedy` packs one step of every job at a time.
STREAMED: tuple[PackerName, ...] = ("greedy", "joint")
FILL_STEPS = 64  # global batches of each job


def cost(last_stage: float = 1.0) -> CostModel:
    """Makes a cost model in tokens; a pass of a token on one stage costs 1."""
    forward = AffineCost(base=256.0, per_token=1.0, per_square=2e-5)
    backward = AffineCost(base=256.0, per_token=1.0, per_square=5e-5)
    return CostModel.uniform(
        STAGES.num_stages, forward=forward, backward=backward, last_stage=last_stage
    )


COSTS = {"even": cost(), "last stage +6 %": cost(1.06)}
# Takes samples, limits and costs.
Packer = Callable[[Sequence[Sample], Limits, CostModel], Schedule]


def packers(time_limit: float, num_workers: int) -> dict[str, Packer]:
    """Returns the packers by name."""
    solver: dict[str, Any] = {"time_limit": time_limit, "num_workers": num_workers}

    def parts(**options: bool) -> Packer:
        given = solver | options
        return lambda s, limits, _: lorafusion.pack(s, limits, STAGES, **given)

    return {
        "paper": parts(),
        "no merge": parts(use_merge=False),
        "no milp": parts(use_milp=False),
        "greedy": parts(use_milp=False, use_merge=False),
        "mlora": lambda s, limits, _: mlora.pack(s, limits, STAGES),
        "joint": lambda s, limits, cost: joint.pack(s, limits, STAGES, cost),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Jobs that are scheduled together.

    Attributes:
        table: The table that the case belongs to.
        lengths: Name of the jobs' lengths in tables.
        names: Where each job's lengths come from; see `lengths.lengths`.
        batch_size: Samples of each global batch.
        num_batches: Global batches of each job.
        capacity: Tokens of a microbatch.
    """

    table: str
    lengths: str
    names: tuple[str, ...]
    batch_size: int
    num_batches: int
    capacity: int

    def rows(
        self, chosen: dict[str, Packer], costs: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yields the results of packers under cost models.

        Raises:
            RuntimeError: A packer breaks a rule.
        """
        number, size = self.batch_size * self.num_batches, self.batch_size
        samples = jobs(self.names, num_samples=number, batch_size=size)
        limits = Limits(capacity=self.capacity, block_tokens=BLOCK)
        for packer, pack in chosen.items():
            schedule, seconds = None, 0.0
            for name in costs:
                # Only the default packer looks at costs.
                if schedule is None or packer == "joint":
                    began = time.perf_counter()
                    schedule = pack(samples, limits, COSTS[name])
                    seconds = time.perf_counter() - began
                yield {
                    "table": self.table,
                    "lengths": self.lengths,
                    "jobs": len(self.names),
                    "batch_size": size,
                    "capacity": self.capacity,
                    "packer": packer,
                    "cost": name,
                    "planning_us_per_sample": round(1e6 * seconds / len(samples), 1),
                    **_simulated(schedule, samples, COSTS[name]),
                }


def _simulated(
    schedule: Schedule, samples: Sequence[Sample], model: CostModel
) -> dict[str, Any]:
    if wrong := violations(schedule, samples, distance=STAGES.distance):
        raise RuntimeError(f"a packer breaks a rule: {wrong[0]}")
    found = simulate(schedule, model, STAGES)
    bound = lower_bound(samples, schedule.limits, STAGES, model)
    no_ops = sum(not m for m in schedule.microbatches)
    return {
        "microbatches": len(schedule.microbatches) - no_ops,
        "no_ops": no_ops,
        "makespan": round(found.makespan),
        "bubble_percent": round(100 * found.bubble, 1),
        "over_lower_bound_percent": round(100 * bound.gap(found.makespan), 1),
    }


def adapters(quick: bool) -> Iterator[Case]:
    """Yields 1 to 8 adapters, as in section 6.5 of LoRAFusion's paper."""
    for count in (1, 2, 3, 4, 8):
        yield Case(
            table="adapters",
            lengths="mix",
            names=("mix",) * count,
            batch_size=16,
            num_batches=2 if quick else 16,
            capacity=6144,
        )


def grid(quick: bool) -> Iterator[Case]:
    """Yields lengths, global batch sizes and capacities, with four jobs."""
    for lengths in ("mix", "het") if quick else FOUR_JOBS:
        for batch_size in (16,) if quick or lengths in SHAPES else (8, 16, 32):
            for capacity in CAPACITIES[1:3] if quick else CAPACITIES:
                yield Case(
                    table="grid",
                    lengths=lengths,
                    names=FOUR_JOBS[lengths],
                    batch_size=batch_size,
                    num_batches=2 if quick else 8,
                    capacity=capacity,
                )


def fill_samples(batch_sizes: Sequence[int]) -> list[Sample]:
    """Makes the samples of log-normal jobs with short samples, in the order of jobs."""
    out = []
    for job, size in enumerate(batch_sizes):
        rng = np.random.default_rng([0, job])
        drawn = rng.lognormal(np.log(350) - 0.8**2 / 2, 0.8, FILL_STEPS * size)
        out += in_batches(job, np.clip(np.rint(drawn), 16, 2048), size)
    return out


def fill(
    samples: Sequence[Sample], limits: Limits, packer: PackerName
) -> dict[str, Any]:
    """Packs all samples as one stream, as the trainer does on one device.

    Returns:
        The share of real tokens, the number of microbatches, and a lower bound of it.
    """
    cost = fixed_shape_cost(limits.capacity)
    rules = Rules(limits=limits, lanes=ONE_LANE, cost=cost, packer=packer)
    jobs = batches_by_job(samples)
    tokens = {job: [[s.num_tokens for s in b] for b in jobs[job]] for job in jobs}
    positions = [
        Position(
            job=job,
            owner=job,
            batch=0,
            num_batches=len(batches),
            batch_tokens=sum(map(sum, batches)) / len(batches),
        )
        for job, batches in tokens.items()
    ]
    lengths = lambda job, batch: tokens[job][batch]
    number = sum(1 for _ in whole_stream(positions, lengths, rules))
    fewest = lower_bound(samples, limits, Pipeline(), cost).microbatches
    real = sum(s.num_tokens for s in samples)
    share = round(100 * real / (number * limits.capacity), 1)
    return {"fill_percent": share, "microbatches": number, "fewest": fewest}


def fill_rows() -> Iterator[dict[str, Any]]:
    """Yields the fill of the trainer's microbatches."""
    batch_sizes = (8, 8, 8, 8), (16, 16, 16, 16), (4, 8, 16, 32)
    for sizes, capacity in itertools.product(batch_sizes, (4096, 8192)):
        given, limits = fill_samples(sizes), Limits(capacity=capacity, block_tokens=64)
        for packer in STREAMED:
            yield {
                "table": "fill",
                "batch_size": ", ".join(map(str, sizes)),
                "capacity": capacity,
                "packer": packer,
                **fill(given, limits, packer),
            }


def tables(rows: Sequence[Row]) -> str:
    """Formats all rows."""
    of = lambda name: [row for row in rows if row["table"] == name]
    even = [row for row in of("adapters") if row["cost"] == "even"]
    jobs, speeds = of("adapters"), _speeds(of("grid"))
    speed = "Simulated speed, LoRAFusion's algorithm = 1, each at its best capacity"
    size = "batch_size"
    return sections(
        {
            "Bubbles, %": pivot(jobs, ["cost", "jobs"], "packer", "bubble_percent"),
            speed: pivot(speeds, ["cost", "lengths", size], "packer", "speed"),
            "Planning, microseconds per sample": pivot(
                even, ["jobs"], "packer", "planning_us_per_sample"
            ),
            "Makespan over the bound": pivot(
                of("kinds"),
                ["kind", "lanes", "last_stage", "stages"],
                "packer",
                "makespan_over_bound",
            ),
            "Real tokens of microbatches, %": pivot(
                of("fill"), [size, "capacity"], "packer", "fill_percent"
            ),
        }
    )


def _speeds(rows: Sequence[Row]) -> list[Row]:
    """Returns rows of the best makespans over capacities, as speeds."""
    names = ("cost", "lengths", "batch_size", "packer")
    best: dict[tuple, float] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        best[key] = min(best.get(key, row["makespan"]), row["makespan"])
    return [
        {**dict(zip(names, key, strict=True)), "speed": round(paper / makespan, 3)}
        for key, makespan in best.items()
        if (paper := best.get((*key[:3], "paper"))) is not None
    ]


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--quick", action="store_true", help="few cases of each kind")
    out.add_argument(
        "--time-limit", type=float, default=1.0, help="seconds of the solver per stage"
    )
    out.add_argument("--num-workers", type=int, default=os.cpu_count())


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    limit = min(args.time_limit, 0.1) if args.quick else args.time_limit
    chosen = packers(limit, args.num_workers)
    in_grid = {n: p for n, p in chosen.items() if not n.startswith("no ")}
    end = about(f"{platform.machine()}, {os.cpu_count()} CPU cores") | {
        "versions": versions(("numpy", "pulp", "highspy")),
        "time_limit_s": limit,
    }
    rows = Rows(args.output_dir, "scheduler", tables)
    for row in itertools.chain(
        kinds.rows(args.quick, limit),
        *(case.rows(chosen, list(COSTS)) for case in adapters(args.quick)),
        *(case.rows(in_grid, list(COSTS)) for case in grid(args.quick)),
        fill_rows(),
    ):
        rows.add(row | end)
    print(rows.tables())
