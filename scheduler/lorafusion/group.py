"""Which jobs share microbatches: LoRAFusion's head-tail pairs."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlora.scheduler.types import Limits, Pipeline, Sample

# A job is counted on for the microbatches that samples shorter than its mean by so many
# standard deviations would fill, as in LoRAFusion's code; the paper gives no figure.
MARGIN = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Sequence lengths of a job.

    Attributes:
        job: Which job.
        mean: Mean tokens of a sample.
        std: Their standard deviation, of the sample as it is (n - 1); 0 for one.
        batch_size: Mean number of samples of a global batch.
    """

    job: int
    mean: float
    std: float
    batch_size: float

    def microbatches(self, limits: Limits) -> int:
        """Cautious estimate of how many microbatches a global batch fills."""
        tokens = self.batch_size * max(0.0, self.mean - MARGIN * self.std)
        return max(1, math.ceil(tokens / limits.capacity))


def statistics(samples: Iterable[Sample]) -> tuple[Statistics, ...]:
    """Statistics of each job, by ascending job."""
    lengths: dict[int, list[int]] = {}
    batches: dict[int, set[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.job, []).append(sample.num_tokens)
        batches.setdefault(sample.job, set()).add(sample.batch)
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
    """Groups of one or two jobs, in the order in which they take turns.

    The longest sequences are paired with the shortest. A pair is made only if all other
    jobs fill the D - 1 microbatches that must lie between two of its batches; else
    the one that fills more of them stays alone.

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
