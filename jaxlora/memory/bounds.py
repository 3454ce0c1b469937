"""Bounds of the capacity of microbatches, by the samples of a run."""

import dataclasses
import math
from collections.abc import Sequence

from jaxlora.config import RunConfig
from jaxlora.data.tokenize import TokenizedData

_MAX_TOKENS = 32768  # a larger capacity is no faster
_MAX_UNIT = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a run's capacity, known before its memory is.

    Attributes:
        smallest: Capacity for the longest sample that the jobs may have.
        largest: Capacity with which the microbatches in flight hold one mean step of
            every job that runs at once, and for any sample. More is of no use, as they
            never hold two steps of a job.
        unit: An automatic capacity is a multiple of this.
        fixed: Capacity that was asked for, or that the run began with; None: `auto`.
    """

    smallest: int
    largest: int
    unit: int
    fixed: int | None = None

    @staticmethod
    def of(
        config: RunConfig,
        train: Sequence[TokenizedData],
        held_out: Sequence[TokenizedData] = (),
        *,
        begun_with: int | None = None,
    ) -> "Bounds":
        """Computes the bounds of a run.

        Args:
            config: The run; its mesh is not `auto`.
            train: Training samples of each job.
            held_out: Held-out samples of the jobs that have any.
            begun_with: Capacity that `auto` chose when the run began, if it has.
        """
        block = config.block_tokens
        num_slots = config.max_concurrent_jobs or len(config.jobs)
        longest = max(int(data.lengths.max()) for data in (*train, *held_out))
        steps = [
            data.mean_batch_tokens(job.batch_size) + block / 2
            for job, data in zip(config.jobs, train, strict=True)
        ]
        sizes = config.mesh_sizes
        in_flight = sizes.devices_per_stage
        if sizes.stage > 1:
            in_flight *= config.pipeline_microbatches or sizes.stage
        at_once = sum(sorted(steps, reverse=True)[:num_slots]) / in_flight
        most = max(min(_MAX_TOKENS, at_once), longest)
        unit = block
        while 2 * unit <= min(_MAX_UNIT, most / 8):
            unit *= 2
        largest = _round_up(most, unit)
        allowed = max(job.max_length for job in config.jobs)
        smallest = _round_up(min(allowed, largest), unit)
        asked = config.microbatch_tokens
        fixed = begun_with if asked == "auto" else asked
        return Bounds(smallest=smallest, largest=largest, unit=unit, fixed=fixed)

    @property
    def max_tokens(self) -> int:
        """Upper bound on the capacity."""
        return self.largest if self.fixed is None else self.fixed

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
