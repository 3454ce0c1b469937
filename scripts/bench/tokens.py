"""Random jobs with samples of different lengths, for the training benchmarks."""

import dataclasses

import numpy as np

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.data.tokenize import TokenizedSample
from jaxlora.scheduler import Limits

TARGET_SHARE = 0.3  # share of a sample's tokens that are targets: the last ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths of samples, in tokens.

    Attributes:
        median: Median length.
        sigma: Standard deviation of the logarithm.
        longest: Longer samples are cut to this length.
    """

    median: int = 600
    sigma: float = 0.6
    longest: int = 2048

    def fill(self, total: int, rng: np.random.Generator) -> list[int]:
        """Draws lengths that add up to `total`; the last one is cut to fit."""
        out: list[int] = []
        while (left := total - sum(out)) > 0:
            drawn = rng.lognormal(np.log(self.median), self.sigma)
            length = int(np.clip(drawn, 2, min(self.longest, left)))
            # A sample of one token has no target, so such a rest joins this sample.
            out.append(left if left - length < 2 else length)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch, for this library and for others.

    Attributes:
        packed: The samples as packed arrays.
        samples: The samples one by one.
    """

    packed: PackedBatch
    samples: tuple[TokenizedSample, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(len(s.token_ids) for s in self.samples)


def full_microbatch(
    num_jobs: int, limits: Limits, lengths: Lengths, vocab_size: int, *, seed: int
) -> Microbatch:
    """Makes a microbatch that jobs share equally, without padding."""
    rng = np.random.default_rng(seed)
    blocks = np.array_split(np.arange(limits.capacity // limits.block_tokens), num_jobs)
    shares = [len(part) * limits.block_tokens for part in blocks]
    batches = {
        slot: job_batch(slot, lengths.fill(share, rng), vocab_size, rng)
        for slot, share in enumerate(shares)
        if share
    }
    scheduled = tuple(s for batch in batches.values() for s in batch.to_schedule())
    return Microbatch(
        packed=pack_microbatch(scheduled, batches, limits),
        samples=tuple(s for batch in batches.values() for s in batch.samples),
    )
