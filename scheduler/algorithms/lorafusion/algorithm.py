"""LoRAFusion's complete algorithm: group, pack, merge, verify and fix."""

import logging
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain

from jaxlora.scheduler.algorithms.lorafusion.batch import (
    BatchSchedule,
    Outcome,
    Settings,
    greedy_for,
    pack_batch,
)
from jaxlora.scheduler.algorithms.lorafusion.group import head_tail, statistics
from jaxlora.scheduler.algorithms.lorafusion.merge import merge
from jaxlora.scheduler.algorithms.spacing import with_no_ops
from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.lanes import Lanes
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
    _check(samples, limits, time_limit, num_workers)
    groups = head_tail(statistics(samples), limits, pipeline)
    settings = Settings(
        limits=limits, time_limit=time_limit, seed=seed, use_milp=use_milp
    )
    packed = _pack_all(in_order(samples, groups), settings, num_workers)
    _log_outcomes(packed)
    batches = [p.microbatches for p in packed]
    joined = (
        merge(batches, limits, pipeline)
        if use_merge
        else tuple(chain.from_iterable(batches))
    )
    return verify_and_fix(joined, samples, limits, pipeline)


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


def _log_outcomes(packed: Sequence[BatchSchedule]) -> None:
    count = lambda outcome: sum(p.outcome is outcome for p in packed)
    _log.info(
        "%d batches: %d packed optimally by the solver, %d at its time limit, %d "
        "greedily",
        len(packed),
        count(Outcome.OPTIMAL),
        count(Outcome.FEASIBLE),
        count(Outcome.GREEDY),
    )
    failures = [p.reason for p in packed if p.outcome is Outcome.FAILED]
    if failures:
        _log.warning(
            "the solver failed for %d of %d batches, which were packed greedily; the "
            "first: %s",
            len(failures),
            len(packed),
            failures[0],
        )
