"""First-fit decreasing: the baseline packer."""

from collections.abc import Sequence

from jaxlora.scheduler.types import Limits, Sample, Schedule, check_fits


def pack(samples: Sequence[Sample], limits: Limits) -> Schedule:
    """Packs one global batch of each job into few microbatches.

    The longest sample first, each into the first microbatch with room for it, counting
    that a job's part of a microbatch is padded to whole blocks.

    Args:
        samples: At most one global batch of each job.
        limits: Capacity and block size.

    Raises:
        ValueError: A sample is longer than the capacity, or a job has two batches.
    """
    _check(samples, limits)
    bins: list[list[Sample]] = []
    used: list[int] = []  # padded tokens of each microbatch
    of_job: list[dict[int, int]] = []  # real tokens of each job in each microbatch
    order = sorted(samples, key=lambda s: (-s.num_tokens, s.job, s.index))
    for sample in order:
        for i, tokens in enumerate(of_job):
            had = tokens.get(sample.job, 0)
            more = limits.padded(had + sample.num_tokens) - limits.padded(had)
            if used[i] + more <= limits.capacity:
                break
        else:
            i, had, more = len(bins), 0, limits.padded(sample.num_tokens)
            bins.append([])
            used.append(0)
            of_job.append({})
        bins[i].append(sample)
        used[i] += more
        of_job[i][sample.job] = had + sample.num_tokens
    microbatches = (sorted(b, key=lambda s: (s.job, s.index)) for b in bins)
    return Schedule(microbatches=tuple(map(tuple, microbatches)), limits=limits)


def _check(samples: Sequence[Sample], limits: Limits) -> None:
    check_fits(samples, limits)
    batch_of: dict[int, int] = {}
    for sample in samples:
        if batch_of.setdefault(sample.job, sample.batch) != sample.batch:
            raise ValueError(
                f"job {sample.job} has samples of batches {batch_of[sample.job]} and "
                f"{sample.batch}: give one global batch of each job at a time."
            )
