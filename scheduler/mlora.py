"""mLoRA's order: one job a microbatch, so many samples each, jobs taking turns."""

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
    """LoRAPP: jobs take turns, each with a whole global batch in several microbatches.

    A turn runs as in Figure 4e of the paper: a global batch is cut into microbatches of
    a fixed number of samples, in the order of the data, whatever their lengths. The job
    that has waited longest is next, after no-ops if it must still wait for its
    optimiser step. A microbatch that would be over the capacity is cut short.

    BatchLoRA, which joins jobs in one microbatch when there are more than stages, is
    left out: all of its gain is in the kernels.

    Args:
        samples: All global batches of all jobs.
        limits: Capacity and block size.
        pipeline: Says how far apart a job's batches must be.
        samples_per_microbatch: At most so many samples share a microbatch.

    Raises:
        ValueError: A sample is over the capacity, or the number of samples is not
            positive.

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
    ready = dict.fromkeys(
        (job for job, _ in turns), 0
    )  # where its next batch may start
    while turns:
        job, waiting = turns.popleft()
        out += [()] * (ready[job] - len(out))
        out += _cut(waiting.popleft(), limits, samples_per_microbatch)
        ready[job] = len(out) - 1 + pipeline.distance
        if waiting:
            turns.append((job, waiting))
    return Schedule(microbatches=tuple(out), limits=limits)


def _batches(samples: Sequence[Sample]) -> dict[int, deque[list[Sample]]]:
    """Global batches of each job, in order."""
    return {
        job: deque(sorted(batch, key=lambda s: s.index) for batch in batches)
        for job, batches in batches_by_job(samples).items()
    }


def _cut(
    batch: Sequence[Sample], limits: Limits, samples_per_microbatch: int
) -> Iterator[Microbatch]:
    held: Microbatch = ()
    for sample in batch:
        longer = (*held, sample)
        full = len(held) == samples_per_microbatch
        if held and (full or padded_tokens(longer, limits) > limits.capacity):
            yield held
            longer = (sample,)
        held = longer
    yield held
