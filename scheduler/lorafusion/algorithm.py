"""LoRAFusion's scheduler from end to end: group, pack, merge, verify and fix."""

import dataclasses
import logging
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain

from jaxlora.scheduler.lorafusion.batch import (
    Outcome,
    PackedBatch,
    Settings,
    greedy_for,
    pack_batch,
)
from jaxlora.scheduler.lorafusion.group import head_tail, statistics
from jaxlora.scheduler.lorafusion.merge import merge
from jaxlora.scheduler.lorafusion.verify_and_fix import verify_and_fix
from jaxlora.scheduler.types import (
    Limits,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the solver did for the global batches of all groups.

    Attributes:
        optimal: Batches that it packed, and proved that none packs them better.
        feasible: Batches that it packed better than greedily, cut by the time limit.
        greedy: Batches packed by first-fit decreasing: it had nothing better in time,
            or there is nothing better, or it was not asked.
        failures: Why it failed, for each batch for which it did; these were packed by
            first-fit decreasing, too, and are not counted in `greedy`.
    """

    optimal: int
    feasible: int
    greedy: int
    failures: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """A schedule and how it came about."""

    schedule: Schedule
    report: Report
    groups: tuple[tuple[int, ...], ...]


def pack(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    *,
    time_limit: float = 10.0,
    num_workers: int = 1,
    seed: int = 0,
    use_milp: bool = True,
    use_merge: bool = True,
) -> Schedule:
    """LoRAFusion's schedule; `pack_with_report` also says how it came about.

    Args:
        samples: All global batches of all jobs.
        limits: Capacity and block size.
        pipeline: Says how far apart a job's batches must be.
        time_limit: Seconds of each of the two programs of a batch. Where it cuts one
            short, the result depends on the machine; else only on the arguments.
        num_workers: Processes that pack batches at the same time. More than one are
            spawned, so that a script that asks for them must guard its entry with
            `if __name__ == "__main__"`.
        seed: Of the solver.
        use_milp: False: first-fit decreasing only.
        use_merge: False: no sample leaves its batch's own microbatches.

    Raises:
        ValueError: A sample is over the capacity or given twice, or an option is out of
            range. Raised before anything runs.

    References:
        LoRAFusion, https://arxiv.org/abs/2510.00206, section 5.2 and Algorithm 1.
    """
    return pack_with_report(
        samples,
        limits,
        pipeline,
        time_limit=time_limit,
        num_workers=num_workers,
        seed=seed,
        use_milp=use_milp,
        use_merge=use_merge,
    ).schedule


def pack_with_report(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    *,
    time_limit: float = 10.0,
    num_workers: int = 1,
    seed: int = 0,
    use_milp: bool = True,
    use_merge: bool = True,
) -> Packing:
    """As `pack`, with a report on the solver and the groups."""
    _check(samples, limits, time_limit, num_workers)
    groups = head_tail(statistics(samples), limits, pipeline)
    settings = Settings(
        limits=limits, time_limit=time_limit, seed=seed, use_milp=use_milp
    )
    packed = _pack_all(in_order(samples, groups), settings, num_workers)
    batches = [p.microbatches for p in packed]
    joined = (
        merge(batches, limits, pipeline)
        if use_merge
        else tuple(chain.from_iterable(batches))
    )
    schedule = verify_and_fix(joined, samples, limits, pipeline)
    return Packing(schedule=schedule, report=_report(packed), groups=groups)


def in_order(
    samples: Sequence[Sample], groups: Sequence[Sequence[int]]
) -> list[list[Sample]]:
    """Global batches of groups: the first of each group, then the second of each.

    A job that has no batches left is no longer in its group's.
    """
    rows = batches_by_job(samples)
    out = []
    for i in range(max(map(len, rows.values()), default=0)):
        for group in groups:
            parts = [rows[job][i] for job in group if i < len(rows[job])]
            if parts:
                out.append(list(chain.from_iterable(parts)))
    return out


def _pack_all(
    batches: Sequence[Sequence[Sample]], settings: Settings, num_workers: int
) -> list[PackedBatch]:
    work = partial(pack_batch, settings=settings)
    if num_workers == 1 or len(batches) < 2 or not settings.use_milp:
        return [work(b) for b in batches]
    context = multiprocessing.get_context("spawn")
    done: list[PackedBatch] = []
    try:
        with ProcessPoolExecutor(
            min(num_workers, len(batches)), mp_context=context
        ) as pool:
            for packed in pool.map(work, batches):
                done.append(packed)
    except BrokenProcessPool as error:
        _log.warning("a process that packs batches died: %s", error)
        reason = f"{type(error).__name__}: {error}"
        missing = batches[len(done) :]
        done += [greedy_for(b, settings.limits, reason) for b in missing]
    return done


def _check(
    samples: Sequence[Sample], limits: Limits, time_limit: float, num_workers: int
) -> None:
    if time_limit <= 0:
        raise ValueError(
            f"time_limit must be positive, got {time_limit}. To pack without the "
            "solver, pass use_milp=False."
        )
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}.")
    check_fits(samples, limits)
    if len(set(samples)) != len(samples):
        raise ValueError("a sample is given twice. Give each sample once.")


def _report(packed: Sequence[PackedBatch]) -> Report:
    count = lambda outcome: sum(p.outcome is outcome for p in packed)
    report = Report(
        optimal=count(Outcome.OPTIMAL),
        feasible=count(Outcome.FEASIBLE),
        greedy=count(Outcome.GREEDY),
        failures=tuple(p.reason for p in packed if p.outcome is Outcome.FAILED),
    )
    _log.info(
        "%d batches: %d packed optimally by the solver, %d at its time limit, %d "
        "greedily",
        len(packed),
        report.optimal,
        report.feasible,
        report.greedy,
    )
    if report.failures:
        _log.warning(
            "the solver failed for %d of %d batches, which were packed greedily; the "
            "first: %s",
            len(report.failures),
            len(packed),
            report.failures[0],
        )
    return report
