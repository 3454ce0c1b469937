"""Compares schedulers on synthetic sequence lengths.

These are LoRAFusion's algorithm with and without its parts, mLoRA's order, and the
default packer, on a 1F1B pipeline of four stages. Planning time is measured; all other
times are simulated, so that any CPU will do.

Prints tables. With --output-dir, writes them to scheduler_tables.md, and also writes
scheduler_*.csv and scheduler_bubbles.png.

    jaxlora bench scheduler --quick
    jaxlora bench scheduler --output-dir bench
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import dicts_table, write_csv
from jaxlora.bench.scheduler.lengths import SHAPES, jobs
from jaxlora.bench.scheduler.tables import (
    Run,
    adapters_table,
    costs_table,
    grid_table,
    parts_table,
    planning_table,
    plot,
)
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    joint,
    lorafusion,
    lower_bound,
    mlora,
    simulate,
    violations,
)

STAGES = Pipeline.one_f_one_b(4)
BLOCK = 64  # tokens
LIMIT_FIELDS = (
    "batch_size",
    "capacity",
    "time_limit_s",
    "planning_seconds",
    "solver",
    "makespan",
    "bubble",
)
CAPACITIES = (4096, 6144, 8192, 16384)
FOUR_JOBS = {
    "mix": ("mix",) * 4,
    "het": ("xsum", "cnn", "wikisum", "mix"),
    "xsum": ("xsum",) * 4,
    "cnn": ("cnn",) * 4,
    "wikisum": ("wikisum",) * 4,
    "uniform": ("uniform",) * 4,
    "lognormal": ("lognormal",) * 4,
    "heavy": ("heavy",) * 4,
}


def cost(
    *, backward: float = 1.0, last_stage: float = 1.0, base: float = 256.0
) -> CostModel:
    """Makes a cost model in token equivalents.

    The forward pass of a token on one stage costs 1.
    """
    square = 2e-5
    return CostModel.uniform(
        STAGES.num_stages,
        forward=AffineCost(base=base, per_token=1.0, per_square=square),
        backward=AffineCost(
            base=base, per_token=backward, per_square=2.5 * square * backward
        ),
        last_stage=last_stage,
    )


COSTS = {
    "even": cost(),
    "last stage +6 %": cost(last_stage=1.06),
    "backward 2x": cost(backward=2.0),
    "base 0": cost(base=0.0),
    "base 1024": cost(base=1024.0),
}


Packer = Callable[[Sequence[Sample], Limits], tuple[Schedule, str]]


def packers(time_limit: float, num_workers: int) -> dict[str, Packer]:
    """Returns the packers that do not depend on costs, by name."""

    def by_lorafusion(samples, limits, **options):
        packing = lorafusion.pack_with_report(
            samples,
            limits,
            STAGES,
            time_limit=time_limit,
            num_workers=num_workers,
            **options,
        )
        r = packing.report
        counts = (r.optimal, r.feasible, r.greedy, len(r.failures))
        return packing.schedule, "/".join(map(str, counts))

    off = {"use_milp": False, "use_merge": False}
    return {
        "paper": by_lorafusion,
        "no merge": functools.partial(by_lorafusion, use_merge=False),
        "no milp": functools.partial(by_lorafusion, use_milp=False),
        "greedy": functools.partial(by_lorafusion, **off),
        "mlora": lambda samples, limits: (mlora.pack(samples, limits, STAGES), ""),
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

    @functools.cached_property
    def samples(self) -> list[Sample]:
        """The samples of all jobs."""
        return jobs(
            self.names,
            num_samples=self.batch_size * self.num_batches,
            batch_size=self.batch_size,
        )

    def runs(self, chosen: dict[str, Packer], costs: Sequence[str]) -> Iterator[Run]:
        """Yields the results of all packers under all of the cost models."""
        limits = Limits(capacity=self.capacity, block_tokens=BLOCK)
        for packer, pack in chosen.items():
            start = time.perf_counter()
            schedule, solver = pack(self.samples, limits)
            seconds = time.perf_counter() - start
            for name in costs:
                yield self._run(schedule, packer, name, seconds, solver)
        for name in costs:
            start = time.perf_counter()
            schedule = joint.pack(self.samples, limits, STAGES, COSTS[name])
            seconds = time.perf_counter() - start
            yield self._run(schedule, "joint", name, seconds, "")
        start = time.perf_counter()
        effort = joint.Effort(fill_targets=(1.0,))
        schedule = joint.pack(self.samples, limits, STAGES, COSTS["even"], effort)
        seconds = time.perf_counter() - start
        yield self._run(schedule, "joint, full", "even", seconds, "")

    def _run(
        self, schedule: Schedule, packer: str, name: str, seconds: float, solver: str
    ) -> Run:
        wrong = violations(schedule, self.samples, distance=STAGES.distance)
        if wrong:
            raise SystemExit(f"{packer} breaks a rule: {wrong[0]}")
        simulation = simulate(schedule, COSTS[name], STAGES)
        bound = lower_bound(self.samples, schedule.limits, STAGES, COSTS[name])
        no_ops = sum(not m for m in schedule.microbatches)
        return Run(
            table=self.table,
            lengths=self.lengths,
            num_jobs=len(self.names),
            num_samples=len(self.samples),
            batch_size=self.batch_size,
            capacity=self.capacity,
            packer=packer,
            cost=name,
            planning_seconds=round(seconds, 4),
            microbatches=len(schedule.microbatches) - no_ops,
            no_ops=no_ops,
            slots_over_bound=round(len(schedule.microbatches) / bound.microbatches, 4),
            makespan=round(simulation.makespan),
            bubble=round(simulation.bubble, 4),
            over_lower_bound=round(bound.gap(simulation.makespan), 4),
            solver=solver,
        )


def adapters(quick: bool) -> Iterator[Case]:
    """Yields 1 to 8 adapters, as in section 6.5 of the paper."""
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
        is_shape = lengths in SHAPES
        for batch_size in (16,) if quick or is_shape else (8, 16, 32):
            for capacity in CAPACITIES[1:3] if quick else CAPACITIES:
                yield Case(
                    table="grid",
                    lengths=lengths,
                    names=FOUR_JOBS[lengths],
                    batch_size=batch_size,
                    num_batches=2 if quick else 8,
                    capacity=capacity,
                )


def limit_rows(quick: bool, num_workers: int) -> Iterator[dict]:
    """Yields schedules with longer time limits of the solver."""
    for batch_size, capacity in ((16, 6144), (32, 8192)):
        case = Case(
            table="limits",
            lengths="mix",
            names=("mix",) * 4,
            batch_size=batch_size,
            num_batches=2 if quick else 4,
            capacity=capacity,
        )
        for limit in (0.1, 0.3) if quick else (0.3, 1.0, 3.0, 10.0):
            paper = {"paper": packers(limit, num_workers)["paper"]}
            run = next(iter(case.runs(paper, ["even"])))
            yield {"time_limit_s": limit, **dataclasses.asdict(run)}


def growth_rows(quick: bool) -> Iterator[dict]:
    """Yields planning times of the default packer with more and more samples."""
    limits = Limits(capacity=8192, block_tokens=BLOCK)
    sizes = ((4, 640), (64, 160), (64, 1_600), (64, 15_625))
    for num_jobs, each in sizes[:2] if quick else sizes:
        samples = jobs(("mix",) * num_jobs, num_samples=each, batch_size=16)
        start = time.perf_counter()
        schedule = joint.pack(samples, limits, STAGES, COSTS["even"])
        seconds = time.perf_counter() - start
        row = {
            "num_jobs": num_jobs,
            "num_samples": len(samples),
            "seconds": round(seconds, 3),
            "microseconds_a_sample": round(1e6 * seconds / len(samples), 2),
            "microbatches": len(schedule.microbatches),
            "first_window_ms": round(1e3 * first_window(samples, limits), 1),
        }
        print(row, flush=True)
        yield row


def first_window(samples: Sequence[Sample], limits: Limits) -> float:
    """Returns the seconds until the default packer yields its first microbatches."""
    sources = joint.job_batches(samples)
    start = time.perf_counter()
    next(joint.stream(sources, limits, STAGES, COSTS["even"]))
    return time.perf_counter() - start


def versions() -> str:
    """Returns what planning times depend on."""
    names = ("numpy", "pulp", "highspy")
    found = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)
    return f"Python {platform.python_version()}, {found}, {os.cpu_count()} CPU cores"


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("scheduler", __doc__)
    add_output_dir(out)
    out.add_argument("--quick", action="store_true", help="few cases of each kind")
    out.add_argument(
        "--time-limit", type=float, default=1.0, help="seconds of the solver per stage"
    )
    out.add_argument("--num-workers", type=int, default=os.cpu_count())
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """All results: of packers, of the solver's time limits, and of more samples."""

    runs: list[Run]
    limits: list[dict]
    growth: list[dict]

    def tables(self) -> dict[str, str]:
        """Formats the tables, by title."""
        adapters = [r for r in self.runs if r.table == "adapters"]
        grid = [r for r in self.runs if r.table == "grid"]
        return {
            "Bubbles, % (stages alike / last stage +6 %)": adapters_table(adapters),
            "Gains of the algorithm's parts": parts_table(adapters),
            "Simulated speed, LoRAFusion's algorithm = 1": grid_table(grid),
            "Cost models (min / median / max)": costs_table(grid),
            "Planning time in these runs": planning_table(grid),
            "Time limit of the solver": dicts_table(self.limits, LIMIT_FIELDS),
            "Growth of the default packer": dicts_table(self.growth),
        }


