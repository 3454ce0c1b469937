"""Chooses the sizes of a mesh by the memory and the predicted time of a run."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from jaxlora.config import RunConfig
from jaxlora.models.layer import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import check_divides
from jaxlora.plan.memory.device_memory import DeviceMemory, format_bytes
from jaxlora.plan.memory.need import DoesNotFitError
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.mesh.candidates import Candidate, Candidates, Demand
from jaxlora.plan.mesh.machine import Machine
from jaxlora.sharding.mesh_sizes import MeshSizes

# Meshes that are this close to the fastest one count as equally fast, because the
# prediction is not more exact.
_TOLERANCE = 1.05


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


def choose_mesh(
    config: RunConfig, spec: DecoderSpec, demand: Demand, machine: Machine
) -> MeshChoice:
    """Chooses the mesh with the shortest predicted time per token among those that fit.

    These are the meshes of the most devices with which any fits, of half as many, of a
    quarter, and so on to a single device. Each has the capacity that is predicted to be
    fastest on it. Of meshes that are about equally fast, the simplest is chosen: the
    one with the fewest devices, then with the fewest that share a microbatch, then with
    the fewest stages, and then with the fewest shards.

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
    available = machine.memory_of(machine.num_devices)
    candidates = Candidates(demand, machine, available)

    def largest(meshes: Iterable[MeshSizes]) -> list[Candidate]:
        return [
            candidates.largest(config.replace(mesh=str(sizes)), spec.with_remat(remat))
            for sizes in meshes
            for remat in _remats(config)
        ]

    tried: list[Candidate] = []
    for num_devices in range(machine.num_devices, 0, -1):
        shared = _shared_meshes(config, spec, num_devices, machine)
        found = largest(_meshes(config, spec, num_devices, machine))
        fitting = _fitting(found, available)
        if not fitting:
            found += (others := largest(shared))
            fitting, shared = _fitting(others, available), []
        tried += found
        if fitting:
            for fewer in _halvings(num_devices):
                meshes = _meshes(config, spec, fewer, machine)
                fitting += [c for c in largest(meshes) if c.fits(available)]
                shared += _shared_meshes(config, spec, fewer, machine)
            timed = [candidates.fastest(c) for c in fitting]
            faster = _faster(config, spec, candidates, shared, timed)
            more = [c for c in largest(faster) if c.fits(available)]
            timed += [candidates.fastest(c) for c in more]
            choice = _fastest(timed, machine)
            # A single device chooses it again, and compiles what it has chosen.
            return (
                choice if choice.sizes.num_devices > 1 else _unsettled(choice, config)
            )
    raise _refused(tried, machine.num_devices, available)


def _fitting(
    found: Sequence[Candidate], available: DeviceMemory | None
) -> list[Candidate]:
    """Returns those that fit, or else those that fit without room for errors."""
    return [c for c in found if c.fits(available)] or [
        c for c in found if c.fits(available, with_room=False)
    ]


def _faster(
    config: RunConfig,
    spec: DecoderSpec,
    candidates: Candidates,
    meshes: Iterable[MeshSizes],
    timed: Sequence[tuple[Candidate, float]],
) -> list[MeshSizes]:
    """Returns meshes that would be faster if their memory had no limit.

    So memory is estimated, which takes longest, for few of them.
    """
    least, faster = min(time for _, time in timed), []
    if not least:  # nothing is left to do
        return []
    weakest = spec.with_remat(_remats(config)[0])
    for sizes in meshes:
        found = candidates.unlimited(config.replace(mesh=str(sizes)), weakest)
        if _TOLERANCE * candidates.seconds_per_token(found) < least:
            faster.append(sizes)
    return faster


def _unsettled(choice: MeshChoice, config: RunConfig) -> MeshChoice:
    return dataclasses.replace(choice, remat=config.remat)


def _halvings(num_devices: int) -> Iterator[int]:
    while num_devices > 1:
        num_devices //= 2
        yield num_devices


