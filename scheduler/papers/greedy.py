"""Packs by first-fit decreasing, the baseline packer."""

from collections.abc import Sequence

from jaxlora.scheduler.papers.spacing import with_no_ops
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
    in_order,
)


def by_rounds(
    samples: Sequence[Sample], limits: Limits, pipeline: Pipeline
) -> Schedule:
    """Packs one round at a time by first-fit decreasing.

    A round is the next global batch of every job. A microbatch never holds samples of
    two rounds. No-ops keep the batches of a job apart.
    """
    jobs = batches_by_job(samples).values()
    microbatches: list[Microbatch] = []
    for k in range(max(map(len, jobs), default=0)):
        batch = [s for batches in jobs if k < len(batches) for s in batches[k]]
        microbatches += pack(batch, limits).microbatches
    spaced = tuple(with_no_ops(microbatches, pipeline.distance))
    return Schedule(microbatches=spaced, limits=limits)


def pack(samples: Sequence[Sample], limits: Limits) -> Schedule:
    """Packs one global batch of each job by first-fit decreasing.

    The samples are placed in order of descending length, each in the first microbatch
    that has room for it, and a place for its job. The tokens of a job in a microbatch
    are padded to whole blocks.

    Args:
        samples: At most one global batch of each job.
        limits: Capacity and block size.

    Raises:
        ValueError: A sample is longer than the capacity, or a job has two batches.
    """
    _check(samples, limits)
    bins: list[list[Sample]] = []
    padded_tokens: list[int] = []  # of each microbatch
    job_tokens: list[dict[int, int]] = []  # unpadded, of each job in each microbatch
    order = sorted(samples, key=lambda s: (-s.num_tokens, s.owner, s.index))
    for sample in order:
        for i, tokens in enumerate(job_tokens):
            before = tokens.get(sample.owner, 0)
            added = limits.padded(before + sample.num_tokens) - limits.padded(before)
            is_one_more = not before and len(tokens) >= limits.most_jobs
            if padded_tokens[i] + added <= limits.capacity and not is_one_more:
                break
        else:
            i, before, added = len(bins), 0, limits.padded(sample.num_tokens)
            bins.append([])
            padded_tokens.append(0)
            job_tokens.append({})
        bins[i].append(sample)
        padded_tokens[i] += added
        job_tokens[i][sample.owner] = before + sample.num_tokens
    return Schedule(microbatches=tuple(map(in_order, bins)), limits=limits)


def _check(samples: Sequence[Sample], limits: Limits) -> None:
    check_fits(samples, limits)
    batch_of: dict[int, int] = {}
    for sample in samples:
        if batch_of.setdefault(sample.owner, sample.batch) != sample.batch:
            numbers = f"{batch_of[sample.owner]} and {sample.batch}"
            raise ValueError(
                f"job {sample.owner} has samples of batches {numbers}. Pack one global "
                "batch of each job at a time."
            )
