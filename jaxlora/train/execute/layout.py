"""The layout of a run's decoder and its slots on the devices of a mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.stage_sharding import ONE_DEVICE, StageSharding
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.errors import ConfigError
from jaxlora.models.division import weight_specs
from jaxlora.models.forward import Base
from jaxlora.models.options import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.stages import MeshStages, divided
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.execute.step import CompiledSteps, compiled_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline; without a pipeline, the only one.

    Attributes:
        spec: The decoder's layers of this stage.
        placement: The devices of the stage.
    """

    spec: DecoderSpec
    placement: StageSharding

    @functools.cached_property
    def steps(self) -> CompiledSteps:
        """The compiled functions of this stage, which all runs of a process share."""
        return compiled_steps(self.spec, self.placement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The stages of a decoder on their devices.

    Attributes:
        planned: The stages, and the replicas beside them.
        placements: Devices of each stage, and then of each further replica.
    """

    planned: MeshStages
    placements: tuple[StageSharding, ...]

    @staticmethod
    def of(
        stages: MeshStages,
        base: Base | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
    ) -> "Layout":
        """Lays the stages of a decoder out on devices.

        Args:
            stages: The stages.
            base: The frozen weights; a run without a mesh is where they are. None:
                they will be on JAX's default device.
            devices: Devices of a mesh to choose from; None: all of them.

        Raises:
            ValueError: There are too few devices.
            ConfigError: There are too few for `RunConfig.replicas`, or the base is on
                several.
        """
        sizes = stages.sizes
        if sizes.num_devices == 1:
            placements = [dataclasses.replace(ONE_DEVICE, device=_device_of(base))]
        else:
            placements = [
                StageSharding(mesh=mesh) for mesh in stage_meshes(sizes, devices)
            ]
        further = _further_placements(stages, placements[0], devices)
        return Layout(planned=stages, placements=(*placements, *further))

    def with_remat(self, remat: Remat) -> "Layout":
        """Returns the same stages with another part of each layer recomputed."""
        return dataclasses.replace(self, planned=self.planned.with_remat(remat))

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, from the embedding to the head."""
        specs, sizes = self.planned.specs, self.planned.sizes
        return tuple(
            Stage(spec=divided(spec, sizes), placement=placement)
            for spec, placement in zip(specs, self.placements, strict=False)
        )

    @functools.cached_property
    def further(self) -> tuple[Stage, ...]:
        """The whole decoder on each replica beside the stages, on other devices."""
        pairs = zip(
            self.planned.further, self.placements[len(self.stages) :], strict=True
        )
        return tuple(
            Stage(
                spec=self.planned.further_spec(one).divided(tensor=one.tensor),
                placement=placement,
            )
            for one, placement in pairs
        )

    @property
    def num_lanes(self) -> int:
        """Number of microbatches that the devices of a stage run at the same time."""
        return self.stages[0].placement.num_lanes

    def empty_slots(self) -> StagedSlots:
        """Makes the slots of all stages, without adapters."""
        tables = [
            SlotTable(
                stage.spec,
                stage.steps.write_slot,
                stage.placement,
                read_slot=stage.steps.read_slot,
                empty=stage.steps.make_empty,
                evaluation_weights=stage.steps.evaluation_weights,
                reference=stage.steps.make_references(),
            )
            for stage in self.stages
        ]
        return StagedSlots([stage.spec for stage in self.stages], tables)

    def bases(self, params: Base) -> list[Base]:
        """Returns the frozen weights of each stage, on its devices.

        Weights that are there already are not copied; without a mesh, they stay where
        they are. If the embedding is also the head, the last stage gets a copy of it.

        Args:
            params: Frozen weights of the whole decoder, by path.
        """
        if self.stages[0].placement.mesh is None:
            return [params]
        return [
            {
                path: jax.device_put(params[path], stage.placement.sharding(spec))
                for path, spec in weight_specs(stage.spec).items()
            }
            for stage in self.stages
        ]

    def further_bases(self, params: Base) -> list[Base]:
        """Copies the frozen weights to the devices of each further replica.

        A weight that is divided is first joined on the devices that have it, one weight
        after the other. Otherwise, it would be copied by the host.
        """
        bases: list[Base] = [{} for _ in self.further]
        every = [
            (base, stage.placement, weight_specs(stage.spec))
            for stage, base in zip(self.further, bases, strict=True)
        ]
        for path, x in params.items() if every else ():
            whole, copies = one_copy(x), []
            for base, placement, specs in every:
                base[path] = jax.device_put(whole, placement.sharding(specs[path]))
                copies.append(base[path])
            if whole is not x:
                jax.block_until_ready(copies)
        return bases

    def num_compilations(self) -> int:
        """Programs compiled so far for these stages, in this process."""
        each = *self.stages, *self.further
        return sum(stage.steps.num_compilations() for stage in each)


def _device_of(base: Base | None) -> Any:
    """Returns where the slots of a run without a mesh are: where the base is."""
    if base is None:
        return ONE_DEVICE.committed(PartitionSpec())
    device = next(iter(base.values())).sharding
    if isinstance(device, NamedSharding):  # the base may be divided; slots are not
        return NamedSharding(device.mesh, PartitionSpec())
    return device


def _further_placements(
    stages: MeshStages,
    first: StageSharding,
    devices: Sequence[jax.Device] | None,
) -> list[StageSharding]:
    """Places replicas on the devices that the first one does not use.

    Raises:
        ConfigError: The base is on several devices and the first replica is not, or
            there are too few.
    """
    if not stages.further:
        return []
    used = first.committed(PartitionSpec()).device_set
    if len(used) > stages.sizes.num_devices:
        raise ConfigError(
            f"replicas: the base is on {len(used)} devices, and the first replica is "
            "one. Load it on one device, or leave replicas out."
        )
    every = jax.local_devices() if devices is None else devices
    left = [device for device in every if device not in used]
    wanted = sum(one.tensor for one in stages.further)
    if len(left) < wanted:
        raise ConfigError(
            f"replicas: {wanted} devices are needed beside those of the first one, "
            f"and there are {len(left)}. Lower a count."
        )
    placed, devices_left = [], iter(left)
    for one in stages.further:
        own = list(itertools.islice(devices_left, one.tensor))
        if len(own) == 1:
            placed.append(StageSharding(device=SingleDeviceSharding(own[0])))
        else:
            (mesh,) = stage_meshes(MeshSizes(tensor=len(own)), own)
            placed.append(StageSharding(mesh=mesh))
    return placed


def one_copy(x: jax.Array) -> jax.Array:
    """Returns the whole array on one device, from which it goes to other replicas.

    JAX copies an array between devices without the host if it is whole on one of them.
    """
    if not x.is_fully_replicated:
        assert isinstance(x.sharding, NamedSharding)
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
    return x if len(x.sharding.device_set) == 1 else x.addressable_data(0)
