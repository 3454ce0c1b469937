"""Fills the last microbatch of a batch with samples of the batch after it."""

from collections.abc import Sequence
from itertools import chain, islice

from jaxlora.scheduler.spacing import Spacing
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline, Sample, padded_tokens

Batch = Sequence[Microbatch]  # one global batch of a group, its emptiest last


def merge(
    batches: Sequence[Batch], limits: Limits, pipeline: Pipeline
) -> tuple[Microbatch, ...]:
    """Algorithm 1 of LoRAFusion, lines 12 to 14: one pass from left to right.

    Moves the longest samples that fit, from the emptiest microbatch of the next batch
    first; one that is emptied is dropped. A sample stays where it is if moving it would
    mix two global batches of its job or bring them closer than the distance D, and a
    microbatch stays if dropping it would call for a no-op further on.

    Args:
        batches: Of all groups, in the order in which they run.
        limits: Capacity and block size.
        pipeline: Says how far apart a job's batches must be.
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
    return tuple(tuple(sorted(m, key=lambda s: (s.job, s.index))) for m in out)


def _that_fit(
    held: Sequence[Sample],
    candidates: Sequence[Sample],
    limits: Limits,
    spacing: Spacing,
) -> list[Sample]:
    """Samples that may join `held`, the microbatch placed last; the longest first."""
    taken: list[Sample] = []
    for sample in sorted(candidates, key=lambda s: (-s.num_tokens, s.job, s.index)):
        if spacing.earliest(sample) > spacing.position:
            continue
        if padded_tokens([*held, *taken, sample], limits) <= limits.capacity:
            taken.append(sample)
    return taken


def _may_drop(
    rest: Sequence[Sequence[Sample]], later: Sequence[Microbatch], spacing: Spacing
) -> bool:
    """Whether the last of `rest` can join the microbatch before without a new no-op."""
    dropped, kept = spacing.copy(), spacing.copy()
    dropped.join(rest[-1])
    for microbatch in rest[:-1]:
        dropped.place(microbatch)
        kept.place(microbatch)
    kept.place(rest[-1])
    for microbatch in later:
        dropped.place(microbatch)
        kept.place(microbatch)
        if dropped.position == kept.position:  # a no-op took the place
            return False
    return True
