"""Types of the scheduler: samples, limits, pipelines and schedules."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

# How running jobs share microbatches: `together` lets all end at the same time, and
# `equal` gives the same number of tokens to each.
Pace = Literal["together", "equal"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sample. The scheduler only needs its length.

    Attributes:
        owner: Whose sample it is: the number of a job, or of the slot of a job.
        batch: Number of the job's global batch, which is also its optimizer step.
        index: Position of the sample in the global batch.
        num_tokens: Length of the sample in tokens.
    """

    owner: int
    batch: int
    index: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Size limits of a microbatch.

    Attributes:
        capacity: Maximum number of tokens in a microbatch, including padding (C).
        block_tokens: Tokens per block (P). The tokens of each job in a microbatch are
            padded to a whole number of blocks.
        max_samples: Maximum number of samples in a microbatch, which `joint` keeps;
            None: any number.
        max_jobs: Maximum number of jobs in a microbatch, which `joint` and first-fit
            decreasing keep; None: any number.
    """

    capacity: int
    block_tokens: int
    max_samples: int | None = None
    max_jobs: int | None = None

    def __post_init__(self):
        for name in ("max_samples", "max_jobs"):
            if (most := getattr(self, name)) is not None and most < 1:
                raise ValueError(f"{name}={most} must be positive.")
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

    @property
    def most_samples(self) -> float:
        """Maximum number of samples in a microbatch, which may be infinity."""
        return math.inf if self.max_samples is None else self.max_samples

    @property
    def most_jobs(self) -> float:
        """Maximum number of jobs in a microbatch, which may be infinity."""
        return math.inf if self.max_jobs is None else self.max_jobs

    def padded(self, num_tokens: int) -> int:
        """Rounds the tokens of one job up to a whole number of blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The pipeline that a schedule is made for.

    Attributes:
        num_stages: Number of pipeline stages (S); 1 without a pipeline.
        distance: Minimum distance D, in ticks, from the last tick of a global batch to
            the first tick of the same job's next batch. It gives every stage time for
            the optimizer step between the two batches. With a distance of 1, the next
            batch may start in the next tick. With one lane, a tick is a microbatch.
        in_flight: Largest number of ticks in flight on stage 0 (W0), whose forward pass
            has started and whose backward pass has not ended. It is at least S; None
            means S. More of them need memory and a distance of W0. From W0 = 2 S - 1
            on, transfers and unequal ticks hardly delay the pipeline.
    """

    num_stages: int = 1
    distance: int = 1
    in_flight: int | None = None

    def __post_init__(self):
        if self.num_stages < 1 or self.distance < 1:
            raise ValueError(
                f"num_stages and distance must be positive, got {self.num_stages} and "
                f"{self.distance}."
            )
        if self.in_flight is not None and self.in_flight < self.num_stages:
            raise ValueError(
                f"in_flight={self.in_flight} is less than the {self.num_stages} stages "
                "of the pipeline. It must be at least the number of stages, or some of "
                "them would always wait."
            )

    @classmethod
    def one_f_one_b(cls, num_stages: int, in_flight: int | None = None) -> "Pipeline":
        """Returns the pipeline of a 1F1B schedule, whose distance is W0, by default S.

        If tick k is the last one of a batch, stage 0 takes the optimizer step after the
        forward pass of tick k + W0 - 1. LoRAFusion (section 5.2, with W0 = S) lets the
        next batch enter at that tick, but its forward pass would then read the old
        weights.
        """
        return cls(
            num_stages=num_stages, distance=in_flight or num_stages, in_flight=in_flight
        )

    def warm_up(self, stage: int) -> int:
        """Returns the number of forward passes of a stage before 1F1B order begins.

        From then on, the stage alternates between a forward and a backward pass. The
        numbers fall from W0 - 1 on stage 0 to 0 on the last stage, as evenly as
        possible. With W0 = S they fall by one from stage to stage, which is the least.
        A transfer between two stages is hidden if they fall by two. This would not be
        so if all stages had the same number of further ticks in flight.
        """
        first = (self.in_flight or self.num_stages) - 1
        if stage == 0:
            return first
        return -(-first * (self.num_stages - 1 - stage) // (self.num_stages - 1))

    def step_delay(self, stage: int) -> int:
        """Returns how many ticks later than stage 0 a stage takes an optimizer step.

        If tick k completes a batch, stage s takes the step after its backward pass of
        tick k + step_delay(s). Stage 0 has then finished tick k, so the gradient norm
        over all stages is known, and the next forward pass of stage s is that of tick
        k + W0, the first that may belong to the job's next batch.
        """
        return self.warm_up(0) - self.warm_up(stage)


Microbatch = tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Microbatches in the order in which they run.

    Attributes:
        microbatches: The samples of each microbatch; samples of the same job are
            adjacent. An empty microbatch is a no-op, which keeps two batches of a job
            apart.
        limits: Size limits of the microbatches.
    """

    microbatches: tuple[Microbatch, ...]
    limits: Limits

    @property
    def fill(self) -> float:
        """Fraction of the total capacity that holds real tokens, not padding."""
        real = sum(s.num_tokens for m in self.microbatches for s in m)
        return real / max(1, len(self.microbatches) * self.limits.capacity)

    @property
    def keeps_numbers(self) -> bool:
        """Whether no microbatch has more samples or jobs than `limits` say."""
        limits = self.limits
        return all(
            len(m) <= limits.most_samples
            and len({s.owner for s in m}) <= limits.most_jobs
            for m in self.microbatches
        )


def in_order(samples: Iterable[Sample]) -> Microbatch:
    """Returns a microbatch of samples, in which those of a job are adjacent."""
    return tuple(sorted(samples, key=lambda s: (s.owner, s.index)))


def tokens_by_job(samples: Iterable[Sample]) -> dict[int, int]:
    """Counts the tokens of each job, without padding."""
    out: dict[int, int] = {}
    for sample in samples:
        out[sample.owner] = out.get(sample.owner, 0) + sample.num_tokens
    return out


def padded_tokens(microbatch: Iterable[Sample], limits: Limits) -> int:
    """Counts the tokens of a microbatch, with each job padded to whole blocks."""
    return sum(limits.padded(n) for n in tokens_by_job(microbatch).values())


def batches_by_job(samples: Iterable[Sample]) -> dict[int, list[list[Sample]]]:
    """Groups samples by job and global batch.

    The batches of a job are in ascending order. Jobs, and the samples of a batch, stay
    in the order in which they are given.
    """
    jobs: dict[int, dict[int, list[Sample]]] = {}
    for sample in samples:
        jobs.setdefault(sample.owner, {}).setdefault(sample.batch, []).append(sample)
    return {
        job: [batches[number] for number in sorted(batches)]
        for job, batches in jobs.items()
    }


def check_fits(samples: Iterable[Sample], limits: Limits) -> None:
    """Raises ValueError if a sample is longer than a microbatch's capacity."""
    for sample in samples:
        if limits.padded(sample.num_tokens) > limits.capacity:
            raise ValueError(
                f"a sample of job {sample.owner} has {sample.num_tokens} tokens, over "
                f"the capacity of {limits.capacity} tokens of a microbatch. Raise the "
                "capacity or shorten the sample."
            )
