"""Chooses the sizes of a mesh by the memory and the predicted time of a run."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from jaxlora.config import RunConfig
from jaxlora.costs.stages import stage_specs
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.device import format_bytes
from jaxlora.memory.fitting import estimate_at, largest_fitting
from jaxlora.memory.mesh import MeshFootprint, MeshStages
from jaxlora.memory.need import DoesNotFitError
from jaxlora.memory.refusal import refusal
from jaxlora.models.layer import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.scheduler import Lanes
from jaxlora.scheduler.replicas import Load
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.auto_mesh.machine import Machine
from jaxlora.train.auto_mesh.predict import window_seconds
from jaxlora.train.lanes import run_lanes
from jaxlora.train.next_window import (
    JobPosition,
    assign_slots,
    pack_window,
    window_samples,
)

# Meshes that are this close to the fastest one count as equally fast, because the
# prediction is not more exact.
_TOLERANCE = 1.05


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshChoice:
    """The chosen mesh.

    Attributes:
        sizes: Its sizes.
        remat: `remat` of the run; it stays `auto` on a single device.
        reason: Why it was chosen, in one line.
    """

    sizes: MeshSizes
    remat: Remat | Literal["auto"]
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A mesh on which the run might run.

    Attributes:
        config: The run on this mesh, with a number for `microbatch_tokens` and a
            `remat`.
        stages: Its stages.
        lanes: Its lanes.
        bounds: Bounds of its capacity.
        found: Its estimated memory.
    """

    config: RunConfig
    stages: MeshStages
    lanes: Lanes
    bounds: Bounds
    found: MeshFootprint

    @property
    def sizes(self) -> MeshSizes:
        return self.stages.sizes

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device of the tightest stage needs."""
        return self.found.total_bytes(self.config.limits.capacity)


def choose_mesh(
    config: RunConfig, spec: DecoderSpec, demand: Demand, machine: Machine
) -> MeshChoice:
    """Chooses the mesh with the shortest predicted time per token among those that fit.

    Meshes of all devices come first; a smaller one is chosen only if none of them fits.
    Of meshes that are about equally fast, the simplest is chosen: the one with the
    fewest stages, and then with the fewest shards.

    Args:
        config: The run; its mesh is not used.
        spec: The whole decoder.
        demand: The work of the run.
        machine: The machine.

    Raises:
        ConfigError: No mesh has enough memory.
    """
    if machine.num_devices == 1:
        reason = "mesh auto: there is one device"
        return MeshChoice(sizes=MeshSizes(), remat=config.remat, reason=reason)
    tried: list[_Candidate] = []
    for num_devices in range(machine.num_devices, 0, -1):
        candidates = [
            _candidate(config, spec.with_remat(remat), demand, machine, sizes)
            for sizes in _meshes(config, spec, num_devices, machine.num_processes)
            for remat in _remats(config)
        ]
        tried += candidates
        fitting = [c for c in candidates if _fits(c, machine)]
        if fitting:
            return _fastest(fitting, demand, machine)
    raise _refused(tried, machine)


def _meshes(
    config: RunConfig, spec: DecoderSpec, num_devices: int, num_processes: int
) -> Iterator[MeshSizes]:
    """Yields the meshes of exactly this many devices that can run the model."""
    most = min(spec.config.num_layers, config.pipeline_microbatches or num_devices)
    if num_processes > 1:  # pipeline stages cannot span processes
        most = 1
    for stage in range(1, most + 1):
        for fsdp in range(1, num_devices + 1):
            if num_devices % (stage * fsdp) or spec.config.hidden_size % fsdp:
                continue
            yield MeshSizes(data=num_devices // (stage * fsdp), stage=stage, fsdp=fsdp)


def _remats(config: RunConfig) -> tuple[Remat, ...]:
    return get_args(Remat) if config.remat == "auto" else (config.remat,)


def _candidate(
    config: RunConfig,
    spec: DecoderSpec,
    demand: Demand,
    machine: Machine,
    sizes: MeshSizes,
) -> _Candidate:
    config = config.replace(mesh=str(sizes), remat=spec.options.remat)
    bounds = demand.bounds(config)
    lanes = _lanes(config, demand, bounds)
    stages = MeshStages(
        spec=spec,
        specs=stage_specs(spec, sizes.stage, machine.speed),
        sizes=sizes,
        in_flight=config.pipeline_microbatches or sizes.stage,
        is_pinned=lanes.pinned,
    )
    estimate = functools.partial(estimate_at, stages, config.block_tokens)
    tokens = bounds.max_tokens
    if bounds.fixed is None and machine.memory is not None:
        fitting = largest_fitting(bounds, estimate, machine.memory.num_bytes)
        tokens = fitting or bounds.smallest
    return _Candidate(
        config=config.replace(microbatch_tokens=tokens),
        stages=stages,
        lanes=lanes,
        bounds=bounds,
        found=estimate(tokens),
    )


def _lanes(config: RunConfig, demand: Demand, bounds: Bounds) -> Lanes:
    loads = [
        Load(num_batches=p.num_steps - p.step, batch_tokens=p.batch_tokens)
        for p in demand.positions
    ]
    num_slots = _num_slots(config, demand)
    capacity = bounds.max_tokens
    return run_lanes(config, loads, capacity=capacity, num_slots=num_slots).lanes


def _num_slots(config: RunConfig, demand: Demand) -> int:
    return config.max_concurrent_jobs or len(demand.positions)


def _fits(candidate: _Candidate, machine: Machine) -> bool:
    memory = machine.memory
    return memory is None or candidate.needed_bytes <= memory.num_bytes


def _seconds_per_token(
    candidate: _Candidate, demand: Demand, machine: Machine
) -> float:
    """Predicts the time per token in the first window of the run."""
    config, lanes = candidate.config, candidate.lanes
    positions = assign_slots(
        demand.positions,
        _num_slots(config, demand),
        preempts=config.preempt,
        lanes=lanes,
    )
    samples = window_samples(positions, config.window_steps, demand.lengths)
    # The joint packer takes little time, and is deterministic.
    schedule = pack_window(samples, config.limits, "joint", lanes)
    seconds = window_seconds(candidate.stages, lanes, schedule, machine.speed)
    return seconds / sum(s.num_tokens for s in samples)


def _fastest(
    fitting: Sequence[_Candidate], demand: Demand, machine: Machine
) -> MeshChoice:
    times = [_seconds_per_token(c, demand, machine) for c in fitting]
    ranked = sorted(
        zip(times, fitting, strict=True),
        key=lambda pair: (
            pair[0] > _TOLERANCE * min(times),
            pair[1].sizes.stage,
            pair[1].sizes.fsdp,
            pair[0],
        ),
    )
    time, chosen = ranked[0]
    reason = (
        f"mesh auto: {_describe(chosen, fitting)} on {machine.num_devices} devices: "
        f"{_memory_reason(chosen, machine)}; "
    )
    choice = MeshChoice(sizes=chosen.sizes, remat=chosen.config.least_remat, reason="")
    if len(ranked) == 1:
        return dataclasses.replace(choice, reason=f"{reason}no other mesh fits")
    other_time, other = min(ranked[1:], key=lambda pair: pair[0])
    reason += f"predicted {other_time / time:.2f}x as fast as "
    reason += _describe(other, fitting)
    reason += ", the next best" if time <= other_time else ", and simpler"
    return dataclasses.replace(choice, reason=reason)


def _describe(candidate: _Candidate, others: Sequence[_Candidate]) -> str:
    """Names a mesh, and its `remat` if others have another one."""
    remat = candidate.config.remat
    if all(other.config.remat == remat for other in others):
        return str(candidate.sizes)
    return f"{candidate.sizes} with remat {remat}"


def _memory_reason(chosen: _Candidate, machine: Machine) -> str:
    needed = f"it needs {format_bytes(chosen.needed_bytes)} on each device"
    if machine.memory is None:
        return f"{needed}, of an unknown size"
    there = format_bytes(machine.memory.num_bytes)
    return f"{needed}, which has {there}"


def _refused(tried: Sequence[_Candidate], machine: Machine) -> DoesNotFitError:
    assert machine.memory is not None
    best = min(tried, key=lambda candidate: candidate.needed_bytes)
    details = refusal(best.config, best.stages, best.bounds, best.found, machine.memory)
    text = (
        f"mesh auto: no mesh of {machine.num_devices} devices has the memory for this "
        f"run, and {best.sizes} comes closest: {details}"
    )
    return DoesNotFitError(text, details.need, details.mesh, details.cures)
