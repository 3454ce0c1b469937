"""Compares packers on kinds of jobs that are hard to pack, on several pipelines.

They are LoRAFusion's algorithm, mLoRA's order, and the default packer: `fewest` as if
padding took as long as tokens, and `joint` by the true costs. Planning time is
measured; all other times are simulated, so that any CPU will do.

Prints a table of makespans over the lower bound. With --output-dir, writes
scheduler.jsonl and scheduler.md.

    python -m scripts.bench scheduler --quick
    python -m scripts.bench scheduler --output-dir bench
"""

import argparse
import dataclasses
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    lower_bound,
    pack_ticks,
    simulate,
    violations,
)
from jaxlora.scheduler.pack.whole import arrange
from jaxlora.scheduler.papers import lorafusion, mlora
from scripts.bench.report import Row, Rows, about, add_output_dir, pivot, versions
from scripts.bench.scheduler.lengths import jobs

PACKERS = ("mlora", "paper", "fewest", "joint")
STAGES, LANES, LAST_STAGES = (1, 4, 8, 16), (1, 2, 8), (1.0, 1.06)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Jobs with samples of `lengths`, and the capacity of a microbatch in tokens."""

    lengths: str
    num_samples: tuple[int, ...]
    batch_size: int
    capacity: int = 6144

    def samples(self) -> list[Sample]:
        """Makes the samples."""
        names = [self.lengths] * len(self.num_samples)
        return jobs(names, num_samples=self.num_samples, batch_size=self.batch_size)


KINDS = {
    "1 job": Kind(lengths="mix", num_samples=(96,), batch_size=16),
    "1 job ten times 3 others": Kind(
        lengths="mix", num_samples=(160, 16, 16, 16), batch_size=8
    ),
    "4 jobs, batches of 1": Kind(lengths="mix", num_samples=(24,) * 4, batch_size=1),
    "4 jobs, heavy tail": Kind(
        lengths="heavy", num_samples=(48,) * 4, batch_size=8, capacity=4096
    ),
    "4 jobs": Kind(lengths="mix", num_samples=(96,) * 4, batch_size=16),
    "16 jobs": Kind(lengths="mix", num_samples=(64,) * 16, batch_size=8),
}


def kind_rows(
    quick: bool,
    solver: dict[str, Any],
    kinds: Sequence[str] = tuple(KINDS),
    packers: Sequence[str] = PACKERS,
    padding_share: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the makespan of each packer over the bound.

    Args:
        quick: Whether to take only four stages, and one lane.
        solver: Options of LoRAFusion's solver.
        kinds: Some of `KINDS`.
        packers: Some of `PACKERS`.
        padding_share: Time of a row of padding, as a share of that of a token, with one
            compiled shape; None: microbatches have no padding.
    """
    stages, lanes = ((4,), (1,)) if quick else (STAGES, LANES)
    for num_lanes, last, num, (name, kind) in itertools.product(
        lanes, LAST_STAGES, stages, [(name, KINDS[name]) for name in kinds]
    ):
        if last > 1 and (num == 1 or num_lanes > 1):
            continue
        of_case = {
            "kind": name,
            "lanes": num_lanes,
            "stages": num,
            "last_stage": last,
        }
        found = _of_case(kind, num_lanes, last, num, solver, packers, padding_share)
        yield from (of_case | row for row in found)


def _cost(
    num_stages: int, last: float, capacity: int, padding_share: float | None
) -> CostModel:
    """Returns the costs of a case, with the padding of one shape if there is any."""
    padding = padding_share or 0.0
    passes = [
        AffineCost(
            base=256.0 + padding * capacity, per_token=1 - padding, per_square=square
        )
        for square in (2e-5, 5e-5)
    ]
    forward, backward = passes
    return CostModel.uniform(
        num_stages, forward=forward, backward=backward, last_stage=last
    )


