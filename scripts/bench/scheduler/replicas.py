"""Plans replicas of different shapes for LobRA's models, and simulates their steps.

The tables are those of LobRA's section 5, beside its figures: GPU-seconds of a step
(Figure 7), deployments (Table 2), what each part saves (Figure 8), idle time, and the
time of planning. The costs are this library's for the GPUs of the paper, by their data
sheets, and once more with tensor parallelism that loses more than its all-reduces take:
nothing here was measured on these GPUs. The paper's data sets are not at hand: lengths
are drawn from log-normal distributions whose mix is about that of its Figure 4.

Prints tables. With --output-dir, writes replicas.jsonl and replicas.md.

    python -m scripts.bench replicas --quick
    python -m scripts.bench replicas --output-dir bench
"""

import argparse
import dataclasses
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.costs.gpus import parse_machine
from jaxlora.device_check import use_cpu
from jaxlora.scheduler.replicas import (
    Deployment,
    PlannedDeployment,
    ReplicaKind,
    best_uniform,
    dispatch,
    lobra,
    plan_deployment,
    simulate_steps,
)
from scripts.bench.report import (
    Row,
    Rows,
    about,
    add_output_dir,
    titled_tables,
    versions,
)
from scripts.bench.scheduler.replica_setups import (
    COSTS,
    JOBS,
    LONGEST,
    SCALING,
    SETUPS,
    STEPS,
    Setup,
    draw_jobs,
    draw_mix,
    make_kinds,
    plain_kinds,
    together,
)


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return make(), time.process_time() - began


def short(deployment: Deployment) -> str:
    """Writes a deployment as in Table 2."""
    both = zip(deployment.kinds, deployment.counts, strict=True)
    return " + ".join(f"{n} x <{k.tensor},{k.stage}>" for k, n in both)


# ---- LobRA and its baselines ---------------------------------------------------------

type Steps = Sequence[np.ndarray]
type Planned = tuple[Deployment, np.ndarray]  # and the boundaries of buckets


