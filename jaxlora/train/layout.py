"""How a run's decoder and its slots lie on the devices of a mesh."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlora.adapters.placement import ONE_DEVICE, Placement
from jaxlora.adapters.slots import SlotTable
from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.counted import counted
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.load import Place
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.forward import Base
from jaxlora.models.layer import Remat
from jaxlora.models.sharded import EMBEDDING, base_spec
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.step import CompiledSteps, compiled_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline; without a pipeline, the only one.

    Attributes:
        spec: The decoder's layers of this stage.
        placement: The devices of the stage.
    """

    spec: DecoderSpec
    placement: Placement

    @functools.cached_property
    def steps(self) -> CompiledSteps:
        """The compiled functions of this stage, which all runs of a process share."""
        return compiled_steps(self.spec, self.placement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The stages of a decoder.

    Attributes:
        stages: The stages, from the embedding to the head.
        in_flight: Ticks in flight on the first stage.
    """

    stages: tuple[Stage, ...]
    in_flight: int

    @classmethod
    def on_one_device(cls, spec: DecoderSpec, base: Base | None = None) -> "Layout":
        """Returns the layout of a run without a mesh.

        Args:
            spec: The decoder.
            base: The frozen weights, if the device is theirs; None: JAX's default.
        """
        device = None if base is None else next(iter(base.values())).sharding
        if isinstance(device, NamedSharding):  # the base may be divided; slots are not
            device = NamedSharding(device.mesh, PartitionSpec())
        placement = dataclasses.replace(ONE_DEVICE, device=device)
        return cls(stages=(Stage(spec=spec, placement=placement),), in_flight=1)

    def with_remat(self, remat: Remat) -> "Layout":
        """Returns the same stages with another part of each layer recomputed."""
        stages = tuple(
            dataclasses.replace(stage, spec=stage.spec.with_remat(remat))
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=stages)

    @property
    def num_lanes(self) -> int:
        """Number of microbatches that the devices of a stage run at the same time."""
        return self.stages[0].placement.num_devices

    def empty_slots(self) -> StagedSlots:
        """Makes the slots of all stages, without adapters."""
        tables = [
            SlotTable(s.spec, s.steps.write_slot, s.placement) for s in self.stages
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
                for path, spec in stage.spec.base_specs().items()
            }
            for stage in self.stages
        ]

    def num_compilations(self) -> int:
        """Programs compiled so far for these stages, in this process."""
        return sum(stage.steps.num_compilations() for stage in self.stages)


def make_layout(
    spec: DecoderSpec,
    sizes: MeshSizes,
    borders: Sequence[int],
    *,
    is_pinned: bool = False,
    in_flight: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Layout:
    """Lays a decoder out on a mesh.

    Args:
        spec: The decoder.
        sizes: Sizes of the mesh, of more than one device.
        borders: Layers at which the stages begin and end, from 0 to L.
        is_pinned: Whether slots are divided among replicas; see `Placement`.
        in_flight: Ticks in flight on the first stage; None: the number of stages.
        devices: Devices to choose from; None: all of them.

    Raises:
        ValueError: There are too few devices, or the slots cannot be divided.
    """
    assert spec.slots is not None
    if is_pinned and spec.slots.num_slots % sizes.data:
        raise ValueError(
            f"{counted(spec.slots.num_slots, 'slot')} cannot be divided among "
            f"{sizes.data} replicas."
        )
    spec = with_fsdp(spec, sizes.fsdp)
    meshes = stage_meshes(sizes, devices)
    stages = tuple(
        Stage(
            spec=spec.stage(start, stop),
            placement=Placement(mesh=mesh, is_pinned=is_pinned),
        )
        for mesh, (start, stop) in zip(meshes, itertools.pairwise(borders), strict=True)
    )
    return Layout(stages=stages, in_flight=in_flight or sizes.stage)


def with_fsdp(spec: DecoderSpec, fsdp: int) -> DecoderSpec:
    """Returns the decoder with its weights divided among a number of devices."""
    return dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, fsdp=fsdp)
    )


def base_placement(
    sizes: MeshSizes,
    borders: Sequence[int],
    devices: Sequence[jax.Device] | None = None,
) -> Place:
    """Returns where each array goes while a checkpoint is read.

    A tied embedding goes to the first stage; `Layout.bases` copies it to the last.

    Args:
        sizes: Sizes of the mesh.
        borders: Layers at which the stages begin and end.
        devices: Devices to choose from; None: all of them.
    """
    meshes = stage_meshes(sizes, devices)

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Raises ValueError if the array cannot be divided among the devices."""
        mesh = meshes[_stage_number(path, borders)]
        return NamedSharding(mesh, base_spec(path, shape, sizes.fsdp))

    return place


def _stage_number(path: str, borders: Sequence[int]) -> int:
    """Returns the stage that a frozen weight is read to."""
    if path == EMBEDDING:
        return 0
    match path.split(".", 2):
        case "layers", number, _:
            return bisect.bisect_right(borders, int(number)) - 1
    return len(borders) - 2


def base_specs_of(
    config: ModelConfig, dtype: np.dtype, fsdp: int
) -> dict[str, PartitionSpec]:
    """Returns how each weight of a model is divided; see `DecoderSpec.base_specs`.

    Raises:
        ValueError: A weight cannot be divided among so many devices.
    """
    return _without_slots(config, dtype, fsdp).base_specs()


def _without_slots(config: ModelConfig, dtype: np.dtype, fsdp: int) -> DecoderSpec:
    options = DecoderOptions(dtype=dtype, max_segment_tokens=1, fsdp=fsdp)
    return DecoderSpec(config=config, options=options)
