"""Lanes, the data-parallel ranks of a run, and ticks, one microbatch for each of them.

"Rank" always means the rank of a LoRA adapter in this library, so a data-parallel rank
is called a lane. Other libraries number the microbatches of each rank: those with the
same number on all ranks are a tick here.
"""

import dataclasses
from collections.abc import Sequence

from jaxlora.scheduler.cost import AffineCost, CostModel, StageCost
from jaxlora.scheduler.types import Limits, Microbatch, Pipeline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A replica of a run whose replicas have microbatches of different sizes.

    Attributes:
        capacity: Tokens of its microbatches, a multiple of the block.
        work: Time that one of them takes, in tokens of equal cost.
        num_devices: Devices that share its microbatches.
    """

    capacity: int
    work: int
    num_devices: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A microbatch of a tick.

    Attributes:
        number: Its place in the tick.
        replica: Number of its replica.
        turn: How many microbatches the replica runs before it in the tick.
        capacity: Tokens that it holds.
    """

    number: int
    replica: int
    turn: int
    capacity: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """The data-parallel lanes of a run, and its pipeline.

    A stage has `data * fsdp` devices. Each of them is a lane: in a tick, each lane runs
    one microbatch. Tick t of a schedule is its microbatches [t * n : (t + 1) * n] for n
    lanes, in row-major order of (data, fsdp). An empty microbatch is padding.

    Attributes:
        data: Number of replicas.
        fsdp: Number of lanes of each replica. They hold shards of the same base
            weights, or some of its experts, but run different microbatches.
        pipeline: The pipeline, whose distance is in ticks.
        replicas: Replicas with microbatches of different sizes, from the largest to the
            smallest; empty if all lanes have the same size. `data` and `fsdp` are then
            1. A tick takes as long as a microbatch of the first replica, and the others
            run theirs meanwhile, one after the other: each of these microbatches is a
            lane. A replica whose microbatch takes longer has none in some ticks.
    """

    data: int = 1
    fsdp: int = 1
    pipeline: Pipeline = dataclasses.field(default_factory=Pipeline)
    replicas: tuple[Replica, ...] = ()

    def __post_init__(self):
        if self.data < 1 or self.fsdp < 1:
            raise ValueError(
                f"data and fsdp must be positive, got {self.data} and {self.fsdp}."
            )
        capacities = [replica.capacity for replica in self.replicas]
        if capacities != sorted(capacities, reverse=True):
            raise ValueError(
                f"replicas have the capacities {capacities}. Give them from the "
                "largest to the smallest."
            )

    @property
    def num_lanes(self) -> int:
        """Number of microbatches in a tick."""
        return len(self.unlike) if self.replicas else self.data * self.fsdp

    @property
    def unlike(self) -> tuple[Lane, ...]:
        """The lanes of `replicas`, replica by replica.

        A replica that runs 2.5 of its microbatches in a tick has three lanes, of which
        two are open in every other tick.
        """
        lanes: list[Lane] = []
        for number, replica in enumerate(self.replicas):
            for turn in range(-(-self.replicas[0].work // replica.work)):
                lanes.append(
                    Lane(
                        number=len(lanes),
                        replica=number,
                        turn=turn,
                        capacity=replica.capacity,
                    )
                )
        return tuple(lanes)

    def open_lanes(self, tick: int) -> list[Lane]:
        """Returns the lanes of `replicas` that a tick may fill."""
        whole = self.replicas[0].work
        work = [replica.work for replica in self.replicas]
        turns = [(tick + 1) * whole // one - tick * whole // one for one in work]
        return [lane for lane in self.unlike if lane.turn < turns[lane.replica]]

    def tick_tokens(self, capacity: int) -> float:
        """Returns the tokens that a tick holds.

        Args:
            capacity: Tokens of a microbatch, if all lanes have the same size.
        """
        if not self.replicas:
            return self.num_lanes * capacity
        whole = self.replicas[0].work
        return sum(one.capacity * whole / one.work for one in self.replicas)


ONE_LANE = Lanes()

Tick = tuple[Microbatch, ...]


def ticks_of(microbatches: Sequence[Microbatch], num_lanes: int) -> list[Tick]:
    """Splits the microbatches of a schedule into ticks.

    Raises:
        ValueError: The number of microbatches is not a multiple of `num_lanes`.
    """
    if len(microbatches) % num_lanes:
        raise ValueError(
            f"the number of microbatches, {len(microbatches)}, is not a multiple of "
            f"num_lanes={num_lanes}. Pad the last tick with empty microbatches."
        )
    return [
        tuple(microbatches[first : first + num_lanes])
        for first in range(0, len(microbatches), num_lanes)
    ]


def pooled(
    limits: Limits, cost: CostModel, num_lanes: int, part: float = 1.0
) -> tuple[Limits, CostModel]:
    """Returns the limits and costs of one lane that is as fast as all lanes together.

    A tick takes at least as long as on this lane, because its slowest lane has at least
    the mean number of tokens.
    """
    blocks = int(part * num_lanes * limits.capacity) // limits.block_tokens
    stages = tuple(
        StageCost(
            forward=_divided(stage.forward, num_lanes),
            backward=_divided(stage.backward, num_lanes),
        )
        for stage in cost.stages
    )
    buckets = tuple(num_lanes * bucket for bucket in cost.buckets)
    samples, jobs = limits.max_samples, limits.max_jobs
    return (
        dataclasses.replace(
            limits,
            capacity=max(limits.capacity, blocks * limits.block_tokens),
            max_samples=None if samples is None else num_lanes * samples,
            max_jobs=None if jobs is None else num_lanes * jobs,
        ),
        dataclasses.replace(cost, stages=stages, buckets=buckets),
    )


def _divided(cost: AffineCost, num_lanes: int) -> AffineCost:
    """Returns the cost of a pass whose tokens are divided evenly over lanes."""
    return dataclasses.replace(
        cost,
        per_token=cost.per_token / num_lanes,
        per_square=cost.per_square / num_lanes,
    )