def _meshes(
    config: RunConfig, spec: DecoderSpec, num_devices: int, machine: Machine
) -> Iterator[MeshSizes]:
    """Yields the meshes of exactly this many devices that can run the model.

    Their devices share no microbatch; see `_shared_meshes`.
    """
    most = min(spec.config.num_layers, config.pipeline_microbatches or num_devices)
    if machine.num_processes > 1:  # pipeline stages cannot span processes
        most = 1
        if num_devices < machine.num_devices:  # nor can a process be left out
            return
    for stage in range(1, most + 1):
        for fsdp in range(1, num_devices + 1):
            if num_devices % (stage * fsdp) or spec.config.hidden_size % fsdp:
                continue
            yield MeshSizes(data=num_devices // (stage * fsdp), stage=stage, fsdp=fsdp)


def _shared_meshes(
    config: RunConfig, spec: DecoderSpec, num_devices: int, machine: Machine
) -> list[MeshSizes]:
    """Returns the meshes of this many devices, some of which share each microbatch.

    The sums along `tensor` are not hidden behind other work, so it stays within a host.
    Where the rate of the links is not known, there are none.
    """
    if math.isinf(machine.speed.link_bytes):
        return []
    found = []
    for tensor in range(2, machine.num_devices // machine.num_hosts + 1):
        if num_devices % tensor or not is_divided(spec, tensor, config.block_tokens):
            continue
        apart = dataclasses.replace(machine, num_devices=machine.num_devices // tensor)
        meshes = _meshes(config, spec, num_devices // tensor, apart)
        found += [dataclasses.replace(sizes, tensor=tensor) for sizes in meshes]
    return found


def is_divided(spec: DecoderSpec, tensor: int, block_tokens: int) -> bool:
    """Whether `tensor` devices can share each layer of a decoder.

    Args:
        spec: The decoder.
        tensor: Number of devices.
        block_tokens: Tokens of a block, whose rows are divided.
    """
    if block_tokens % tensor:
        return False
    if spec.slots and spec.trains_whole_shapes():
        return tensor == 1
    try:
        check_divides(spec.config, tensor, spec.options.base_format)
    except ValueError:
        return False
    return True


def _remats(config: RunConfig) -> tuple[Remat, ...]:
    return get_args(Remat) if config.remat == "auto" else (config.remat,)


def _fastest(timed: Sequence[tuple[Candidate, float]], machine: Machine) -> MeshChoice:
    least = min((time for _, time in timed), default=math.inf)

    def rank(pair: tuple[Candidate, float]) -> tuple:
        sizes = pair[0].stages.sizes
        is_slow = pair[1] > _TOLERANCE * least
        simpler = sizes.num_devices, sizes.tensor, sizes.stage, sizes.fsdp
        return is_slow, *simpler, pair[1]

    (chosen, time), *others = sorted(timed, key=rank)
    fitting = [candidate for candidate, _ in timed]
    reason = (
        f"mesh auto: {_describe(chosen, fitting)} on {machine.num_devices} devices: "
        f"{_memory_reason(chosen, machine)}; "
    )
    if others:
        other, other_time = min(others, key=lambda pair: pair[1])
        reason += f"predicted {other_time / time:.2f}x as fast as "
        reason += _describe(other, fitting)
        reason += ", the next best" if time <= other_time else ", and simpler"
    else:
        reason += "no other mesh fits"
    remat = chosen.config.weakest_remat
    return MeshChoice(sizes=chosen.stages.sizes, remat=remat, reason=reason)


def _describe(candidate: Candidate, others: Sequence[Candidate]) -> str:
    """Names a mesh, and its capacity and `remat` if others have other ones."""
    config = candidate.config
    settings = []
    if any(other.config.remat != config.remat for other in others):
        settings.append(f"remat {config.remat}")
    if any(other.tokens != candidate.tokens for other in others):
        settings.append(f"microbatches of {candidate.tokens} tokens")
    text = str(candidate.stages.sizes)
    return f"{text} with {' and '.join(settings)}" if settings else text


def _memory_reason(chosen: Candidate, machine: Machine) -> str:
    needed = f"it needs {format_bytes(chosen.needed_bytes)} on each device"
    if (available := machine.memory_of(machine.num_devices)) is None:
        return f"{needed}, of an unknown size"
    there = format_bytes(available.num_bytes)
    return f"{needed}, which has {there}"


def _refused(
    tried: Sequence[Candidate], num_devices: int, available: DeviceMemory | None
) -> DoesNotFitError:
    assert available is not None, "memory of an unknown size is not checked"
    best = min(tried, key=lambda candidate: candidate.needed_bytes)
    details = refusal(best.config, best.stages, best.bounds, best.found, available)
    text = (
        f"mesh auto: no mesh of {num_devices} devices has the memory for this "
        f"run, and {best.stages.sizes} comes closest: {details}"
    )
    return DoesNotFitError(text, details.need, details.mesh, details.cures)
