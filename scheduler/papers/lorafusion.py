"""LoRAFusion's multi-LoRA scheduler, implemented from its paper.

It groups jobs, packs each global batch of a group, merges, verifies and fixes.

References:
    LoRAFusion, https://arxiv.org/abs/2510.00206, section 5.2 and Algorithm 1.
"""

import dataclasses
import enum
import logging
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice

import numpy as np

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.papers import greedy
from jaxlora.scheduler.papers.spacing import Spacing, with_no_ops
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
    in_order,
    padded_tokens,
)

_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """The way in which a batch was packed."""

    OPTIMAL = "optimal"  # by the solver, with a proof for both stages
    FEASIBLE = "feasible"  # by the solver, which reached its time limit
    GREEDY = "greedy"  # by first-fit decreasing; the solver found nothing better
    FAILED = "failed"  # by first-fit decreasing, because the solver failed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """The microbatches of one global batch of a group.

    Attributes:
        microbatches: The microbatches, in descending order of padded tokens.
        outcome: How the batch was packed.
        reason: Why the solver failed; empty if it did not.
    """

    microbatches: tuple[Microbatch, ...]
    outcome: Outcome
    reason: str = ""


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
    options = {"time_limit": time_limit, "seed": seed, "use_milp": use_milp}
    work = partial(pack_batch, limits=limits, **options)
    turns = _in_turns(samples, groups)
    if num_workers == 1 or len(turns) < 2 or not use_milp:
        packed = list(map(work, turns))
    else:
        packed = _pack_in_processes(turns, limits, work, num_workers)
    _log_outcomes(packed)
    batches = [p.microbatches for p in packed]
    joined = (
        merge(batches, limits, pipeline)
        if use_merge
        else tuple(chain.from_iterable(batches))
    )
    return verify_and_fix(joined, samples, limits, pipeline)


def _in_turns(
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


def _pack_in_processes(
    batches: Sequence[Sequence[Sample]],
    limits: Limits,
    work: Callable[[Sequence[Sample]], BatchSchedule],
    num_workers: int,
) -> list[BatchSchedule]:
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
        done += [greedy_for(b, limits, reason) for b in batches[len(done) :]]
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


# ---- groups --------------------------------------------------------------------------

# The estimate of the microbatches that a job fills assumes samples that are shorter
# than the mean by this many standard deviations. The value is that of LoRAFusion's
# code; the paper gives none.
MARGIN = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of the sequence lengths of a job.

    Attributes:
        job: Number of the job.
        mean: Mean number of tokens in a sample.
        std: Sample standard deviation (n - 1) of the number of tokens; 0 for one
            sample.
        batch_size: Mean number of samples in a global batch.
    """

    job: int
    mean: float
    std: float
    batch_size: float

    def microbatches(self, limits: Limits) -> int:
        """Conservative estimate of the microbatches that a global batch fills."""
        tokens = self.batch_size * max(0.0, self.mean - MARGIN * self.std)
        return max(1, math.ceil(tokens / limits.capacity))


def statistics(samples: Iterable[Sample]) -> tuple[Statistics, ...]:
    """Returns the statistics of each job, in ascending order of jobs."""
    return tuple(
        Statistics(
            job=job,
            mean=float(np.mean(tokens)),
            std=float(np.std(tokens, ddof=1)) if len(tokens) > 1 else 0.0,
            batch_size=len(tokens) / len(batches),
        )
        for job, batches in sorted(batches_by_job(samples).items())
        for tokens in [[s.num_tokens for batch in batches for s in batch]]
    )


def head_tail(
    jobs: Sequence[Statistics], limits: Limits, pipeline: Pipeline
) -> tuple[tuple[int, ...], ...]:
    """Makes groups of one or two jobs, in the order in which they take turns.

    The job with the longest sequences is paired with the job with the shortest. A pair
    is made only if the other jobs fill the D - 1 microbatches between two of its
    batches. Otherwise the job of the two that fills more microbatches stays alone.
    """
    filled = {s.job: s.microbatches(limits) for s in jobs}
    order = sorted(jobs, key=lambda s: (-s.mean, s.job))
    total, groups = sum(filled.values()), []
    head, tail = 0, len(order) - 1
    while head < tail:
        long, short = order[head].job, order[tail].job
        if total - filled[long] - filled[short] >= pipeline.distance - 1:
            groups.append((long, short))
            head, tail = head + 1, tail - 1
        elif filled[long] < filled[short]:
            groups.append((short,))
            tail -= 1
        else:
            groups.append((long,))
            head += 1
    if head == tail:
        groups.append((order[head].job,))
    return tuple(groups)


# ---- one batch of a group ------------------------------------------------------------


def pack_batch(
    samples: Sequence[Sample],
    limits: Limits,
    *,
    time_limit: float,
    seed: int,
    use_milp: bool,
) -> BatchSchedule:
    """Packs a batch by Algorithm 1 of LoRAFusion, lines 2 to 10.

    The samples are at most one global batch of each job. For the options, see `pack`.
    """
    baseline = _ordered(greedy.pack(samples, limits).microbatches, limits)
    if not use_milp or _cannot_be_beaten(baseline, samples, limits):
        return BatchSchedule(microbatches=baseline, outcome=Outcome.GREEDY)
    try:
        return _two_stages(samples, limits, baseline, time_limit, seed)
    except (ImportError, RuntimeError) as error:
        return greedy_for(samples, limits, f"{type(error).__name__}: {error}")