def measure(quick: bool, time_limit: float, num_workers: int) -> Results:
    """Runs all cases, and prints each one when it is done."""
    chosen = packers(time_limit, num_workers)
    in_grid = {n: p for n, p in chosen.items() if not n.startswith("no ")}
    start = time.perf_counter()
    runs: list[Run] = []
    for case in adapters(quick):
        runs += case.runs(chosen, list(COSTS)[:2])
        print(f"{time.perf_counter() - start:5.0f} s", case, flush=True)
    for case in grid(quick):
        runs += case.runs(in_grid, list(COSTS))
        print(f"{time.perf_counter() - start:5.0f} s", case, flush=True)
    limits = list(limit_rows(quick, num_workers))
    return Results(runs=runs, limits=limits, growth=list(growth_rows(quick)))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    limit = min(args.time_limit, 0.1) if args.quick else args.time_limit
    start = time.perf_counter()
    found = measure(args.quick, limit, args.num_workers)
    seconds = time.perf_counter() - start
    first = f"{versions()}; solver limit {limit} s; {seconds:.0f} s in all."
    tables = (f"## {title}\n\n{table}" for title, table in found.tables().items())
    text = "\n\n".join([first, *tables])
    print(text)
    if args.output_dir:
        _write(args.output_dir, found, text)


def _write(folder: Path, found: Results, text: str) -> None:
    runs = [dataclasses.asdict(run) for run in found.runs]
    write_csv(folder / "scheduler_runs.csv", runs)
    write_csv(folder / "scheduler_limits.csv", found.limits)
    write_csv(folder / "scheduler_growth.csv", found.growth)
    (folder / "scheduler_tables.md").write_text(text + "\n", encoding="utf-8")
    plot(found.runs, folder / "scheduler_bubbles.png")