def plan_fused(kinds: Sequence[ReplicaKind], num_gpus: int, steps: Steps) -> Planned:
    """Returns the best replicas of one kind that share padded samples evenly."""
    lengths = np.concatenate(steps)
    ends = lobra.boundaries(lengths)
    found = [
        Deployment(kinds=(kind,), counts=(num_gpus // kind.num_gpus,))
        for kind in lobra.padded_kinds(kinds)
        if kind.num_gpus <= num_gpus and kind.longest >= lengths.max()
    ]
    best = min(found, key=lambda one: fused_seconds((one, ends), steps))
    return best, ends


def fused_seconds(planned: Planned, steps: Steps) -> float:
    """Returns the mean step of `plan_fused`."""
    deployment, ends = planned
    each = [lobra.even_step(deployment, lobra.padded(s, ends)) for s in steps]
    return float(np.mean(each))


def lobra_seconds(planned: Planned, steps: Steps, *, is_dynamic: bool = True) -> float:
    """Returns the mean step of LobRA, with buckets of each step or fixed ones."""
    deployment, fixed = planned
    ends = (lobra.boundaries(step) if is_dynamic else fixed for step in steps)
    padded = map(lobra.padded, steps, ends)
    return float(np.mean([lobra.dispatch_step(deployment, one)[0] for one in padded]))


def own_seconds(planned: PlannedDeployment, steps: Steps) -> float:
    """Returns the mean step of samples that are packed and dispatched one by one."""
    sent = [dispatch(planned.deployment, step) for step in steps]
    return float(np.mean([one.seconds for one in sent]))


def by_length(planned: Planned, steps: Steps) -> tuple[float, float]:
    """Returns the mean step without balance, and the largest replica's idle share."""
    deployment, ends = planned
    each = [lobra.step_by_length(deployment, lobra.padded(s, ends)) for s in steps]
    largest = int(np.argmax([kind.longest for kind in deployment.kinds]))
    idle = [1 - seconds[largest] / seconds.max() for seconds in each]
    return float(np.mean([seconds.max() for seconds in each])), float(np.mean(idle))


# ---- the tables ----------------------------------------------------------------------


def setup_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of Figure 7, Table 2, Figure 8 and idle time."""
    if quick:
        small = dataclasses.replace(SETUPS[0], jobs=JOBS[::4])
        yield from _setup_rows(small, COSTS[0], 20, 2)
        return
    for setup, costs in itertools.product(SETUPS, COSTS):
        yield from _setup_rows(setup, costs, STEPS, 6)


def _setup_rows(
    setup: Setup, costs: str, num_steps: int, num_new: int
) -> Iterator[dict[str, Any]]:
    """Plans for `num_steps` steps, and compares on `num_new` other ones."""
    kinds, num_gpus = make_kinds(setup, costs), parse_machine(setup.gpus).count
    jobs, new = draw_jobs(setup.jobs, num_steps), draw_jobs(setup.jobs, num_new, seed=1)
    steps, later = together(jobs), together(new)
    given = kinds, num_gpus
    own = plan_deployment(*given, steps, LONGEST)
    alike = best_uniform(*given, steps, LONGEST)
    # All data is known, so that some replica holds the longest sample of it.
    fused = plan_fused(*given, steps + later)
    by_name = lobra.plan_lobra(*given, steps + later)
    seconds = _apart(kinds, num_gpus, jobs, new) | {
        "task_fused": fused_seconds(fused, later),
        "lobra": lobra_seconds(by_name, later),
        "packed_alike": own_seconds(alike, later),
        "this_planner": own_seconds(own, later),
    }
    about_it = {"model": setup.name, "gpus": num_gpus, "costs": costs}
    columns = ("task_fused", "task_sequential", "lobra_sequential", "lobra")
    columns += ("packed_apart", "packed_alike", "this_planner")
    gpu_seconds = {one: float(f"{num_gpus * seconds[one]:.4g}") for one in columns}
    yield about_it | {"table": "gpu_seconds"} | gpu_seconds
    yield about_it | _saved_row(setup, seconds)
    yield about_it | {
        "table": "deployments",
        "paper_fused": setup.fused,
        "fused": short(fused[0]),
        "packed_alike": short(alike.deployment),
        "paper": setup.deployment,
        "lobra": short(by_name[0]),
        "this_planner": short(own.deployment),
        "over_bound": round(own.gap, 4),
    }
    yield about_it | _parts_row(setup, by_name, later, seconds)
    in_time = [list(step) for step in zip(*jobs, strict=True)][:20]
    yield about_it | _idle_row(by_name, later, own.deployment, in_time)


def _apart(
    kinds: Sequence[ReplicaKind],
    num_gpus: int,
    jobs: Sequence[list[np.ndarray]],
    new: Sequence[list[np.ndarray]],
) -> dict[str, float]:
    """Returns the seconds of a step of each job, one job after the other."""
    given, out = (kinds, num_gpus), {}
    each = [(job + then, then) for job, then in zip(jobs, new, strict=True)]
    out["task_sequential"] = sum(
        fused_seconds(plan_fused(*given, job), then) for job, then in each
    )
    out["lobra_sequential"] = sum(
        lobra_seconds(lobra.plan_lobra(*given, job), then[:2]) for job, then in each
    )
    out["packed_apart"] = sum(
        own_seconds(best_uniform(*given, job), then) for job, then in each
    )
    return out


def _saved_row(setup: Setup, seconds: Mapping[str, float]) -> dict[str, Any]:
    over = lambda slow, fast: seconds[slow] / seconds[fast]
    saved = lambda slow, fast: _percent(1 - seconds[fast] / seconds[slow])
    return {
        "table": "saved",
        "paper": setup.saved,
        "lobra": saved("task_fused", "lobra"),
        "this_planner": saved("task_fused", "this_planner"),
        "over_packed_alike": saved("packed_alike", "this_planner"),
        "paper_over_lobra_sequential": "1.32 to 1.44",
        "lobra_over_lobra_sequential": round(over("lobra_sequential", "lobra"), 2),
        "this_planner_over_packed_apart": round(
            over("packed_apart", "this_planner"), 2
        ),
    }


def _parts_row(
    setup: Setup, by_name: Planned, later: Steps, seconds: Mapping[str, float]
) -> dict[str, Any]:
    saved = lambda one: _percent(1 - one / seconds["task_fused"])
    return {
        "table": "parts",
        "by_length": saved(by_length(by_name, later)[0]),
        "balanced": saved(lobra_seconds(by_name, later, is_dynamic=False)),
        "dynamic_buckets": saved(seconds["lobra"]),
        "packed": saved(seconds["this_planner"]),
        "paper": "18.94, 36.65, 45.03 %" if setup is SETUPS[0] else None,
    }


def _idle_row(
    by_name: Planned,
    later: Steps,
    deployment: Deployment,
    in_time: Sequence[list[np.ndarray]],
) -> dict[str, Any]:
    by_step, by_job = (
        simulate_steps(deployment, in_time, barrier=barrier)
        for barrier in ("step", "job")
    )
    return {
        "table": "idle",
        "largest_by_length": _percent(by_length(by_name, later)[1]),
        "paper_largest_by_length": "42 %",
        "barrier_of_step": _percent(by_step.gpus_idle),
        "barrier_of_job": _percent(by_job.gpus_idle),
        "step_over_job": round(by_step.seconds / by_job.seconds, 4),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plan_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields plans and dispatches over their bounds, and the time that they take.

    Jobs and their shares are drawn anew for each seed.
    """
    sizes = ((16, 512, 20), (64, 2048, 10), (512, 16384, 4))
    for num_gpus, num_samples, seeds in sizes[: 1 if quick else None]:
        plans: list[PlannedDeployment] = []
        over, saved, times = [], [], []
        for seed in range(2 if quick else seeds):
            steps = draw_mix(seed, num_samples, STEPS + 10)
            make = lambda s=steps, n=num_gpus: plan_deployment(
                plain_kinds(), n, s[:STEPS], LONGEST
            )
            planned, seconds = _timed(make)
            plans.append(planned)
            new = steps[STEPS : STEPS + (3 if num_gpus > 100 else 10)]
            sent, taken = _timed(
                lambda p=planned, s=new: [dispatch(p.deployment, one) for one in s]
            )
            over += [one.seconds / one.bound for one in sent]
            alike = best_uniform(plain_kinds(), num_gpus, steps[:STEPS], LONGEST)
            saved.append(1 - planned.seconds / alike.seconds)
            times.append((seconds, taken / len(new)))
        gaps = [planned.gap for planned in plans]
        plan_s, dispatch_s = np.mean(times, axis=0)
        yield {
            "table": "bounds",
            "gpus": num_gpus,
            "samples": num_samples,
            "mixes": len(plans),
            "deployment_over_bound": f"{np.mean(gaps):.4f} ({max(gaps):.4f})",
            "dispatch_over_bound": f"{np.mean(over):.5f} ({max(over):.5f})",
            "saved_over_alike": _percent(float(np.mean(saved))),
            "planning_s": round(plan_s, 2),
            "dispatch_s": round(dispatch_s, 3),
        }


def scaling_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the rate of a GPU among many over that of one, and what bounds it.

    The rate of one GPU is that of full microbatches, without steps of optimizers.
    """
    sizes = itertools.product((8, 64, 512), (1, 8))
    for num_gpus, factor in itertools.islice(sizes, 1 if quick else None):
        setup = dataclasses.replace(
            SCALING,
            jobs=tuple((*job[:2], factor * job[2]) for job in SCALING.jobs),
        )
        kinds = make_kinds(setup, COSTS[0], num_gpus)
        steps = together(draw_jobs(setup.jobs, 4 if quick else 20))
        (one,) = (kind for kind in kinds if kind.num_gpus == 1)
        lengths = np.concatenate(steps).astype(float)
        alone = one.cost(lengths.sum(), (lengths**2).sum()) - one.cost.base
        alone /= len(steps)
        unstaged = [kind for kind in kinds if kind.stage == 1]
        best, other = (
            plan_deployment(allowed, num_gpus, steps, LONGEST)
            for allowed in (kinds, unstaged)
        )
        longest = [min(kind.seconds(step.max()) for kind in kinds) for step in steps]
        yield {
            "table": "scaling",
            "gpus": num_gpus,
            "samples": len(steps[0]),
            "tokens": round(lengths.sum() / len(steps)),
            "step_s": round(best.seconds, 3),
            "rate": round(alone / num_gpus / best.seconds, 2),
            "without_stages": round(alone / num_gpus / other.seconds, 2),
            "longest_sample": _percent(float(np.mean(longest)) / best.seconds),
            "gradients": _percent(one.cost.base / best.seconds),
            "idle": _percent(best.idle),
            "this_planner": short(best.deployment),
        }


_SHOWN = ("gpu_seconds", "saved", "deployments", "parts", "idle", "bounds", "scaling")


def tables(rows: Sequence[Row]) -> str:
    """Formats all rows."""
    return titled_tables(rows, _SHOWN)


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_output_dir(out)
    out.add_argument("--quick", action="store_true", help="few and small cases")
    parts = ("plans", "setups", "scaling")
    out.add_argument(
        "--parts",
        nargs="+",
        choices=parts,
        default=parts,
        help="plans over their bounds, LobRA's tables, and the rate of many GPUs",
    )


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark with the given options."""
    use_cpu()  # memory is estimated from traces
    end = about(f"{platform.machine()}, {os.cpu_count()} CPU cores") | {
        "versions": versions(("jax", "numpy", "scipy", "pulp", "highspy"))
    }
    rows = Rows(args.output_dir, "replicas", tables)
    made = {"scaling": scaling_rows, "plans": plan_rows, "setups": setup_rows}
    for row in itertools.chain(*(made[name](args.quick) for name in args.parts)):
        rows.add(row | end)
    print(rows.tables())
