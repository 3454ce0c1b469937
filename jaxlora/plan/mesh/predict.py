"""Predicts the time of a window of a run on a mesh."""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import numpy as np

from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.costs.device_profile import Profile
from jaxlora.costs.gpus import UNKNOWN_DEVICE, DeviceSpeed
from jaxlora.costs.stages import (
    decoder_seconds,
    microbatch_seconds,
    stage_seconds,
    total,
)
from jaxlora.models.division import part_shapes, table_axes
from jaxlora.models.options import Remat
from jaxlora.models.spec import DecoderSpec, Shapes
from jaxlora.pallas_kernels import get_backend
from jaxlora.plan.memory.footprint import num_bytes
from jaxlora.plan.stages import MeshStages
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Schedule,
    StageCost,
    simulate,
)
from jaxlora.scheduler.lanes import ticks_of
from jaxlora.sharding.mesh_sizes import MeshSizes

# Share of a transfer that is not hidden behind the work beside it. Without a prefetch,
# 8 layers of Llama-3.1-8B in 4 shards took 1.065 times as long as whole ones on H200s;
# half of the gathers' 13 ms would be 1.07.
_EXPOSED_SHARE = 0.5
# Gathers and scatters of a layer's hidden states along `tensor` in each pass: before
# and after attention, and before and after the MLP. Those before are gathered again
# where inputs of linears are recomputed, and `layer` runs attention again.
EXCHANGES = 4
EXCHANGED_AGAIN: dict[Remat, int] = {"none": 0, "elementwise": 2, "mlp": 1, "layer": 3}

