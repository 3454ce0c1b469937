"""Random jobs with samples of different lengths, for the training benchmarks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxlora.data.pack import JobBatch, pack_microbatch
from jaxlora.models.packed_batch import PackedBatch
from jaxlora.objectives.sample import TokenizedSample
from jaxlora.scheduler import Limits

TARGET_SHARE = 0.3  # share of a sample's tokens that are targets: the last ones
SIGMA = 0.6  # standard deviation of the logarithm of log-normal lengths


def fill(total: int, longest: int, draw: Callable[[], float]) -> list[int]:
    """Draws lengths of at most `longest` that add up to `total`; the last is cut."""
    out: list[int] = []
    while (left := total - sum(out)) > 0:
        length = int(np.clip(draw(), 2, min(longest, left)))
        if left - length == 1:  # a sample of one token would have no target
            length = length - 1 if length > 2 else left
        out.append(length)
    return out


def job_batch(
    slot: int, lengths: list[int], vocab_size: int, rng: np.random.Generator
) -> JobBatch:
    """Makes a global batch of random tokens, with targets at the end of each sample."""
    samples = []
    for length in lengths:
        num_targets = max(1, round(TARGET_SHARE * length))
        samples.append(
            TokenizedSample(
                token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
                is_target=np.arange(length) >= length - num_targets,
            )
        )
    num_targets = sum(int(s.is_target.sum()) for s in samples)
    return JobBatch(slot=slot, step=0, samples=tuple(samples), weight=1 / num_targets)


class Microbatch(NamedTuple):
    """One microbatch, for this library and for others."""

    packed: PackedBatch
    samples: tuple[TokenizedSample, ...]  # the same ones, without padding

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(len(s.token_ids) for s in self.samples)


def shared_batches(
    totals: Sequence[int],
    lengths: Callable[[int, int, np.random.Generator], list[int]],
    vocab_size: int,
    seed: int,
) -> dict[int, JobBatch]:
    """Makes a global batch of each job, by slot; those without tokens are left out.

    Args:
        totals: Tokens of each job, in the order of slots.
        lengths: Returns lengths that add up to a job's total, given its slot and total.
        vocab_size: Number of tokens of the vocabulary.
        seed: Makes lengths and tokens.
    """
    rng = np.random.default_rng(seed)
    return {
        slot: job_batch(slot, lengths(slot, total, rng), vocab_size, rng)
        for slot, total in enumerate(totals)
        if total
    }


def equal_shares(num_tokens: int, num_jobs: int, block_tokens: int) -> list[int]:
    """Divides the whole blocks of tokens among jobs; returns the tokens of each."""
    blocks = np.arange(num_tokens // block_tokens)
    return [len(part) * block_tokens for part in np.array_split(blocks, num_jobs)]


def full_microbatch(
    num_jobs: int,
    limits: Limits,
    vocab_size: int,
    *,
    median: int,
    longest: int,
    seed: int,
) -> Microbatch:
    """Makes a microbatch that jobs share equally, without padding.

    The lengths of samples are log-normal.
    """

    def lengths(slot: int, total: int, rng: np.random.Generator) -> list[int]:
        return fill(total, longest, lambda: rng.lognormal(np.log(median), SIGMA))

    totals = equal_shares(limits.capacity, num_jobs, limits.block_tokens)
    batches = shared_batches(totals, lengths, vocab_size, seed)
    scheduled = tuple(s for batch in batches.values() for s in batch.to_schedule())
    return Microbatch(
        packed=pack_microbatch(scheduled, batches, limits),
        samples=tuple(s for batch in batches.values() for s in batch.samples),
    )