def greedy_for(samples: Sequence[Sample], limits: Limits, reason: str) -> BatchSchedule:
    """Packs a batch by first-fit decreasing and reports that the solver failed."""
    return BatchSchedule(
        microbatches=_ordered(greedy.pack(samples, limits).microbatches, limits),
        outcome=Outcome.FAILED,
        reason=reason,
    )


def _two_stages(
    samples: Sequence[Sample],
    limits: Limits,
    baseline: tuple[Microbatch, ...],
    time_limit: float,
    seed: int,
) -> BatchSchedule:
    # PuLP takes a second to import.
    from jaxlora.scheduler.papers import lorafusion_milp as milp

    best, is_fewest = baseline, True
    ordered = sorted(samples, key=lambda s: (s.owner, s.batch, s.index))
    options = {"time_limit": time_limit, "seed": seed}
    if len(baseline) > _fewest(samples, limits):
        bins, is_fewest = milp.fewest_bins(ordered, limits, baseline, **options)
        best = _better(best, bins, limits)
    least = _least(samples, limits, len(best))
    bins, is_emptiest = milp.emptiest_bin(
        ordered, limits, best, at_least=least, **options
    )
    best = _better(best, bins, limits)
    outcome = Outcome.OPTIMAL if is_fewest and is_emptiest else Outcome.FEASIBLE
    if best is baseline:
        outcome = Outcome.GREEDY
    return BatchSchedule(microbatches=best, outcome=outcome)


def _better(
    held: tuple[Microbatch, ...], bins: list[list[Sample]] | None, limits: Limits
) -> tuple[Microbatch, ...]:
    """Returns `bins` if they are fewer, or equally many with a smaller last bin."""
    if not bins:
        return held
    found = _ordered([tuple(b) for b in bins], limits)
    rank = lambda m: (len(m), padded_tokens(m[-1], limits))
    return found if rank(found) < rank(held) else held


def _ordered(
    microbatches: Sequence[Microbatch], limits: Limits
) -> tuple[Microbatch, ...]:
    """Sorts microbatches by descending size, with the samples of a job adjacent."""
    key = lambda m: (-padded_tokens(m, limits), m[0].owner, m[0].index)
    return tuple(sorted(map(in_order, microbatches), key=key))


def _cannot_be_beaten(
    packed: tuple[Microbatch, ...], samples: Sequence[Sample], limits: Limits
) -> bool:
    if len(packed) > _fewest(samples, limits):
        return False
    smallest = padded_tokens(packed[-1], limits) // limits.block_tokens
    return smallest <= _least(samples, limits, len(packed))


def _fewest(samples: Sequence[Sample], limits: Limits) -> int:
    """Lower bound on the number of microbatches."""
    alone = sum(2 * s.num_tokens > limits.capacity for s in samples)
    return max(-(-padded_tokens(samples, limits) // limits.capacity), alone)


def _least(samples: Sequence[Sample], limits: Limits, num_bins: int) -> int:
    """Lower bound on the blocks of the smallest of `num_bins` microbatches."""
    shortest = min(limits.padded(s.num_tokens) for s in samples)
    rest = padded_tokens(samples, limits) - (num_bins - 1) * limits.capacity
    return max(shortest, rest) // limits.block_tokens


# ---- merging -------------------------------------------------------------------------

# One global batch of a group, in descending order of padded tokens.
Batch = Sequence[Microbatch]


def merge(
    batches: Sequence[Batch], limits: Limits, pipeline: Pipeline
) -> tuple[Microbatch, ...]:
    """Merges by Algorithm 1 of LoRAFusion, lines 12 to 14, in one pass.

    It moves the longest samples that fit, starting with the smallest microbatch of the
    next batch, and drops microbatches that become empty. A sample does not move if that
    would mix two global batches of its job, or bring them closer than the distance D. A
    microbatch is not dropped if that would require a no-op later.
    """
    out: list[list[Sample]] = []
    spacing = Spacing(pipeline.distance)
    for i, batch in enumerate(batches):
        rest = [list(m) for m in batch]
        while out and rest:
            taken = _that_fit(out[-1], rest[-1], limits, spacing)
            if len(taken) == len(rest[-1]):
                later = chain.from_iterable(islice(batches, i + 1, None))
                window = list(islice(later, pipeline.distance))
                if not _may_drop(rest, window, spacing):
                    taken.pop()
            out[-1] += taken
            spacing.join(taken)
            rest[-1] = [s for s in rest[-1] if s not in taken]
            if rest[-1]:
                break
            rest.pop()
        for microbatch in rest:
            out.append(microbatch)
            spacing.place(microbatch)
    return tuple(map(in_order, out))


def _that_fit(
    held: Sequence[Sample],
    candidates: Sequence[Sample],
    limits: Limits,
    spacing: Spacing,
) -> list[Sample]:
    """Returns the samples that may join `held`, the last microbatch; longest first."""
    taken: list[Sample] = []
    for sample in sorted(candidates, key=lambda s: (-s.num_tokens, s.owner, s.index)):
        if spacing.earliest(sample) > spacing.position:
            continue
        if padded_tokens([*held, *taken, sample], limits) <= limits.capacity:
            taken.append(sample)
    return taken


def _may_drop(
    rest: Sequence[Sequence[Sample]], later: Sequence[Microbatch], spacing: Spacing
) -> bool:
    """Whether merging the last microbatch of `rest` requires no additional no-op."""
    dropped, kept = spacing.copy(), spacing.copy()
    dropped.join(rest[-1])
    for microbatch in rest[:-1]:
        dropped.place(microbatch)
        kept.place(microbatch)
    kept.place(rest[-1])
    for microbatch in later:
        dropped.place(microbatch)
        kept.place(microbatch)
        if dropped.position == kept.position:  # a no-op took its place
            return False
    return True