# Bytes of memory traffic for each element of the slots' tables, whatever the samples
# are. In a microbatch, A and B are read in float32, written in bfloat16 and read by
# three products; their gradients are written, and added to those of the batch (28). A
# step of AdamW reads and writes weights, both moments and gradients (32). At this share
# of the peak rate, 64 slots of rank 16 of SmolLM2-135M take 4.0 and 4.6 ms on an H100;
# 4.4, with the other kernels of adapters, and 4.5 were measured.
_PASS_BYTES, _STEP_BYTES = 28.0, 32.0
_TABLE_SHARE = 0.65
# A job that starts in a slot, or leaves it, takes this time of a run: 64 of SmolLM2's
# took 22 to 26 ms each at the start of runs on an H200 and an H100, and 27 to 36 at
# their ends and at rungs.
SLOT_SECONDS = 0.026
# Time of a row of padding as a share of that of a token, where it was not measured, is
# this over the root of the hidden size: the fused kernels, attention and the loss skip
# it, and element-wise work does not. 0.4 of SmolLM2-135M's, 0.24 of Llama-3.2-1B's and
# 0.15 of Llama-3.1-8B's were measured on H200s.
_PADDING = 10.0
_NETWORK_SHARE = 0.75  # as between the GPUs of a host; not measured


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates from which the time of a run is predicted.

    Devices are numbered host by host.

    Attributes:
        speed: Rates of each device.
        devices_per_host: Number of devices of each host.
        network_bytes: Bytes per second, in each direction, between a host and all
            others.
        profile: What was measured for the run's model and kernels; None: times follow
            the data sheet of the device.
    """

    speed: DeviceSpeed
    devices_per_host: int
    network_bytes: float
    profile: Profile | None = None

    @staticmethod
    def of(
        speed: DeviceSpeed,
        devices_per_host: int,
        network_gbits: float | None = None,
        profile: Profile | None = None,
    ) -> "Rates":
        """Returns the rates of a machine.

        Args:
            speed: Rates of each device. If they are not known, transfers take no time.
            devices_per_host: Number of devices of each host.
            network_gbits: Gigabits per second between a host and all others; None: by
                the data sheet of the machine that the device is usually sold in.
            profile: What was measured.
        """
        rate = speed.network_bytes * devices_per_host
        if math.isinf(speed.link_bytes):
            rate = math.inf
        elif network_gbits is not None:
            rate = network_gbits * 1e9 / 8
        return Rates(
            speed=speed,
            devices_per_host=devices_per_host,
            network_bytes=rate,
            profile=profile,
        )

    def exchange_seconds(self, num_bytes: float, num_devices: int) -> float:
        """Estimates the time in which each of a group of neighbors receives data.

        Between hosts, what a device receives comes in through the network of its host
        once, in rings that share it, as in NCCL.

        Args:
            num_bytes: Bytes that each device receives.
            num_devices: Devices of the group; groups follow each other.
        """
        inside = self.speed.transfer_seconds(num_bytes)
        if self.devices_per_host % num_devices == 0:
            return inside
        return max(inside, num_bytes / (_NETWORK_SHARE * self.network_bytes))

    @property
    def are_known(self) -> bool:
        """Whether times are in seconds, rather than in operations."""
        return self.profile is not None or self.speed is not UNKNOWN_DEVICE


def window_seconds(
    stages: MeshStages,
    lanes: Lanes,
    schedule: Schedule,
    rates: Rates,
    shapes: tuple[int, ...] = (),
    *,
    is_part: bool = False,
    num_changes: int = 0,
) -> float:
    """Predicts the time of a window from its first pass to its last one.

    Without a profile, the time is in the unit of `decoder_seconds`.

    Args:
        stages: Stages of the run.
        lanes: Lanes of the run.
        schedule: The window.
        rates: What the time follows from.
        shapes: Shapes of microbatches, in tokens, beside that of the capacity.
        is_part: Whether other microbatches come before and after it, so that a pipeline
            neither fills nor drains.
        num_changes: How many times a job starts in a slot, or leaves it.
    """
    limits, n, squares = schedule.limits, lanes.num_lanes, _mean_squares(schedule)
    batches = {(s.owner, s.batch) for m in schedule.microbatches for s in m}
    changes = num_changes * SLOT_SECONDS if rates.are_known else 0.0
    if lanes.replicas:
        first = ReplicaShape(tokens=limits.capacity, tensor=stages.sizes.tensor)
        of_first = replica_seconds(stages, first, rates)
        each = square_seconds(stages.spec, rates)
        seconds = _lane_seconds(lanes, schedule, of_first, each)
        return changes + seconds + len(batches) * step_seconds(stages, rates)
    cost = shape_seconds(stages, limits.capacity, rates, shapes, squares=squares)
    if stages.sizes.stage == 1:
        both = cost.stages[0].forward + cost.stages[0].backward
        ticks = [t for t in itertools.batched(schedule.microbatches, n) if any(t)]
        tokens = Counter(max(cost.size(m, limits)[0] for m in tick) for tick in ticks)
        seconds = sum(count * both(size, 0) for size, count in tokens.items())
    else:
        found = simulate(schedule, cost, lanes.pipeline, num_lanes=n)
        seconds = found.makespan
        if is_part and schedule.microbatches:
            seconds = max(0.0, seconds - _ramp_seconds(cost, schedule))
    seconds += changes + len(batches) * exchange_seconds(stages, rates)
    return seconds + _num_steps(schedule, n) * step_seconds(stages, rates)


def _num_steps(schedule: Schedule, num_lanes: int) -> int:
    """Number of ticks behind which slots step; those that step together take one."""
    last: dict[tuple[int, int], int] = {}
    for tick, microbatches in enumerate(
        itertools.batched(schedule.microbatches, num_lanes)
    ):
        last |= {(s.owner, s.batch): tick for m in microbatches for s in m}
    return len(set(last.values()))


def replica_seconds(stages: MeshStages, shape: ReplicaShape, rates: Rates) -> float:
    """Predicts the time of a full microbatch of a replica, without attention's squares.

    Args:
        stages: The first replica, whose microbatches are the largest.
        shape: A replica.
        rates: What the time follows from.
    """
    own, tokens = stages.like(shape.tensor), float(shape.tokens)
    (cost,) = shape_seconds(own, shape.tokens, rates).stages
    return (cost.forward + cost.backward)(tokens, 0.0)


def _lane_seconds(
    lanes: Lanes, schedule: Schedule, of_first: float, per_square: float
) -> float:
    """Time until the last replica has run its microbatches.

    A microbatch waits for its replica, and for the batch before of each of its jobs.

    Args:
        lanes: The lanes of the replicas.
        schedule: Their microbatches.
        of_first: Time of a full microbatch of the first replica.
        per_square: Seconds that attention adds for each squared length on one device.
    """
    whole = lanes.replicas[0].work
    free = [0.0] * len(lanes.replicas)
    done: dict[tuple[int, int], float] = {}  # by job and batch
    for tick in ticks_of(schedule.microbatches, lanes.num_lanes):
        for lane, microbatch in zip(lanes.unlike, tick, strict=True):
            if not microbatch:
                continue
            batches = {(s.owner, s.batch) for s in microbatch}
            ready = max(done.get((job, batch - 1), 0.0) for job, batch in batches)
            replica = lanes.replicas[lane.replica]
            squares = sum(s.num_tokens**2 for s in microbatch) / replica.num_devices
            took = of_first * replica.work / whole + per_square * squares
            free[lane.replica] = end = max(free[lane.replica], ready) + took
            done |= {one: max(end, done.get(one, 0.0)) for one in batches}
    return max(free)


def square_seconds(spec: DecoderSpec, rates: Rates) -> float:
    """Seconds that attention takes for each squared length, if it was measured."""
    if (profile := rates.profile) is None:
        return 0.0
    speed = rates.speed
    return profile.seconds(spec, speed, 0, 1) - profile.seconds(spec, speed, 0, 0)


def _ramp_seconds(cost: CostModel, schedule: Schedule) -> float:
    """Time of a pipeline's fill and drain: what one microbatch adds to its stage."""
    full = np.array([float(schedule.limits.capacity)])
    forward, backward = cost.times(full, np.zeros(1), np.ones(1))
    both = (forward + backward)[:, 0]
    transfers = 2 * (cost.num_stages - 1) * cost.communication
    return float(both.sum() - both.max()) + transfers


