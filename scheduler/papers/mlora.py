"""Packs in mLoRA's order: one job per microbatch, with jobs taking turns."""

from collections import deque
from collections.abc import Iterator, Sequence

from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pipeline,
    Sample,
    Schedule,
    batches_by_job,
    check_fits,
    padded_tokens,
)


def pack(
    samples: Sequence[Sample],
    limits: Limits,
    pipeline: Pipeline,
    *,
    samples_per_microbatch: int = 4,
) -> Schedule:
    """Packs in the order of LoRAPP: each turn runs one global batch of one job.

    As in Figure 4e of the paper, a global batch is split into microbatches of a fixed
    number of samples, in the order of the data and regardless of their lengths. A
    microbatch gets fewer samples if it would exceed the capacity. The job that has
    waited longest has the next turn, after no-ops if it still has to wait for its
    optimizer step.

    BatchLoRA, which joins several jobs in one microbatch if there are more jobs than
    stages, is not implemented, because its gain comes only from the kernels.

    Args:
        samples: All global batches of all jobs.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job.
        samples_per_microbatch: Maximum number of samples in a microbatch.

    Raises:
        ValueError: A sample is longer than the capacity, or `samples_per_microbatch`
            is not positive.

    References:
        mLoRA, https://arxiv.org/abs/2312.02515, section 3.2.
    """
    if samples_per_microbatch < 1:
        raise ValueError(
            f"samples_per_microbatch must be positive, got {samples_per_microbatch}."
        )
    check_fits(samples, limits)
    out: list[Microbatch] = []
    turns = deque(sorted(_batches(samples).items()))
    # First position at which the next batch of each job may start.
    ready = dict.fromkeys((job for job, _ in turns), 0)
    while turns:
        job, batches = turns.popleft()
        out += [()] * (ready[job] - len(out))
        out += _split(batches.popleft(), limits, samples_per_microbatch)
        ready[job] = len(out) - 1 + pipeline.distance
        if batches:
            turns.append((job, batches))
    return Schedule(microbatches=tuple(out), limits=limits)


def _batches(samples: Sequence[Sample]) -> dict[int, deque[list[Sample]]]:
    """Returns the global batches of each job, in ascending order."""
    return {
        job: deque(sorted(batch, key=lambda s: s.index) for batch in batches)
        for job, batches in batches_by_job(samples).items()
    }


def _split(
    batch: Sequence[Sample], limits: Limits, samples_per_microbatch: int
) -> Iterator[Microbatch]:
    microbatch: Microbatch = ()
    for sample in batch:
        extended = (*microbatch, sample)
        is_full = len(microbatch) == samples_per_microbatch
        if microbatch and (
            is_full or padded_tokens(extended, limits) > limits.capacity
        ):
            yield microbatch
            extended = (sample,)
        microbatch = extended
    yield microbatch
