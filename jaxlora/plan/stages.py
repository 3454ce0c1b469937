"""Memory of a run on the devices of a mesh, stage by stage; one device is a mesh."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding

from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import ReplicaShape
from jaxlora.costs.gpus import DeviceSpeed, find_speed
from jaxlora.costs.stages import stage_borders
from jaxlora.errors import ConfigError
from jaxlora.hf.load import Place
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.config import ModelConfig
from jaxlora.models.division import weight_specs
from jaxlora.models.options import DecoderOptions, Remat
from jaxlora.models.sections import chosen_layers
from jaxlora.models.slot_modules import EMBEDDING, TOKEN_ROWS
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.tensor_parallel import check_divides, check_experts_divide
from jaxlora.pallas_kernels.device import device_kind
from jaxlora.plan.memory.estimate import StepBytes, part_bytes, stage_estimated
from jaxlora.plan.memory.footprint import (
    Footprint,
    StagePrograms,
    StageUse,
    stage_measured,
    stage_resident,
)
from jaxlora.scheduler import Limits
from jaxlora.sharding.mesh import stage_meshes
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.sharding.pipeline import RUN_AHEAD, ticks_ahead

# Ticks in flight of a run with `replicas`: the one that runs, and the one before it,
# whose optimizer steps wait for the slowest replica.
REPLICA_TICKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshStages:
    """The stages of a run's decoder, and how the devices of each one are used.

    Attributes:
        spec: The whole decoder.
        sizes: Sizes of the mesh.
        borders: Layers at which the stages begin and end, from 0 to L.
        in_flight: Microbatches that each device of the first stage has in flight.
        further: Replicas beside the stages, on devices of their own. The stages have
            the slots, and take all optimizer steps.
    """

    spec: DecoderSpec
    sizes: MeshSizes
    borders: tuple[int, ...]
    in_flight: int
    further: tuple[ReplicaShape, ...] = ()

    @staticmethod
    def of(
        config: RunConfig,
        spec: DecoderSpec,
        *,
        speed: DeviceSpeed | None = None,
    ) -> "MeshStages":
        """Divides the decoder of a run into the stages of its mesh.

        Args:
            config: The run; its mesh is not `auto`.
            spec: The whole decoder.
            speed: Rates of each device; None: those of the present device.

        Raises:
            ConfigError: The mesh has more stages than the model has layers.
        """
        sizes = config.mesh_sizes
        options = dataclasses.replace(
            spec.options, layers_per_program=_layers_per_program(config, spec)
        )
        spec = dataclasses.replace(spec, options=options)
        if speed is None:
            speed = find_speed(device_kind())
        further = config.replica_shapes[1:]
        # A pipeline of one stage has no use for more.
        in_flight = config.pipeline_microbatches if sizes.stage > 1 else None
        return MeshStages(
            spec=spec,
            sizes=sizes,
            borders=stage_borders(spec, sizes.stage, speed),
            in_flight=in_flight or (REPLICA_TICKS if further else sizes.stage),
            further=further,
        )

    @functools.cached_property
    def specs(self) -> tuple[DecoderSpec, ...]:
        """The stages, from the embedding to the head."""
        if self.sizes.stage == 1:
            return (self.spec,)
        return tuple(
            self.spec.stage(*pair) for pair in itertools.pairwise(self.borders)
        )

    def further_spec(self, shape: ReplicaShape) -> DecoderSpec:
        """Returns the decoder of a further replica, for the samples that fit there.

        Its slots have weights and gradients, and no optimizer state.
        """
        options, slots = self.spec.options, self.spec.slots
        assert slots is not None
        longest = min(options.max_segment_tokens, shape.tokens)
        return dataclasses.replace(
            self.spec,
            options=dataclasses.replace(options, max_segment_tokens=longest),
            slots=dataclasses.replace(slots, optimizers=()),
        )

    def further_bytes(
        self, shape: ReplicaShape, programs: StagePrograms, limits: Limits
    ) -> int | None:
        """Returns the memory of each device of a further replica.

        Args:
            shape: The replica.
            programs: Its compiled passes.
            limits: Limits of the microbatches of the run.

        Returns:
            Bytes; None: the compiler reports none.
        """
        use = self.like(shape.tensor).use(0)
        limits = dataclasses.replace(limits, capacity=shape.tokens)
        found = stage_measured(self.further_spec(shape), programs, limits, use)
        return None if found is None else found.total_bytes(shape.tokens)

    def with_remat(self, remat: Remat) -> "MeshStages":
        """Returns the same layers on each stage, with another part recomputed."""
        return dataclasses.replace(self, spec=self.spec.with_remat(remat))

    def like(self, tensor: int) -> "MeshStages":
        """Returns the same stages with another number of devices along `tensor`."""
        sizes = dataclasses.replace(self.sizes, tensor=tensor)
        return dataclasses.replace(self, sizes=sizes, further=())

    def use(self, number: int) -> StageUse:
        """Returns how the devices of a stage are used.

        A device keeps the microbatches that its forward passes are ahead, and the one
        that it runs. It holds the hidden states of those that the stage before is
        further ahead, of those that come and go, and of those that the host has queued
        and the device has not reached: copies of them free their source when they are
        done. The last stage runs both passes of a microbatch at once.

        Args:
            number: Number of the stage.
        """
        sizes, ahead = self.sizes, ticks_ahead(self.sizes.stage, self.in_flight)
        num_before = ahead[number - 1] if number else ahead[0]
        num_waiting = num_before - ahead[number] + 2 + RUN_AHEAD
        return StageUse(
            num_shards=sizes.fsdp,
            num_parts=sizes.num_lanes,
            num_kept=ahead[number] + 1,
            num_waiting=num_waiting if sizes.stage > 1 else 0,
            num_tensor=sizes.tensor,
            num_expert=sizes.expert,
        )

    @property
    def used(self) -> list[tuple[DecoderSpec, StageUse]]:
        """The stages, each with how its devices are used."""
        return [(spec, self.use(number)) for number, spec in enumerate(self.specs)]

    def describe(self, number: int) -> str:
        """Describes the devices of a stage, for errors; empty on a single device."""
        if self.further:
            return " on replica 1"
        if self.sizes.num_devices == 1:
            return ""
        if self.sizes.stage == 1:
            return f" on each device of mesh {self.sizes}"
        layers = self.specs[number].layer_numbers
        return (
            f" on each device of stage {number + 1} of mesh {self.sizes} (layers "
            f"{layers.start} to {layers.stop - 1})"
        )


def _layers_per_program(config: RunConfig, spec: DecoderSpec) -> int | None:
    """Returns the layers that each program of a run has; None: it has all of a stage.

    Raises:
        ConfigError: The run asks for a number that it cannot have.
    """
    asked, sizes = config.layers_per_program, config.mesh_sizes
    if isinstance(asked, int) and asked >= spec.config.num_layers:
        return None
    why = None
    if sizes.stage > 1:
        why = f"the stages of mesh {sizes} are programs of their own"
    elif spec.config.tie_embeddings and TOKEN_ROWS.name in spec.trained_modules:
        why = (
            "slots train rows of an embedding that is also the head, which is another "
            "program then"
        )
    if asked == "auto":
        # Nothing would run beside the gather of each program's first layer.
        is_whole = why or sizes.fsdp > 1 or config.replica_shapes
        return None if is_whole else chosen_layers(spec)
    if why:
        raise ConfigError(
            f"layers_per_program: {asked} is not supported, as {why}. Set auto, or at "
            f"least {spec.config.num_layers}, the number of layers."
        )
    return asked


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshFootprint:
    """Memory of a run on the devices of each stage.

    Attributes:
        stages: The footprint of each stage on each of its devices.
    """

    stages: tuple[Footprint, ...]

    def tightest(self, num_tokens: int) -> int:
        """Returns the stage that needs the most memory with these microbatches."""
        needed = [stage.total_bytes(num_tokens) for stage in self.stages]
        return needed.index(max(needed))

    def total_bytes(self, num_tokens: int) -> int:
        """Bytes that a device of the tightest stage needs."""
        return max(stage.total_bytes(num_tokens) for stage in self.stages)

    def fitting_tokens(self, num_bytes: int) -> int:
        """Tokens of the largest microbatches that fit all stages; below 1 if none."""
        return min(stage.fitting_tokens(num_bytes) for stage in self.stages)


def resident_footprint(stages: MeshStages) -> MeshFootprint:
    """The footprint of weights and slots alone, without a training step."""
    found = tuple(stage_resident(spec, use) for spec, use in stages.used)
    return MeshFootprint(stages=found)


def estimated_footprint(
    stages: MeshStages, block_tokens: int, num_tokens: int | None
) -> MeshFootprint:
    """Estimates the footprint of a run at one capacity.

    Args:
        stages: Stages of the run.
        block_tokens: Tokens of a block.
        num_tokens: Tokens of a microbatch; None: a lower bound for every capacity, see
            `step_bytes`.
    """
    sizes = stages.sizes
    given = sizes.tensor, block_tokens, num_tokens, sizes.expert
    found = part_bytes(stages.spec, *given)
    return stages_footprint(stages, found)


def stages_footprint(stages: MeshStages, found: StepBytes) -> MeshFootprint:
    """Returns the footprint of a run whose step needs these bytes per token.

    Args:
        stages: Stages of the run.
        found: Those of the whole decoder, or of the part that each device runs.
    """
    each = tuple(stage_estimated(spec, found, use) for spec, use in stages.used)
    return MeshFootprint(stages=each)


def measured_footprint(
    stages: MeshStages, programs: Sequence[StagePrograms], limits: Limits
) -> MeshFootprint | None:
    """Returns the footprint that the compiler reports; None if it reports none.

    Args:
        stages: The stages.
        programs: The compiled passes of each stage.
        limits: Limits of the microbatches that they were compiled for.
    """
    pairs = zip(stages.used, programs, strict=True)
    found = [stage_measured(spec, own, limits, use) for (spec, use), own in pairs]
    known = tuple(stage for stage in found if stage is not None)
    return MeshFootprint(stages=known) if len(known) == len(found) else None


def divided(spec: DecoderSpec, sizes: MeshSizes) -> DecoderSpec:
    """Returns the decoder, or layers of it, divided among the devices of a stage."""
    return spec.divided(fsdp=sizes.fsdp, expert=sizes.expert, tensor=sizes.tensor)


def base_placement(stages: MeshStages) -> Place:
    """Returns where each array goes while a checkpoint is read.

    A tied embedding goes to the first stage; `Layout.bases` copies it to the last.

    Args:
        stages: The stages of the run.
    """
    meshes = stage_meshes(stages.sizes)
    specs = weight_specs(divided(stages.spec, stages.sizes))

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        del shape
        mesh = meshes[_stage_number(path, stages.borders)]
        return NamedSharding(mesh, specs[path])

    return place


def _stage_number(path: str, borders: Sequence[int]) -> int:
    """Returns the stage that a frozen weight is read to."""
    if path == EMBEDDING:
        return 0
    match path.split(".", 2):
        case "layers", number, _:
            return bisect.bisect_right(borders, int(number)) - 1
    return len(borders) - 2


def check_division(
    config: ModelConfig,
    dtype: np.dtype,
    sizes: MeshSizes,
    base_format: BaseFormat | None = None,
) -> None:
    """Checks that the weights of a model can be divided among the devices of a stage.

    Raises:
        ValueError: They cannot.
    """
    check_divides(config, sizes.tensor, base_format)
    check_experts_divide(config, sizes.expert)
    if sizes.expert > 1 and sizes.tensor > 1:
        raise ValueError(
            f"the mesh {sizes} has both expert and tensor, which divide experts in two "
            "ways. Leave one of them out, or divide the weights along fsdp."
        )
    options = DecoderOptions(dtype=dtype, max_segment_tokens=1)
    weight_specs(divided(DecoderSpec(config=config, options=options), sizes))