def shape_seconds(
    stages: MeshStages,
    capacity: int,
    rates: Rates,
    shapes: tuple[int, ...] = (),
    *,
    squares: float = 0.0,
    mean_tokens: float | None = None,
) -> CostModel:
    """Predicts the time of microbatches of each shape.

    Args:
        stages: Stages of the run.
        capacity: The largest shape, in tokens.
        rates: What the time follows from.
        shapes: The other shapes.
        squares: Mean sum of squared lengths of the samples of a full microbatch.
        mean_tokens: Mean length of the samples, where attention was not measured; None:
            that of the decoder's options.
    """
    speed, sizes, tensor = rates.speed, stages.sizes, stages.sizes.tensor
    own_speed = speed.sharing_heads(tensor)
    part = stages.spec.part(tensor, sizes.expert)
    layers = decoder_seconds(part, own_speed, mean_tokens=mean_tokens)
    token_seconds = total(layers).both
    fixed = microbatch_seconds(part, capacity, own_speed)

    def equivalent_tokens(num_tokens: float) -> float:
        """Tokens whose products alone would take the whole time of a microbatch."""
        if rates.profile is None:
            # A microbatch also takes the time of reading the weights, and of launches.
            seconds = speed.layer_seconds * stages.spec.config.num_layers
            launches = (seconds + fixed) / token_seconds
            return num_tokens + speed.weight_tokens + launches
        own = num_tokens, squares * num_tokens / capacity
        whole = rates.profile.seconds(stages.spec, speed, *own)
        return whole / tensor / token_seconds

    full, half = equivalent_tokens(capacity), equivalent_tokens(capacity / 2)

    def cost(seconds: float, gather: float, reduction: float) -> AffineCost:
        most = _overlapped(full * seconds, gather)
        each = (most - _overlapped(half * seconds, gather)) / (capacity / 2)
        base = max(0.0, most - capacity * each)  # rounding may leave less than zero
        return AffineCost(base=base, per_token=each + reduction, per_square=0.0)

    costs = []
    for spec, time in zip(
        stages.specs, stage_seconds(layers, stages.borders), strict=True
    ):
        gather = rates.exchange_seconds(_gathered_bytes(spec, sizes), sizes.fsdp)
        received = exchanged_bytes(spec, tensor)
        of_experts = _expert_bytes(spec, sizes.expert)
        tables = table_seconds(stages, spec, rates)
        forward, backward = (
            cost(
                seconds,
                gather,
                rates.exchange_seconds(num_bytes, tensor)
                + rates.exchange_seconds(rows, sizes.expert),
            )
            for seconds, num_bytes, rows in zip(
                (time.forward, time.backward), received, of_experts, strict=True
            )
        )
        backward = dataclasses.replace(backward, base=backward.base + tables)
        costs.append(StageCost(forward=forward, backward=backward))
    itemsize = stages.spec.options.dtype.itemsize
    hidden_bytes = capacity * stages.spec.config.hidden_size * itemsize
    return CostModel(
        stages=tuple(costs),
        buckets=(*shapes, capacity),
        communication=speed.transfer_seconds(hidden_bytes),
        padding=padding_share(stages.spec, rates)[0],
    )


