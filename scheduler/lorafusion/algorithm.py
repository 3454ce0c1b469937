"""LoRAFusion's complete algorithm: group, pack, merge, verify and fix."""

import dataclasses
import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.lorafusion.batch import (
    BatchSchedule,
    Outcome,
    Settings,
    greedy_for,
    pack_batch,
)
from jaxlora.scheduler.lorafusion.group import head_tail, statistics
from jaxlora.scheduler.lorafusion.merge import merge
from jaxlora.scheduler.spacing import with_no_ops
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Results of the solver for the global batches of all groups.

    Attributes:
        optimal: Number of batches whose packing the solver proved to be optimal.
        feasible: Number of batches for which the solver reached its time limit, with a
            better packing than first-fit decreasing.
        greedy: Number of batches packed by first-fit decreasing, because the solver was
            not used, or found nothing better.
        failures: Reasons of the solver's failures. The batches for which it failed were
            packed by first-fit decreasing and do not count as `greedy`.
    """

    optimal: int
    feasible: int
    greedy: int
    failures: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """A schedule, with the solver's results and the groups of jobs."""

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
    """Packs samples with LoRAFusion's algorithm.

    Args:
        samples: All global batches of all jobs.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job.
        time_limit: Time limit of each of the two programs of a batch, in seconds. If a
            program reaches it, the result depends on the speed of the machine.
            Otherwise it depends only on the arguments.
        num_workers: Number of processes that pack batches in parallel. If it is more
            than one, processes are spawned, so the calling script needs the guard
            `if __name__ == "__main__"`.
        seed: Seed of the solver.
        use_milp: Whether to use the solver, and not only first-fit decreasing.
        use_merge: Whether samples may move to the last microbatch of the batch before.

    Raises:
        ValueError: A sample is longer than the capacity or given twice, or an option is
            out of range.

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
    """Packs like `pack`, and also returns the solver's results and the groups."""
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
    """Returns the first global batch of each group, then the second of each, and so on.

    The batch of a group consists of one batch of each of its jobs that has one left.
    """
    rows = batches_by_job(samples)
    out = []
    for i in range(max(map(len, rows.values()), default=0)):
        for group in groups:
            parts = [rows[job][i] for job in group if i < len(rows[job])]
            if parts:
                out.append(list(chain.from_iterable(parts)))
    return out


def verify_and_fix(
    microbatches: Iterable[Microbatch],
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
) -> Schedule:
    """Completes a schedule by Algorithm 1 of LoRAFusion, line 15.

    It adds the fewest no-ops that this order of microbatches allows, each right before
    the microbatch that would be too early.

    Raises:
        RuntimeError: The schedule still violates a rule.
    """
    schedule = Schedule(
        microbatches=tuple(with_no_ops(microbatches, pipeline.distance)), limits=limits
    )
    require_legal(schedule, samples, Lanes(pipeline=pipeline))
    return schedule


def _pack_all(
    batches: Sequence[Sequence[Sample]], settings: Settings, num_workers: int
) -> list[BatchSchedule]:
    work = partial(pack_batch, settings=settings)
    if num_workers == 1 or len(batches) < 2 or not settings.use_milp:
        return [work(b) for b in batches]
    context = multiprocessing.get_context("spawn")
    done: list[BatchSchedule] = []
    try:
        with ProcessPoolExecutor(
            min(num_workers, len(batches)), mp_context=context
        ) as pool:
            for packed in pool.map(work, batches):
                done.append(packed)
    except BrokenProcessPool as error:
        _log.warning("a worker process that packs batches died: %s", error)
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
        raise ValueError("a sample is given twice. Pass each sample once.")


def _report(packed: Sequence[BatchSchedule]) -> Report:
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
