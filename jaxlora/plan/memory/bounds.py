"""Bounds of the capacity of microbatches, by the samples of a run."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import get_args

from jaxlora.common.note import Note
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokens.tokenized_data import TokenizedData
from jaxlora.models.options import Remat
from jaxlora.objectives.table import find_objective
from jaxlora.pallas_kernels.device import platform
from jaxlora.plan.stages import MeshFootprint

# A larger capacity is no faster.
_MAX_TOKENS = 32768
_MAX_TOKENS_OF_CPU = 4096
_MAX_UNIT = 1024
_LOW_FILL = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a run's capacity, known before its memory is.

    Attributes:
        smallest: Capacity for the longest sample that the jobs may have.
        largest: Capacity with which the microbatches in flight hold one mean step of
            every job that runs at once, and for any sample. More is of no use, as they
            never hold two steps of a job. It is at most 32,768, or 4,096 on a CPU,
            unless a sample is longer.
        unit: An automatic capacity is a multiple of this.
        fixed: Capacity that was asked for, or that the run began with; None: `auto`.
        remats: Choices of an automatic `remat`, from the weakest on; empty if it is
            fixed.
        sample_tokens: Mean length of the samples.
        step_tokens: Tokens of a step of all jobs that run at once, for each device of a
            stage; or of those that may share a microbatch.
        most_jobs: Most jobs that may share a microbatch, if this limits `step_tokens`;
            else None.
    """

    smallest: int
    largest: int
    unit: int
    fixed: int | None = None
    remats: tuple[Remat, ...] = ()
    sample_tokens: float = 0.0
    step_tokens: float = math.inf
    most_jobs: int | None = None

    @staticmethod
    def of(
        config: RunConfig,
        jobs: Sequence[LoraJob],
        train: Sequence[TokenizedData],
        held_out: Sequence[TokenizedData] = (),
        *,
        most_jobs: int | None = None,
    ) -> "Bounds":
        """Computes the bounds of a run.

        Args:
            config: The run; its mesh is not `auto`.
            jobs: Those of its jobs that microbatches have to hold.
            train: Training samples of each of these jobs.
            held_out: Held-out samples of those that have any.
            most_jobs: Most jobs that may share a microbatch; None: any number.
        """
        block = config.block_tokens
        num_slots = config.max_concurrent_jobs or len(config.jobs)
        longest = max(data.longest_group for data in (*train, *held_out))
        steps = [
            data.mean_batch_tokens(job.batch_size) + block / 2
            for job, data in zip(jobs, train, strict=True)
        ]
        sizes = config.mesh_sizes
        in_flight = num_lanes = len(config.replica_shapes) or sizes.num_lanes
        if sizes.stage > 1:
            in_flight *= config.pipeline_microbatches or sizes.stage
        running = sorted(steps, reverse=True)[:num_slots]
        step_tokens, sharing = sum(running) / num_lanes, sum(running[:most_jobs])
        at_once = min(sum(running) / in_flight, sharing)
        is_cpu = platform() == "cpu"
        useful = _MAX_TOKENS_OF_CPU if is_cpu else _MAX_TOKENS
        most = max(min(useful, at_once), longest)
        unit = block
        while 2 * unit <= min(_MAX_UNIT, most / 8):
            unit *= 2
        largest = _round_up(most, unit)
        allowed = max(
            job.max_length * find_objective(job.objective).group_size for job in jobs
        )
        smallest = _round_up(min(allowed, largest), unit)
        asked = config.microbatch_tokens
        num_groups = sum(len(data.group_lengths) for data in train)
        return Bounds(
            smallest=smallest,
            largest=largest,
            unit=unit,
            fixed=None if asked == "auto" else asked,
            remats=get_args(Remat) if config.remat == "auto" else (),
            sample_tokens=sum(data.num_tokens for data in train) / num_groups,
            step_tokens=min(step_tokens, sharing),
            most_jobs=most_jobs if sharing < step_tokens else None,
        )

    @property
    def max_tokens(self) -> int:
        """Upper bound on the capacity."""
        return self.largest if self.fixed is None else self.fixed

    def stronger_than(self, remat: Remat) -> tuple[Remat, ...]:
        """Returns the choices of an automatic `remat` that recompute more."""
        return self.remats[self.remats.index(remat) + 1 :] if self.remats else ()

    def choose(self, fitting_tokens: int, below: int | None = None) -> int | None:
        """Returns the largest capacity that fits; None if none does.

        Args:
            fitting_tokens: Tokens of the largest microbatches that fit into memory.
            below: Exclusive upper bound on the capacity.
        """
        fitting = fitting_tokens // self.unit * self.unit
        most = self.largest if below is None else below - self.unit
        return min(fitting, most) if min(fitting, most) >= self.smallest else None


def _round_up(num_tokens: float, unit: int) -> int:
    return math.ceil(num_tokens / unit) * unit


def low_fill(config: RunConfig, bounds: Bounds) -> tuple[Note, ...]:
    """Warns if less than half of a microbatch can be filled, and names the cure.

    A microbatch never holds two steps of a job, so one that is larger than a step of
    all jobs that run at once stays partly empty.

    Args:
        config: The run, with a number for `microbatch_tokens`.
        bounds: Bounds of its capacity.
    """
    capacity = config.limits.capacity
    step_tokens = bounds.step_tokens
    if step_tokens >= _LOW_FILL * capacity:
        return ()
    num_lanes = len(config.replica_shapes) or config.mesh_sizes.num_lanes
    lanes = f" for each of {num_lanes} that run at once" if num_lanes > 1 else ""
    whose, more_jobs = "all jobs that run at once", "train more jobs at once"
    if bounds.most_jobs is not None:
        whose, lanes = f"the jobs that may share it, {bounds.most_jobs} at most,", ""
        more_jobs = "raise adapters_per_microbatch"
    if capacity > bounds.largest:
        cure = f"Set microbatch_tokens to auto, which takes at most {bounds.largest:,}"
    else:
        cure = (
            "The longest sample needs such a microbatch. Raise batch_size, "
            f"{more_jobs}, lower max_length, or set microbatch_shapes"
        )
    text = (
        f"low fill: at most {100 * step_tokens / capacity:.0f}% of a microbatch of "
        f"{capacity:,} tokens can be filled, as a step of {whose} "
        f"has about {step_tokens:,.0f} tokens{lanes}. {cure}."
    )
    return (Note(text, is_warning=True),)


def largest_fitting(
    bounds: Bounds, estimate: Callable[[int | None], MeshFootprint], num_bytes: int
) -> int | None:
    """Returns the largest capacity that is estimated to fit; None if none does.

    Memory does not grow evenly with the capacity, so one may fit although a smaller one
    does not. All that a lower bound allows are tried, from the largest on.

    Args:
        bounds: Bounds of the capacity.
        estimate: Returns the memory of the run at a capacity, or for None a lower bound
            for every capacity.
        num_bytes: Bytes of available memory.
    """
    most = bounds.choose(estimate(None).fitting_tokens(num_bytes))
    if most is None:
        return None
    tried = range(most, bounds.smallest - 1, -bounds.unit)
    return next((t for t in tried if estimate(t).total_bytes(t) <= num_bytes), None)
