"""Settings with which a run might run: a mesh, a `remat` and a capacity."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from jaxlora.config import RunConfig
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.job_slots import (
    JobPosition,
    assign_slots,
    next_samples,
    pack_whole,
)
from jaxlora.plan.lanes import run_lanes
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.memory.options import estimated_room, largest_fitting
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import window_seconds
from jaxlora.plan.stages import MeshFootprint, MeshStages, estimated_footprint
from jaxlora.scheduler import Lanes, Limits, Sample, Schedule

# Capacities that are compared, as shares of the largest one that fits. A smaller one
# may fill its microbatches better, and a pipeline fills and drains faster with it.
_SHARES = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)
_GAIN = 1.01  # a smaller capacity is taken only if it is this much faster
_MOST_SAMPLES = 4096  # of a window that is packed for each of them; 40 ms


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """The work of a run.

    Attributes:
        positions: Jobs of the run, at its start.
        lengths: Given the number of a job and a step, returns the tokens of each sample
            of that global batch.
        bounds: Given a run with a mesh, returns the bounds of its capacity.
    """

    positions: Sequence[JobPosition]
    lengths: Callable[[int, int], Sequence[int]]
    bounds: Callable[[RunConfig], Bounds]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Settings with which the run might run.

    Attributes:
        config: The run, with a mesh, a `remat` and a number for `microbatch_tokens`.
        stages: Its stages.
        lanes: Its lanes.
        bounds: Bounds of its capacity.
    """

    config: RunConfig
    stages: MeshStages
    lanes: Lanes
    bounds: Bounds

    @property
    def tokens(self) -> int:
        """Capacity of its microbatches."""
        return self.config.limits.capacity

    @functools.cached_property
    def found(self) -> MeshFootprint:
        """Its estimated memory."""
        return estimated_footprint(self.stages, self.config.block_tokens, self.tokens)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device of the tightest stage needs."""
        return self.found.total_bytes(self.tokens)

    def fits(self, available: DeviceMemory | None, *, with_room: bool = True) -> bool:
        """Whether the devices are estimated to have the memory.

        Args:
            available: Memory of each device; None: it is not known.
            with_room: Whether room for the error of the estimate must be left.
        """
        if available is None:
            return True
        room = estimated_room(available, self.stages.sizes)
        return self.needed_bytes <= (room if with_room else available.num_bytes)


class Candidates:
    """Makes candidates for one run on one machine, and predicts their time."""

    def __init__(
        self, demand: Demand, machine: Machine, available: DeviceMemory | None
    ):
        """Predicts nothing yet.

        Args:
            demand: The work of the run.
            machine: The machine.
            available: Memory of each device; None: it is not known, and is not checked.
        """
        self._demand, self._machine, self._available = demand, machine, available
        # The schedule depends on neither the model nor `remat`.
        self._packed: dict[tuple[Lanes, Limits], Schedule] = {}

    def largest(self, config: RunConfig, spec: DecoderSpec) -> Candidate:
        """Returns the candidate with the largest capacity that is estimated to fit.

        If none fits, it has the smallest capacity; a capacity that the run gives stays.

        Args:
            config: The run, with a mesh.
            spec: The whole decoder, with the run's `remat`.
        """
        config = config.replace(remat=spec.options.remat)
        bounds, memory = self._demand.bounds(config), self._available
        found = self._candidate(config, spec, bounds, bounds.max_tokens)
        if bounds.fixed is not None or memory is None:
            return found
        estimate = functools.partial(
            estimated_footprint, found.stages, config.block_tokens
        )
        room = estimated_room(memory, config.mesh_sizes)
        tokens = largest_fitting(bounds, estimate, room) or bounds.smallest
        return self._candidate(config, spec, bounds, tokens)

    def unlimited(self, config: RunConfig, spec: DecoderSpec) -> Candidate:
        """Returns the candidate with the largest capacity, whether or not it fits.

        Args:
            config: The run, with a mesh.
            spec: The whole decoder, with the run's `remat`.
        """
        config = config.replace(remat=spec.options.remat)
        bounds = self._demand.bounds(config)
        return self._candidate(config, spec, bounds, bounds.max_tokens)

    def at(self, config: RunConfig, spec: DecoderSpec, bounds: Bounds) -> Candidate:
        """Returns the candidate with the settings of a run.

        Args:
            config: The run; none of its settings is `auto`.
            spec: The whole decoder, with the run's `remat`.
            bounds: Bounds of its capacity.
        """
        return self._candidate(config, spec, bounds, config.limits.capacity)

    def fastest(self, largest: Candidate) -> tuple[Candidate, float]:
        """Returns the candidate with the fastest capacity that fits.

        Args:
            largest: The candidate with the largest one.

        Returns:
            The candidate, and its predicted time per token.
        """
        if not self._demand.positions:  # nothing is left to do
            return largest, 0.0
        whole = self.seconds_per_token(largest)
        ranked = []
        for other in self._smaller(largest):
            seconds = self.seconds_per_token(other)
            if _GAIN * seconds < whole:
                ranked.append((seconds, other))
        # Another compilation of attention for each, so not before the times are known.
        for seconds, other in sorted(ranked, key=lambda pair: pair[0]):
            if other.fits(self._available):
                return other, seconds
        return largest, whole

    def _smaller(self, largest: Candidate) -> Iterator[Candidate]:
        bounds, config, spec = largest.bounds, largest.config, largest.stages.spec
        if bounds.fixed is not None:
            return
        tried = (int(share * largest.tokens) // bounds.unit for share in _SHARES)
        for tokens in sorted({units * bounds.unit for units in tried}):
            if bounds.smallest <= tokens < largest.tokens:
                yield self._candidate(config, spec, bounds, tokens)

    def _candidate(
        self, config: RunConfig, spec: DecoderSpec, bounds: Bounds, tokens: int
    ) -> Candidate:
        config = config.replace(microbatch_tokens=tokens)
        stages = MeshStages.of(config, spec, speed=self._machine.speed)
        lanes = run_lanes(config)
        return Candidate(config=config, stages=stages, lanes=lanes, bounds=bounds)

    def seconds_per_token(self, candidate: Candidate) -> float:
        """Predicts the time per token in the first window of the run."""
        schedule = self._schedule(candidate)
        stages, lanes = candidate.stages, candidate.lanes
        rates = self._machine.rates(stages.spec, candidate.config.network_gbits)
        seconds = window_seconds(stages, lanes, schedule, rates)
        tokens = sum(s.num_tokens for m in schedule.microbatches for s in m)
        return seconds / tokens

    def _schedule(self, candidate: Candidate) -> Schedule:
        config, lanes = candidate.config, candidate.lanes
        key = lanes, config.limits
        if key not in self._packed:
            # The joint packer takes little time, and is deterministic.
            samples = self._samples(config)
            schedule = pack_whole(samples, config.limits, "joint", lanes)
            self._packed[key] = schedule
        return self._packed[key]

    def _samples(self, config: RunConfig) -> Sequence[Sample]:
        """Returns the samples of the first window, or of its first steps."""
        positions = assign_slots(
            self._demand.positions,
            config.max_concurrent_jobs or len(self._demand.positions),
            preempts=config.preempt,
        )
        a_step = len(next_samples(positions, 1, self._demand.lengths))
        num_steps = min(config.window_steps, max(1, _MOST_SAMPLES // a_step))
        return next_samples(positions, num_steps, self._demand.lengths)