def padding_share(spec: DecoderSpec, rates: Rates) -> tuple[float, str]:
    """Returns the time of a row of padding as a share of a token's, and its source."""
    if rates.profile is not None:
        return rates.profile.padding, "as `jaxlora profile` measured here"
    name = spec.options.implementation
    if get_backend(name).skips_padding:
        share = round(min(1.0, _PADDING * spec.config.hidden_size**-0.5), 2)
        return share, f"as is usual of {name} kernels; `jaxlora profile` measures it"
    return 1.0, f"as {name} kernels do not skip padding"


def _mean_squares(schedule: Schedule) -> float:
    """Returns the mean sum of squared lengths of the microbatches with samples."""
    squares = [sum(s.num_tokens**2 for s in m) for m in schedule.microbatches if m]
    return sum(squares) / max(1, len(squares))


def _overlapped(compute: float, transfer: float) -> float:
    """Time of a pass whose transfers run beside its computation."""
    return max(compute, transfer) + _EXPOSED_SHARE * min(compute, transfer)


def _gathered_bytes(spec: DecoderSpec, sizes: MeshSizes) -> float:
    """Bytes of weights that a device receives in each pass of a stage."""
    if sizes.fsdp == 1:
        return 0.0
    part = spec.part(sizes.tensor, sizes.expert)
    return num_bytes(part.base_shapes()) * (sizes.fsdp - 1) / sizes.fsdp


def exchanged_bytes(spec: DecoderSpec, tensor: int) -> tuple[float, float]:
    """Bytes per token that a device receives along `tensor` in a stage's passes.

    The embedding scatters its rows, and the loss gathers them. The time of exchanges is
    not hidden: what follows needs them.

    Returns:
        Those of the forward pass, and of the backward pass.
    """
    hidden = spec.config.hidden_size * spec.options.dtype.itemsize
    each, layers = hidden * (tensor - 1) / tensor, len(spec.layer_numbers)
    again = EXCHANGED_AGAIN[spec.options.remat]
    return (
        each * (EXCHANGES * layers + spec.has_embedding + spec.has_head),
        each * ((EXCHANGES + again) * layers + spec.has_head),
    )


def _expert_bytes(spec: DecoderSpec, expert: int) -> tuple[float, float]:
    """Bytes per token that a device receives along `expert` in a stage's passes.

    It receives the rows of the others, and what they have computed for its own. Where
    the inputs of linears are recomputed, it receives rows once more.

    Returns:
        Those of the forward pass, and of the backward pass.
    """
    shapes = map(spec.config.expert_shape, spec.layer_numbers)
    layers = sum(shape is not None for shape in shapes)
    hidden = spec.config.hidden_size * spec.options.dtype.itemsize
    each = layers * hidden * (expert - 1)
    return 2.0 * each, (2.0 + (spec.options.remat != "none")) * each


