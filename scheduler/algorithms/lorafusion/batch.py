"""Packs one global batch of a group, by first-fit decreasing and by two programs."""

import dataclasses
import enum
import math
from collections.abc import Sequence

from jaxlora.scheduler.algorithms import greedy
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Sample,
    padded_tokens,
    tokens_by_job,
)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options for packing batches, which are sent to worker processes.

    Attributes:
        limits: Capacity and block size.
        time_limit: Time limit of each of the two stages of a batch, in seconds.
        seed: Seed of the solver.
        use_milp: Whether to use the solver, and not only first-fit decreasing.
    """

    limits: Limits
    time_limit: float
    seed: int
    use_milp: bool


def pack_batch(samples: Sequence[Sample], settings: Settings) -> BatchSchedule:
    """Packs a batch by Algorithm 1 of LoRAFusion, lines 2 to 10.

    Args:
        samples: At most one global batch of each job.
        settings: Limits and solver settings.
    """
    limits = settings.limits
    baseline = _ordered(greedy.pack(samples, limits).microbatches, limits)
    if not settings.use_milp or _cannot_be_beaten(baseline, samples, limits):
        return BatchSchedule(microbatches=baseline, outcome=Outcome.GREEDY)
    try:
        return _two_stages(samples, baseline, settings)
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
    samples: Sequence[Sample], baseline: tuple[Microbatch, ...], settings: Settings
) -> BatchSchedule:
    from jaxlora.scheduler.algorithms.lorafusion import (
        milp,  # PuLP takes a second to import
    )

    limits, best, proved = settings.limits, baseline, True
    ordered = sorted(samples, key=lambda s: (s.owner, s.batch, s.index))
    options = {"time_limit": settings.time_limit, "seed": settings.seed}
    if len(baseline) > _fewest(samples, limits):
        first = milp.fewest_bins(ordered, limits, baseline, **options)
        best = _better(best, first.bins, limits)
        proved = first.proved
    second = milp.emptiest_bin(
        ordered,
        limits,
        best,
        at_least=_least(samples, limits, len(best)),
        **options,
    )
    best = _better(best, second.bins, limits)
    if best is baseline:
        return BatchSchedule(microbatches=baseline, outcome=Outcome.GREEDY)
    both = proved and second.proved
    return BatchSchedule(
        microbatches=best, outcome=Outcome.OPTIMAL if both else Outcome.FEASIBLE
    )


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
    sides = [tuple(sorted(m, key=lambda s: (s.owner, s.index))) for m in microbatches]
    key = lambda m: (-padded_tokens(m, limits), m[0].owner, m[0].index)
    return tuple(sorted(sides, key=key))


def _cannot_be_beaten(
    packed: tuple[Microbatch, ...], samples: Sequence[Sample], limits: Limits
) -> bool:
    if len(packed) > _fewest(samples, limits):
        return False
    smallest = padded_tokens(packed[-1], limits) // limits.block_tokens
    return smallest <= _least(samples, limits, len(packed))


def _blocks(samples: Sequence[Sample], limits: Limits) -> int:
    tokens = tokens_by_job(samples).values()
    return sum(limits.padded(n) // limits.block_tokens for n in tokens)


def _fewest(samples: Sequence[Sample], limits: Limits) -> int:
    """Lower bound on the number of microbatches."""
    capacity = limits.capacity // limits.block_tokens
    alone = sum(2 * s.num_tokens > limits.capacity for s in samples)
    return max(math.ceil(_blocks(samples, limits) / capacity), alone)


def _least(samples: Sequence[Sample], limits: Limits, num_bins: int) -> int:
    """Lower bound on the blocks of the smallest of `num_bins` microbatches."""
    capacity = limits.capacity // limits.block_tokens
    shortest = min(limits.padded(s.num_tokens) for s in samples) // limits.block_tokens
    return max(shortest, _blocks(samples, limits) - (num_bins - 1) * capacity)
