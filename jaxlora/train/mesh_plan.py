"""From the mesh of a run file to stages, lanes and the places of weights."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from jaxlora.config import RunConfig
from jaxlora.costs.device_speed import find_speed
from jaxlora.costs.stages import stage_borders
from jaxlora.errors import ConfigError
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.load import BaseModel, Place, base_dtype
from jaxlora.memory.mesh import MeshStages
from jaxlora.models.layer import Remat
from jaxlora.models.spec import DecoderSpec
from jaxlora.pallas_kernels.device import device_kind, num_devices
from jaxlora.scheduler import CostModel, Lanes, Schedule
from jaxlora.scheduler.lanes import ONE_LANE
from jaxlora.scheduler.replicas import Load
from jaxlora.scheduler.simulate import simulate
from jaxlora.sharding.mesh_sizes import MeshSizes
from jaxlora.train.job_run import JobRun
from jaxlora.train.lanes import run_lanes, window_cost
from jaxlora.train.layout import Layout, base_placement, base_specs_of, make_layout

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """The mesh of a run, and the layers of its stages.

    Attributes:
        sizes: Sizes of the mesh.
        borders: Layers at which the stages begin and end, from 0 to L.
    """

    sizes: MeshSizes
    borders: tuple[int, ...]

    @property
    def has_mesh(self) -> bool:
        """Whether there is more than one device."""
        return self.sizes.num_devices > 1

    def place(self) -> Place | None:
        """Returns where weights go while they are read; None: all to one device."""
        return base_placement(self.sizes, self.borders) if self.has_mesh else None


def plan_mesh(config: RunConfig, model: ModelConfig) -> MeshPlan:
    """Chooses the mesh and divides the layers among its stages.

    Args:
        config: The run; its mesh is not `auto`.
        model: Architecture of the model.

    Raises:
        ConfigError: The mesh fits neither the devices nor the model.
    """
    sizes = config.mesh_sizes
    dtype = base_dtype(config.dtype)
    try:
        sizes.check_fits(num_devices())
        base_specs_of(model, dtype, sizes.fsdp)
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error
    borders = stage_borders(
        model,
        sizes.stage,
        find_speed(device_kind()),
        dtype=dtype,
        remat=config.least_remat,
    )
    return MeshPlan(sizes=sizes, borders=borders)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedRun:
    """A run's decoder on its devices.

    Attributes:
        spec: The decoder. It may have more slots than asked for, so that they divide
            among replicas.
        layout: Its stages.
        lanes: The lanes for which windows are packed.
        cost: Estimated time of a microbatch on each stage.
    """

    spec: DecoderSpec
    layout: Layout
    lanes: Lanes
    cost: CostModel

    def memory_stages(self, sizes: MeshSizes) -> MeshStages:
        """Returns the stages as their memory is counted.

        Args:
            sizes: Sizes of the mesh.
        """
        return MeshStages(
            spec=self.spec,
            specs=tuple(stage.spec for stage in self.layout.stages),
            sizes=sizes,
            in_flight=self.layout.in_flight,
            is_pinned=self.lanes.pinned,
        )

    def with_remat(self, remat: Remat) -> "PlacedRun":
        """Returns the run with another part of each layer recomputed."""
        return dataclasses.replace(
            self,
            spec=self.spec.with_remat(remat),
            layout=self.layout.with_remat(remat),
        )

    def pipeline_figures(self, schedule: Schedule) -> dict[str, Any]:
        """Predicts how busy the stages are during a window; empty without stages.

        Returns:
            `bubble`, the fraction of the time of all stages in which nothing runs, and
            `stages`, the fraction of the window in which each stage works.
        """
        pipeline, lanes = self.lanes.pipeline, self.lanes.num_lanes
        if pipeline.num_stages == 1:
            return {}
        found = simulate(schedule, self.cost, pipeline, num_lanes=lanes)
        busy = [round(share, 4) for share in found.utilization]
        return {"bubble": round(found.bubble, 4), "stages": busy}


def plan_layout(
    config: RunConfig,
    plan: MeshPlan,
    spec: DecoderSpec,
    model: BaseModel,
    runs: Sequence[JobRun],
) -> PlacedRun:
    """Lays the decoder out on the mesh, and decides whether replicas share jobs.

    Args:
        config: The run, with a number for `microbatch_tokens`.
        plan: The mesh and its stages.
        spec: The decoder.
        model: The base model.
        runs: Jobs of the run.
    """
    cost = window_cost(config, model.config)
    if not plan.has_mesh:
        layout = Layout.on_one_device(spec, model.params)
        return PlacedRun(spec=spec, layout=layout, lanes=ONE_LANE, cost=cost)
    assert spec.slots is not None
    sizes = plan.sizes
    loads = [
        Load(num_batches=run.num_steps, batch_tokens=run.batch_tokens) for run in runs
    ]
    capacity = config.limits.capacity
    pinning = run_lanes(
        config, loads, capacity=capacity, num_slots=spec.slots.num_slots
    )
    lanes = pinning.lanes
    if lanes.slots_per_replica is not None:
        num_slots = lanes.data * lanes.slots_per_replica
        slots = dataclasses.replace(spec.slots, num_slots=num_slots)
        spec = dataclasses.replace(spec, slots=slots)
    layout = make_layout(
        spec,
        sizes,
        plan.borders,
        is_pinned=lanes.pinned,
        in_flight=lanes.pipeline.in_flight,
    )
    if sizes.data > 1:
        logger.info("replicas: %s", pinning.reason)
    logger.info("mesh %s: %s", sizes, _described(layout))
    return PlacedRun(spec=spec, layout=layout, lanes=lanes, cost=cost)


def _described(layout: Layout) -> str:
    ranges = [stage.spec.layer_numbers for stage in layout.stages]
    if len(ranges) == 1:
        return f"{layout.num_lanes} devices"
    layers = ", ".join(f"{r.start} to {r.stop - 1}" for r in ranges)
    return f"stages with the layers {layers}"
