"""What is scheduled: samples of known length, in microbatches of a fixed capacity."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sample, as far as scheduling cares.

    Attributes:
        job: Which job it belongs to.
        batch: Number of the job's global batch: its optimiser step.
        index: Position in that global batch.
        num_tokens: Its length.
    """

    job: int
    batch: int
    index: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a microbatch may hold.

    Attributes:
        capacity: Most tokens of a microbatch, padding included (C).
        block_tokens: Each job's tokens are padded to whole blocks of so many (P).
    """

    capacity: int
    block_tokens: int

    def __post_init__(self):
        if self.block_tokens < 1 or self.capacity < 1:
            raise ValueError(
                f"capacity and block_tokens must be positive, got {self.capacity} and "
                f"{self.block_tokens}."
            )
        if self.capacity % self.block_tokens:
            raise ValueError(
                f"capacity {self.capacity} is not a multiple of block_tokens "
                f"{self.block_tokens}."
            )

    def padded(self, num_tokens: int) -> int:
        """`num_tokens` of one job, padded to whole blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens


Microbatch = tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Microbatches in the order in which they run.

    Attributes:
        microbatches: Each a tuple of samples, a job's samples side by side.
        limits: The limits they keep.
    """

    microbatches: tuple[Microbatch, ...]
    limits: Limits

    @property
    def fill(self) -> float:
        """Share of the microbatches' capacity that real tokens take."""
        real = sum(s.num_tokens for m in self.microbatches for s in m)
        return real / max(1, len(self.microbatches) * self.limits.capacity)


def tokens_by_job(samples: Iterable[Sample]) -> dict[int, int]:
    """Tokens of each job, without padding."""
    out: dict[int, int] = {}
    for sample in samples:
        out[sample.job] = out.get(sample.job, 0) + sample.num_tokens
    return out


def padded_tokens(microbatch: Iterable[Sample], limits: Limits) -> int:
    """Tokens that a microbatch takes, each job's part padded to whole blocks."""
    return sum(limits.padded(n) for n in tokens_by_job(microbatch).values())
