"""Fills the last microbatch of a batch with samples of the next batch."""

from collections.abc import Sequence
from itertools import chain, islice

from jaxlora.scheduler.algorithms.spacing import Spacing
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample, padded_tokens

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

    Args:
        batches: Batches of all groups, in the order in which they run.
        limits: Capacity and block size.
        pipeline: Provides the distance between the batches of a job.
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
    return tuple(tuple(sorted(m, key=lambda s: (s.owner, s.index))) for m in out)


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
