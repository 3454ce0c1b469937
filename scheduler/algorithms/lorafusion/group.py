"""Groups the jobs that share microbatches into LoRAFusion's head-tail pairs."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.types import Limits, Pipeline, Sample

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
    lengths: dict[int, list[int]] = {}
    batches: dict[int, set[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.owner, []).append(sample.num_tokens)
        batches.setdefault(sample.owner, set()).add(sample.batch)
    return tuple(
        Statistics(
            job=job,
            mean=float(np.mean(tokens)),
            std=float(np.std(tokens, ddof=1)) if len(tokens) > 1 else 0.0,
            batch_size=len(tokens) / len(batches[job]),
        )
        for job, tokens in sorted(lengths.items())
    )


def head_tail(
    jobs: Sequence[Statistics], limits: Limits, pipeline: Pipeline
) -> tuple[tuple[int, ...], ...]:
    """Makes groups of one or two jobs, in the order in which they take turns.

    The job with the longest sequences is paired with the job with the shortest. A pair
    is made only if the other jobs fill the D - 1 microbatches between two of its
    batches. Otherwise the job of the two that fills more microbatches stays alone.

    References:
        LoRAFusion, https://arxiv.org/abs/2510.00206, section 5.2.
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