def _of_case(
    kind: Kind,
    num_lanes: int,
    last: float,
    num_stages: int,
    solver: dict[str, Any],
    packers: Sequence[str],
    padding_share: float | None,
) -> Iterator[dict[str, Any]]:
    samples, limits = kind.samples(), Limits(capacity=kind.capacity, block_tokens=64)
    pipeline = Pipeline.one_f_one_b(num_stages)
    cost = _cost(num_stages, last, kind.capacity, padding_share)
    lanes = Lanes(data=num_lanes, pipeline=pipeline)
    bound = lower_bound(samples, limits, pipeline, cost, num_lanes=num_lanes)
    for packer, pack in _packers(samples, limits, lanes, cost, solver).items():
        if packer not in packers:
            continue
        began = time.process_time()
        schedule = pack()
        seconds = time.process_time() - began
        if wrong := violations(
            schedule, samples, distance=num_stages, num_lanes=num_lanes
        ):
            raise RuntimeError(f"{packer} breaks a rule: {wrong[0]}")
        found = simulate(schedule, cost, pipeline, num_lanes=num_lanes)
        yield {
            "packer": packer,
            "makespan_over_bound": round(found.makespan / bound.makespan, 3),
            "bubble_percent": round(100 * found.bubble, 1),
            "planning_s": round(seconds, 3),
        }


def _packers(
    samples: Sequence[Sample],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    solver: dict[str, Any],
) -> dict[str, Callable[[], Schedule]]:
    """Returns the packers by name."""
    n, pipeline = lanes.num_lanes, lanes.pipeline
    distance = pipeline.distance

    def arranged(pack: Callable[[Pipeline], Schedule]) -> Schedule:
        if n == 1:
            return pack(pipeline)
        far = Pipeline(num_stages=pipeline.num_stages, distance=n * distance)
        ticks = arrange(pack(far).microbatches, n, distance)
        return _in_ticks(ticks, limits, n)

    full = CostModel(stages=cost.stages, buckets=(limits.capacity,))
    return {
        "mlora": lambda: arranged(lambda p: mlora.pack(samples, limits, p)),
        "paper": lambda: arranged(
            lambda p: lorafusion.pack(samples, limits, p, **solver)
        ),
        # As if padding took as long as tokens.
        "fewest": lambda: pack_ticks(samples, limits, "joint", lanes, full),
        "joint": lambda: pack_ticks(samples, limits, "joint", lanes, cost),
    }


def _in_ticks(ticks: Sequence[Sequence], limits: Limits, num_lanes: int) -> Schedule:
    padded = [(*tick, *((),) * (num_lanes - len(tick))) for tick in ticks]
    return Schedule(microbatches=tuple(itertools.chain(*padded)), limits=limits)


def tables(rows: Sequence[Row]) -> str:
    """Formats the makespans over the bound."""
    index = ["kind", "lanes", "last_stage", "stages"]
    return pivot(rows, index, "packer", "makespan_over_bound")


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--quick", action="store_true", help="four stages and one lane")
    out.add_argument(
        "--time-limit", type=float, default=1.0, help="seconds of the solver per stage"
    )
    out.add_argument("--num-workers", type=int, default=os.cpu_count())
    out.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    out.add_argument("--packers", nargs="+", choices=PACKERS, default=list(PACKERS))
    out.add_argument(
        "--padding-share",
        type=float,
        help="time of a row of padding, as a share of a token's, with one shape",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    limit = min(args.time_limit, 0.1) if args.quick else args.time_limit
    end = about(f"{platform.machine()}, {os.cpu_count()} CPU cores") | {
        "versions": versions(("numpy", "pulp", "highspy")),
        "time_limit_s": limit,
    }
    solver = {"time_limit": limit, "num_workers": args.num_workers}
    rows = Rows(args.output_dir, "scheduler", tables)
    share = args.padding_share
    for row in kind_rows(args.quick, solver, args.kinds, args.packers, share):
        rows.add(row | end)
    print(rows.tables())
