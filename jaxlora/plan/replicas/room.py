"""Finds what fits on replicas of each number of devices, for `replicas: auto`."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxlora.common.counted import counted
from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import (
    ReplicaConfig,
    ReplicaShape,
    describe_list,
    in_order,
    listed,
)
from jaxlora.errors import ConfigError
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.capacity import UNCHECKED_TOKENS
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.plan.memory.need import DoesNotFitError
from jaxlora.plan.memory.options import estimated_room, largest_fitting
from jaxlora.plan.memory.refusal import refusal
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.stages import MeshStages, estimated_footprint
from jaxlora.sharding.mesh_sizes import MeshSizes

_SEVERAL = MeshSizes(data=2)  # lists stay, so their memory has the room of a mesh


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """The largest microbatches that fit on replicas, with one `remat`.

    Attributes:
        config: The run, with a `remat`.
        most: The largest microbatches of replicas of each number of devices, in
            ascending order. Some hold the longest sample.
    """

    config: RunConfig
    most: dict[int, int]


class RoomFinder:
    """Finds the largest microbatches of replicas."""

    def __init__(self, spec: DecoderSpec, bounds: Bounds, machine: Machine):
        """Estimates nothing yet.

        Args:
            spec: The decoder with the slots.
            bounds: Bounds of the capacity on one device.
            machine: The machine.
        """
        self._spec, self._bounds, self._machine = spec, bounds, machine

    def rooms(self, config: RunConfig, degrees: Sequence[int]) -> list[Room]:
        """Returns what fits for each possible `remat`; there is at least one.

        Args:
            config: The run.
            degrees: Numbers of devices of a replica, in ascending order.

        Raises:
            DoesNotFitError: No replica has the memory for the longest sample.
        """
        available, rooms = self._machine.memory_of(self._machine.num_devices), []
        if available is None:  # with remat: auto, the run is refused later
            most = self._bounds.choose(max(UNCHECKED_TOKENS, self._bounds.smallest))
            assert most is not None
            return [Room(config=config, most=dict.fromkeys(degrees, most))]
        remats = self._bounds.remats or (config.weakest_remat,)
        for remat in remats:
            own, most = config.replace(remat=remat), {}
            for tensor in degrees:
                if (found := self._fitting(own, tensor, available)) is not None:
                    most[tensor] = found
            if most and max(most.values()) >= self._bounds.smallest:
                rooms.append(Room(config=own, most=most))
        if not rooms:
            own = config.replace(remat=remats[-1])
            raise self._refusal(own, degrees[-1], available)
        return rooms

    def sized(
        self, config: RunConfig, replicas: Sequence[ReplicaConfig]
    ) -> tuple[RunConfig, Note]:
        """Gives listed replicas the largest microbatches that fit, where none is given.

        Args:
            config: The run, without replicas.
            replicas: The replicas.

        Returns:
            The run with the replicas, and what they are.

        Raises:
            ConfigError: A replica does not have the memory for any microbatch.
            DoesNotFitError: No replica has the memory for the longest sample.
        """
        rooms = self.rooms(config, sorted({one.tensor for one in replicas}))
        room = max(rooms, key=lambda room: len(room.most))  # the weakest of them
        shapes: list[ReplicaShape] = []
        for one in replicas:
            tokens: int | str | None = one.microbatch_tokens
            if tokens == "auto":
                tokens = room.most.get(one.tensor)
            if tokens is None:
                raise ConfigError(
                    f"replicas: a replica with tensor={one.tensor} does not have the "
                    "memory for any microbatch. Give it more devices."
                )
            assert isinstance(tokens, int)
            shapes += [ReplicaShape(tokens=tokens, tensor=one.tensor)] * one.count
        shapes = in_order(shapes)
        text = f"replicas: {describe_list(shapes)}, as many as fit"
        return with_list(room.config, shapes), Note(text)

    def _stages(self, config: RunConfig, shape: ReplicaShape) -> MeshStages:
        """Returns the first one of several replicas of a shape."""
        spec = self._spec.with_remat(config.weakest_remat)
        given = with_list(config, [shape] * 2)
        return MeshStages.of(given, spec, speed=self._machine.speed)

    def _fitting(
        self, config: RunConfig, tensor: int, available: DeviceMemory
    ) -> int | None:
        """Returns the largest microbatches of the first replica, which has the most.

        It has the optimizers, and no other replica has larger microbatches. They need
        not hold the longest sample, which may run on another replica.
        """
        bounds = dataclasses.replace(self._bounds, smallest=self._bounds.unit)
        shape = ReplicaShape(tokens=self._bounds.largest, tensor=tensor)
        stages = self._stages(config, shape)
        estimate = functools.partial(estimated_footprint, stages, config.block_tokens)
        room = estimated_room(available, _SEVERAL)
        return largest_fitting(bounds, estimate, room)

    def _refusal(
        self, config: RunConfig, tensor: int, available: DeviceMemory
    ) -> DoesNotFitError:
        smallest = self._bounds.smallest
        stages = self._stages(config, ReplicaShape(tokens=smallest, tensor=tensor))
        found = estimated_footprint(stages, config.block_tokens, smallest)
        own = config.replace(microbatch_tokens=smallest)
        details = refusal(own, stages, self._bounds, found, available)
        text = (
            f"replicas: auto: a replica of {counted(tensor, 'device')} does not have "
            "the memory for the longest sample. Set mesh: auto in the place of it: "
            f"{details}"
        )
        return DoesNotFitError(text, details.need, details.mesh, details.cures)


def with_list(config: RunConfig, shapes: Sequence[ReplicaShape]) -> RunConfig:
    """Returns the run with these replicas, the largest first."""
    return config.replace(
        replicas=listed(shapes),
        mesh=str(MeshSizes(tensor=shapes[0].tensor)),
        microbatch_tokens=shapes[0].tokens,
    )
