"""Random jobs of ragged samples for the training benchmarks."""

import dataclasses

import numpy as np

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.data.tokenize import TokenizedSample
from jaxlora.scheduler import Limits

TARGET_SHARE = 0.3  # of a sample's tokens, its last, which are trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths of samples, in tokens.

    Attributes:
        median: Half of them are shorter.
        sigma: Standard deviation of their logarithm.
        longest: They are cut to this.
    """

    median: int = 600
    sigma: float = 0.6
    longest: int = 2048

    def fill(self, total: int, rng: np.random.Generator) -> list[int]:
        """Lengths that add up to `total`; the last one is cut to fit."""
        out: list[int] = []
        while (left := total - sum(out)) > 0:
            drawn = rng.lognormal(np.log(self.median), self.sigma)
            length = int(np.clip(drawn, 2, min(self.longest, left)))
            # A rest of one token has nothing to predict: it joins the last sample.
            out.append(left if left - length < 2 else length)
        return out


def job_batch(
    slot: int, lengths: list[int], vocab_size: int, rng: np.random.Generator
) -> JobBatch:
    """A global batch of random tokens, with the loss on the end of each sample."""
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
        packed: As arrays.
        samples: The same samples.
    """

    packed: PackedBatch
    samples: tuple[TokenizedSample, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(len(s.token_ids) for s in self.samples)


def full_microbatch(
    num_jobs: int, limits: Limits, lengths: Lengths, vocab_size: int, *, seed: int
) -> Microbatch:
    """A microbatch that jobs share equally, with no padding."""
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
