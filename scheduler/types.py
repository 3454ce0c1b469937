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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The executor that a schedule is for.

    Attributes:
        num_stages: Pipeline stages (S); 1 without a pipeline.
        distance: Fewest microbatches from the last one of a job's batch to the first
            one of its next batch (D), so that every stage has taken the optimiser step
            in between. 1: the very next microbatch may follow.
    """

    num_stages: int = 1
    distance: int = 1

    def __post_init__(self):
        if self.num_stages < 1 or self.distance < 1:
            raise ValueError(
                f"num_stages and distance must be positive, got {self.num_stages} and "
                f"{self.distance}."
            )

    @classmethod
    def one_f_one_b(cls, num_stages: int) -> "Pipeline":
        """One forward, one backward: stage 0 steps when microbatch k + S - 1 enters.

        LoRAFusion (section 5.2) lets the next batch enter there; that forward would
        start before the step, so the distance is S.
        """
        return cls(num_stages=num_stages, distance=num_stages)

    @classmethod
    def fused_tick(cls, num_stages: int) -> "Pipeline":
        """All stages in step, each tick one forward and one backward."""
        return cls(num_stages=num_stages, distance=2 * num_stages - 1)


Microbatch = tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Microbatches in the order in which they run.

    Attributes:
        microbatches: Each a tuple of samples, a job's samples side by side; an empty
            one is a no-op, which only keeps batches apart.
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


def batches_by_job(samples: Iterable[Sample]) -> dict[int, list[list[Sample]]]:
    """Global batches of each job in order; jobs and samples as they come."""
    jobs: dict[int, dict[int, list[Sample]]] = {}
    for sample in samples:
        jobs.setdefault(sample.job, {}).setdefault(sample.batch, []).append(sample)
    return {job: [of[number] for number in sorted(of)] for job, of in jobs.items()}


def check_fits(samples: Iterable[Sample], limits: Limits) -> None:
    """Raises ValueError if a sample is longer than a microbatch's capacity."""
    for sample in samples:
        if limits.padded(sample.num_tokens) > limits.capacity:
            raise ValueError(
                f"a sample of job {sample.job} has {sample.num_tokens} tokens, over "
                f"the capacity of {limits.capacity} tokens of a microbatch. Raise the "
                "capacity, or shorten the sample."
            )