def _own_tables(stages: MeshStages, spec: DecoderSpec) -> Shapes:
    """Shapes of a stage's slot tables on each device."""
    return part_shapes(spec, stages.sizes.tensor, stages.sizes.expert)[1]


def _whole_slot_bytes(spec: DecoderSpec, sizes: MeshSizes) -> float:
    """Bytes of a slot's tables that are whole on each device of a stage."""
    axes = table_axes(spec.divided(tensor=sizes.tensor, expert=sizes.expert))
    shapes = spec.adapter_shapes()
    assert spec.slots is not None
    whole = [table for name, table in shapes.items() if name not in axes]
    return num_bytes(whole) / spec.slots.num_slots


def adapter_share(stages: MeshStages, batch_tokens: float) -> float:
    """Share of a job's exchanges along `tensor` that its adapter adds to the base's.

    The gradients of the halves of an adapter that are whole on each device are summed
    once per optimizer step, and hidden states in each layer of both passes.

    Args:
        stages: Stages of the run.
        batch_tokens: Tokens of a global batch of the job.
    """
    tensor = stages.sizes.tensor
    added = sum(_whole_slot_bytes(spec, stages.sizes) for spec in stages.specs)
    each = sum(sum(exchanged_bytes(spec, tensor)) for spec in stages.specs)
    return 2 * (tensor - 1) / tensor * added / (batch_tokens * each)


def table_seconds(stages: MeshStages, spec: DecoderSpec, rates: Rates) -> float:
    """Time of a microbatch that the tables of a stage take, whatever is in it.

    A profile has that of the slots which it was measured with.

    Args:
        stages: Stages of the run.
        spec: The stage.
        rates: What the time follows from.
    """
    if spec.slots is None:
        return 0.0
    own = float(num_bytes(_own_tables(stages, spec)))
    if rates.profile is not None:
        layers = len(spec.layer_numbers) / spec.config.num_layers
        own = max(0.0, own - layers * rates.profile.adapter_bytes)
    return _traffic_seconds(own, _PASS_BYTES, rates)


def _traffic_seconds(table_bytes: float, per_element: float, rates: Rates) -> float:
    """Time of reading and writing tables in float32."""
    moved = table_bytes / np.dtype(np.float32).itemsize * per_element
    return moved / (_TABLE_SHARE * rates.speed.memory_bytes)


@functools.lru_cache(maxsize=64)
def step_seconds(stages: MeshStages, rates: Rates) -> float:
    """Time of an optimizer step, in which the tables of all slots are read and written.

    All slots whose batches are complete behind a microbatch step together, and the time
    does not depend on their number.
    """
    slots = max(num_bytes(_own_tables(stages, spec)) for spec in stages.specs)
    profile = rates.profile
    if profile is None or not profile.adapter_bytes:
        return _traffic_seconds(slots, _STEP_BYTES, rates)
    return profile.step_seconds * slots / profile.adapter_bytes


@functools.lru_cache(maxsize=64)
def exchange_seconds(stages: MeshStages, rates: Rates) -> float:
    """Time until all devices have the gradients of a slot, before its step.

    A device receives a chunk from each of the others, and then their sums of chunks.
    Tables that are whole on each device are summed over `tensor`, too, and those of
    experts that devices divide are not summed over `expert`.
    """
    lanes, sizes = stages.use(0).num_parts, stages.sizes

    def seconds(slot_bytes: float, num_parts: int) -> float:
        received = 2 * slot_bytes * (num_parts - 1) / num_parts
        return rates.exchange_seconds(received, num_parts)

    exchange = 0.0
    for spec in stages.specs:
        own = num_bytes(_own_tables(stages, spec))
        assert spec.slots is not None
        whole = _whole_slot_bytes(spec, sizes)
        divided = own / spec.slots.num_slots - whole
        found = seconds(divided, lanes // sizes.expert)
        exchange = max(exchange, found + seconds(whole, lanes * sizes.tensor))
    return exchange
