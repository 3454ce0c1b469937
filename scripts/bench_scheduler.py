"""Compares schedulers on synthetic sequence lengths; all times are simulated.

LoRAFusion's algorithm with and without its parts, mLoRA's order, and the default
packer, on a simulated 1F1B pipeline of four stages; planning time is measured. Writes
scheduler_*.csv, scheduler_bubbles.png and scheduler_tables.md.

    python -m scripts.bench_scheduler --output-dir bench
"""

import argparse
import csv
import dataclasses
import functools
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scheduler import (
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
from tests.scheduler.lengths import jobs

STAGES = Pipeline.one_f_one_b(4)
BLOCK = 64  # tokens
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
# LoRAFusion, section 6.5 and Figure 20: percent of time by number of adapters.
PAPER = {1: 44.17, 2: 15.00, 3: 12.23, 4: 11.09}


def cost(
    *, backward: float = 1.0, last_stage: float = 1.0, base: float = 256.0
) -> CostModel:
    """Token equivalents: a token's forward pass on one stage takes 1."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One packer on one set of jobs, under one cost model."""

    table: str
    lengths: str
    num_jobs: int
    num_samples: int
    batch_size: int
    capacity: int
    packer: str
    cost: str
    planning_seconds: float
    microbatches: int
    no_ops: int
    slots_over_bound: float
    makespan: float
    bubble: float
    over_lower_bound: float
    solver: str  # batches packed optimally / at the limit / greedily / after a failure


Packer = Callable[[Sequence[Sample], Limits], tuple[Schedule, str]]


def packers(time_limit: float, num_workers: int) -> dict[str, Packer]:
    """All that do not depend on costs, by name."""

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
    """Jobs that are scheduled together."""

    table: str
    lengths: str
    names: tuple[str, ...]
    batch_size: int
    num_batches: int
    capacity: int

    @functools.cached_property
    def samples(self) -> list[Sample]:
        return jobs(
            self.names,
            num_samples=self.batch_size * self.num_batches,
            batch_size=self.batch_size,
        )

    def runs(self, chosen: dict[str, Packer], costs: Sequence[str]) -> Iterator[Run]:
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
        effort = joint.Effort(shares=(1.0,))
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
    """The paper's section 6.5: 1 to 8 adapters."""
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
    """Lengths, global batch sizes and capacities, with four jobs."""
    for lengths in ("mix", "het") if quick else FOUR_JOBS:
        shapes = lengths in ("uniform", "lognormal", "heavy")
        for batch_size in (16,) if quick or shapes else (8, 16, 32):
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
    """What a longer time limit of the solver brings."""
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
    """Planning time and memory of the default packer as samples grow."""
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
    """Seconds until the default packer hands out its first microbatches."""
    sources = joint.job_batches(samples)
    start = time.perf_counter()
    next(joint.stream(sources, limits, STAGES, COSTS["even"]))
    return time.perf_counter() - start


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def spread(ratios: Sequence[float]) -> str:
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    return f"{low:.3f} / {middle:.3f} / {high:.3f}"


def adapters_table(runs: Sequence[Run]) -> str:
    """Bubbles in percent, all stages alike and with the dearer last one."""
    rows = []
    for count in sorted({r.num_jobs for r in runs}):
        at = {(r.packer, r.cost): r for r in runs if r.num_jobs == count}
        names = ("paper", "no merge", "no milp", "greedy", "mlora", "joint")
        both = [
            " / ".join(percent(at[n, c].bubble) for c in ("even", "last stage +6 %"))
            for n in names
        ]
        rows.append([count, PAPER.get(count, "-"), *both])
    head = (
        "adapters",
        "printed in the paper",
        "its algorithm",
        "without merge",
        "without MILP",
        "without both",
        "mLoRA's order",
        "default packer",
    )
    return markdown(head, rows)


def parts_table(runs: Sequence[Run]) -> str:
    """What merge and MILP save, in percent of throughput."""
    rows = []
    for count in sorted({r.num_jobs for r in runs}):
        at = {r.packer: r for r in runs if (r.num_jobs, r.cost) == (count, "even")}
        gain = lambda less, at=at: percent(at[less].makespan / at["paper"].makespan - 1)
        optimal, feasible, greedy, failed = map(int, at["paper"].solver.split("/"))
        chosen = (optimal + feasible) / (optimal + feasible + greedy + failed)
        rows.append([count, gain("no merge"), gain("no milp"), percent(chosen)])
    head = ("adapters", "merge, %", "MILP, %", "batches packed by the solver, %")
    return markdown(head, rows)


def grid_table(runs: Sequence[Run]) -> str:
    """Simulated time against LoRAFusion's algorithm, for each kind of jobs."""
    rows = []
    for key in dict.fromkeys((r.lengths, r.batch_size) for r in runs):
        cells = [r for r in runs if (r.lengths, r.batch_size, r.cost) == (*key, "even")]
        at = {(r.packer, r.capacity): r for r in cells}
        sizes = sorted({r.capacity for r in cells})
        best = {
            p: min((at[p, c] for c in sizes), key=lambda r: r.makespan)
            for p in ("paper", "joint", "mlora", "greedy")
        }
        equal = [at["paper", c].makespan / at["joint", c].makespan for c in sizes]
        slots = lambda p, at=at, sizes=sizes: max(
            at[p, c].slots_over_bound for c in sizes
        )
        ratio = lambda p, best=best: f"{best['paper'].makespan / best[p].makespan:.3f}"
        rows.append(
            [
                *key,
                spread(equal),
                ratio("joint"),
                ratio("mlora"),
                ratio("greedy"),
                *(f"{percent(best[p].bubble)}" for p in ("paper", "joint")),
                *(best[p].capacity for p in ("paper", "joint")),
                *(f"{slots(p):.3f}" for p in ("paper", "joint, full")),
                *(percent(best[p].over_lower_bound) for p in ("paper", "joint")),
            ]
        )
    head = (
        "lengths",
        "global batch",
        "default, equal capacity (min / median / max)",
        "default, best capacity",
        "mLoRA, best",
        "greedy, best",
        "bubble, paper",
        "bubble, default",
        "its capacity, paper",
        "its capacity, default",
        "slots over bound, paper",
        "slots over bound, default filling up",
        "over the lower bound, paper, %",
        "over the lower bound, default, %",
    )
    return markdown(head, rows)


def costs_table(runs: Sequence[Run]) -> str:
    """Speed of the default packer against LoRAFusion's algorithm, by cost model."""
    rows = []
    for name in COSTS:
        cells = [r for r in runs if r.cost == name]
        at = {(r.lengths, r.batch_size, r.capacity, r.packer): r for r in cells}
        equal = [
            r.makespan / at[*key[:3], "joint"].makespan
            for key, r in at.items()
            if key[3] == "paper"
        ]
        best = {}
        for r in cells:
            key = r.lengths, r.batch_size, r.packer
            best[key] = min(best.get(key, r.makespan), r.makespan)
        at_best = [
            m / best[*key[:2], "joint"] for key, m in best.items() if key[2] == "paper"
        ]
        over = [r.over_lower_bound for r in cells if r.packer == "joint"]
        rows.append([name, spread(equal), spread(at_best), spread(over)])
    head = ("cost model", "equal capacity", "best capacity", "over the lower bound")
    return markdown(head, rows)


def planning_table(runs: Sequence[Run]) -> str:
    rows = []
    for packer in dict.fromkeys(r.packer for r in runs):
        cells = [r for r in runs if r.packer == packer and r.cost == "even"]
        times = [r.planning_seconds for r in cells]
        a_sample = sum(times) / sum(r.num_samples for r in cells)
        rows.append([packer, spread(times), f"{1e3 * a_sample:.4f}"])
    return markdown(("packer", "seconds (min / median / max)", "ms a sample"), rows)


def dicts_table(rows: Sequence[dict], fields: Sequence[str]) -> str:
    return markdown(fields, [[row[f] for f in fields] for row in rows])


def plot(runs: Sequence[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shown = {"mlora": "mLoRA's order", "paper": "LoRAFusion", "joint": "default packer"}
    adapters = [r for r in runs if r.table == "adapters" and r.cost.startswith("last")]
    counts = sorted({r.num_jobs for r in adapters})
    for packer, label in shown.items():
        bubble = {r.num_jobs: 100 * r.bubble for r in adapters if r.packer == packer}
        left.plot(counts, [bubble[c] for c in counts], "o-", label=label)
    left.plot(list(PAPER), list(PAPER.values()), "kx", label="printed in its paper")
    left.set(xlabel="adapters", ylabel="bubble, % of time", ylim=(0, None))
    left.set_title("mix, global batch 16, C = 6144, last stage +6 %")
    left.legend()
    grid = [r for r in runs if (r.table, r.cost) == ("grid", "even")]
    best: dict[tuple[str, str], float] = {}
    for r in grid:
        key = f"{r.lengths} {r.batch_size}", r.packer
        best[key] = min(best.get(key, r.makespan), r.makespan)
    cases = list(dict.fromkeys(case for case, _ in best))
    for packer, label in shown.items():
        speed = [best[c, "paper"] / best[c, packer] for c in cases]
        right.plot(speed, range(len(cases)), "o", label=label)
    right.set_yticks(range(len(cases)), cases)
    right.set(xlabel="speed, each at its best capacity, LoRAFusion = 1")
    right.invert_yaxis()
    right.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)


def write_csv(rows: Sequence[dict], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def versions() -> str:
    names = ("numpy", "pulp", "highspy")
    found = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in names)
    return f"Python {platform.python_version()}, {found}, {os.cpu_count()} CPU cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("bench"))
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--time-limit", type=float, default=1.0, help="of the solver")
    parser.add_argument("--num-workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    limit = min(args.time_limit, 0.1) if args.quick else args.time_limit
    chosen = packers(limit, args.num_workers)
    in_grid = {n: p for n, p in chosen.items() if not n.startswith("no ")}
    start = time.perf_counter()
    runs: list[Run] = []
    for case in adapters(args.quick):
        runs += case.runs(chosen, list(COSTS)[:2])
        print(f"{time.perf_counter() - start:5.0f} s", case, flush=True)
    for case in grid(args.quick):
        runs += case.runs(in_grid, list(COSTS))
        print(f"{time.perf_counter() - start:5.0f} s", case, flush=True)
    limits = list(limit_rows(args.quick, args.num_workers))
    growth = list(growth_rows(args.quick))
    of = lambda table: [r for r in runs if r.table == table]
    tables = {
        "Bubbles, % (stages alike / last stage +6 %)": adapters_table(of("adapters")),
        "Gains of the algorithm's parts": parts_table(of("adapters")),
        "Simulated speed, LoRAFusion's algorithm = 1": grid_table(of("grid")),
        "Cost models (min / median / max)": costs_table(of("grid")),
        "Planning time in these runs": planning_table(of("grid")),
        "Time limit of the solver": dicts_table(
            limits,
            (
                "batch_size",
                "capacity",
                "time_limit_s",
                "planning_seconds",
                "solver",
                "makespan",
                "bubble",
            ),
        ),
        "Growth of the default packer": dicts_table(growth, list(growth[0])),
    }
    seconds = time.perf_counter() - start
    told = f"{versions()}; solver limit {limit} s; {seconds:.0f} s in all."
    text = "\n\n".join([told, *(f"## {k}\n\n{v}" for k, v in tables.items())])
    out = args.output_dir
    (out / "scheduler_tables.md").write_text(text + "\n", encoding="utf-8")
    write_csv([dataclasses.asdict(r) for r in runs], out / "scheduler_runs.csv")
    write_csv(limits, out / "scheduler_limits.csv")
    write_csv(growth, out / "scheduler_growth.csv")
    plot(runs, out / "scheduler_bubbles.png")
    print(text)


if __name__ == "__main__":
    main()
