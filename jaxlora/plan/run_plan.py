"""The plan of a run: all that is decided before weights are loaded, as one value.

`resolve` makes it. `jaxlora plan` prints it, and the trainer loads, compiles and runs
it, so they refuse the same runs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError
from jaxlora.hf.load import Place
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.length_classes import shortest_class
from jaxlora.objectives.table import OBJECTIVES
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.lanes import replica_lanes, run_lanes, window_cost
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.memory.device_memory import format_bytes
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.memory.need import MemoryNeed
from jaxlora.plan.mesh.predict import (
    Rates,
    adapter_share,
    replica_seconds,
    shape_seconds,
    window_seconds,
)
from jaxlora.plan.stages import MeshStages, base_placement
from jaxlora.scheduler import CostModel, Lanes, Limits, Schedule
from jaxlora.scheduler.simulate import simulate
from jaxlora.scheduler.stream.state import Rules

# A microbatch takes at least as long, as the host launches its kernels. Ten
# milliseconds were measured for 448 tokens of a model of 135M parameters on an H100.
_LEAST_SECONDS = 0.01
_UNKNOWN_SECONDS = 0.1  # of a microbatch, where the rates of the device are not known


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The shapes of microbatches beside the largest one, which is their capacity.

    Attributes:
        tokens: The shapes, in ascending order; empty: all microbatches have one shape.
        from_tick: First tick that may have one of them. Before it, their programs are
            compiled beside training.
    """

    tokens: tuple[int, ...] = ()
    from_tick: int = 0

    @staticmethod
    def of(config: RunConfig, stages: MeshStages, rates: Rates) -> "Shapes":
        """Returns the shapes of a run.

        Args:
            config: The run, with a mesh and a capacity.
            stages: Its stages.
            rates: What the time follows from.
        """
        if not config.microbatch_shapes:
            return Shapes()
        capacity, seconds = config.limits.capacity, _UNKNOWN_SECONDS
        if rates.are_known:
            each = shape_seconds(stages, capacity, rates).stages
            passes = [stage.forward + stage.backward for stage in each]
            seconds = max(_LEAST_SECONDS, *(both(capacity, 0) for both in passes))
        shapes = Shapes(
            tokens=tuple(sorted(set(config.microbatch_shapes))),
            from_tick=math.ceil(config.shape_compile_seconds / seconds),
        )
        return shapes.below(capacity)

    def below(self, capacity: int) -> "Shapes":
        """Returns the shapes that are smaller than a capacity."""
        tokens = tuple(n for n in self.tokens if n < capacity)
        return dataclasses.replace(self, tokens=tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan:
    """All decisions about a run that are made before its weights are loaded.

    Attributes:
        config: The run; none of `mesh`, `microbatch_tokens` and `remat` is `auto`.
        model: The base model.
        stages: The decoder with its slots, in the stages of the mesh.
        lanes: The lanes for which microbatches are packed.
        bounds: Bounds of the capacity, and what an automatic `remat` may become when
            the step is compiled.
        shapes: Shapes of microbatches beside that of the capacity.
        rates: What the predicted time follows from.
        need: Memory of the compiled run, which `fit` finds; None: it is not known.
        ended: Jobs of the run that had ended when it was planned. Neither slots nor
            microbatches have to hold them.
        notes: The reasons, for the log.
    """

    config: RunConfig
    model: PlannedModel
    stages: MeshStages
    lanes: Lanes
    bounds: Bounds
    shapes: Shapes = Shapes()
    rates: Rates
    need: MemoryNeed | None = None
    ended: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def spec(self) -> DecoderSpec:
        """The whole decoder with its slots."""
        return self.stages.spec

    @property
    def num_slots(self) -> int:
        """Number of jobs that may run at the same time."""
        assert self.spec.slots is not None
        return self.spec.slots.num_slots

    @functools.cached_property
    def cost(self) -> CostModel:
        """Estimated time of a microbatch on each stage."""
        return window_cost(self.config, self.model.config, self.shapes.tokens)

    @property
    def rules(self) -> Rules:
        """Settings that all microbatches of the run share."""
        config = self.config
        limits = dataclasses.replace(
            config.limits,
            max_samples=self._max_samples,
            max_jobs=self.spec.options.most_adapters,
        )
        return Rules(
            limits=limits,
            lanes=self.lanes,
            cost=self.cost,
            shapes_from=self.shapes.from_tick,
            packer=config.packer,
            num_batches=config.window_steps,
            pace=config.settled_pace,
        )

    @property
    def _max_samples(self) -> int | None:
        """Most samples in a microbatch of the capacity; None: any number.

        cuDNN has room for a number of short segments. The executor splits what would
        not fit, so a plan that knows the room has fewer microbatches. Where samples of
        some jobs are groups of segments and others are not, only the executor knows.
        """
        options = self.spec.options
        sizes = {OBJECTIVES[name].group_size for name in options.objectives}
        if options.attention != "cudnn" or len(sizes) > 1:
            return None
        short = shortest_class(self.config.limits.capacity, *options.lengths)
        return short.segments // sizes.pop()

    @property
    def place(self) -> Place | None:
        """Placement of weights while they are read; None: all on one device."""
        if self.stages.sizes.num_devices == 1:
            return None
        return base_placement(self.stages)

    def with_config(self, config: RunConfig) -> "RunPlan":
        """Returns the plan with another capacity or `remat`; its stages stay."""
        stages = self.stages.with_remat(config.weakest_remat)
        shapes = self.shapes.below(config.limits.capacity)
        return dataclasses.replace(self, config=config, stages=stages, shapes=shapes)

    @property
    def further_limits(self) -> list[Limits]:
        """Limits of the microbatches of the further shapes, the largest first."""
        return [
            dataclasses.replace(self.config.limits, capacity=tokens)
            for tokens in reversed(self.shapes.tokens)
        ]

    def alone(self, config: RunConfig, job: PreparedJob) -> "RunPlan":
        """Returns the plan of a run in which one job has the mesh to itself.

        Args:
            config: The run, with this job and one slot.
            job: The job.
        """
        assert self.spec.slots is not None
        slots = dataclasses.replace(self.spec.slots, num_slots=1)
        spec = dataclasses.replace(self.spec, slots=slots)
        plan = laid_out(config, self.model, spec, [job], self.bounds, self.rates)
        shapes = self.shapes.below(config.limits.capacity)
        return dataclasses.replace(plan, shapes=shapes)

    def replica_notes(self, programs: Sequence[StagePrograms]) -> list[Note]:
        """Says how much memory each further replica needs.

        Args:
            programs: The compiled passes of each.

        Raises:
            ConfigError: A replica needs more than there is.
        """
        notes, available = [], None if self.need is None else self.need.available
        pairs = zip(self.stages.further, programs, strict=True)
        for number, (shape, own) in enumerate(pairs, start=2):
            needed = self.stages.further_bytes(shape, own, self.config.limits)
            if needed is None:
                continue
            text = (
                f"{format_bytes(needed)} needed on replica {number} with microbatches "
                f"of {shape.tokens} tokens"
            )
            if available is not None and needed > available.num_bytes:
                raise ConfigError(
                    f"replicas: {text}, and there are "
                    f"{format_bytes(available.num_bytes)} ({available.source}). Lower "
                    "its microbatch_tokens."
                )
            notes.append(Note(f"memory: {text}"))
        return notes

    def seconds(
        self, schedule: Schedule, *, is_part: bool = False, num_changes: int = 0
    ) -> float | None:
        """Predicts the time of microbatches, without evaluations and checkpoints.

        Args:
            schedule: The microbatches.
            is_part: See `window_seconds`.
            num_changes: How many times a job starts in a slot, or leaves it.

        Returns:
            Seconds; None: the rates of the device are not known.
        """
        if not self.rates.are_known:
            return None
        args = self.stages, self.lanes, schedule, self.rates, self.shapes.tokens
        return window_seconds(*args, is_part=is_part, num_changes=num_changes)

    def pipeline_figures(self, schedule: Schedule) -> dict[str, Any]:
        """Predicts how busy the stages are in a schedule; empty without stages.

        Returns:
            `bubble`, the fraction of the time of all stages in which nothing runs, and
            `stages`, the fraction of the time in which each stage works.
        """
        pipeline, lanes = self.lanes.pipeline, self.lanes.num_lanes
        if pipeline.num_stages == 1:
            return {}
        found = simulate(schedule, self.cost, pipeline, num_lanes=lanes)
        busy = [round(share, 4) for share in found.utilization]
        return {"bubble": round(found.bubble, 4), "stages": busy}


def laid_out(
    config: RunConfig,
    model: PlannedModel,
    spec: DecoderSpec,
    jobs: Sequence[PreparedJob],
    bounds: Bounds,
    rates: Rates,
) -> RunPlan:
    """Divides the decoder into stages, and makes the lanes.

    Args:
        config: The run; none of its settings is `auto`.
        model: The base model.
        spec: The decoder with its slots.
        jobs: Jobs of the run.
        bounds: Bounds of the capacity.
        rates: What the predicted time follows from.
    """
    stages, lanes = MeshStages.of(config, spec), run_lanes(config)
    if len(shapes := config.replica_shapes) > 1:
        seconds = {one: replica_seconds(stages, one, rates) for one in set(shapes)}
        lanes = replica_lanes(shapes, seconds)
    return RunPlan(
        config=config,
        model=model,
        stages=stages,
        lanes=lanes,
        bounds=bounds,
        rates=rates,
        notes=(
            *_mesh_notes(stages),
            *_program_notes(stages),
            *_tensor_notes(stages, jobs),
        ),
    )


def _tensor_notes(stages: MeshStages, jobs: Sequence[PreparedJob]) -> list[Note]:
    """Says what adapters add to the exchanges along `tensor`, in the job with most."""
    tensors = {stages.sizes.tensor, *(one.tensor for one in stages.further)} - {1}
    if not jobs:
        return []
    smallest, notes = min(jobs, key=lambda job: job.batch_tokens), []
    for tensor in sorted(tensors):
        share = adapter_share(stages.like(tensor), smallest.batch_tokens)
        text = (
            f"tensor={tensor}: the adapter of {smallest.name} adds {share:.1%} to what "
            f"its batches of about {smallest.batch_tokens:,.0f} tokens exchange"
        )
        notes.append(Note(text))
    return notes


def _program_notes(stages: MeshStages) -> list[Note]:
    """Says how many layers each program has, if these are not all."""
    size = stages.spec.options.layers_per_program
    if size is None:
        return []
    num = stages.spec.config.num_layers
    return [Note(f"layers_per_program: {size} of {num} layers; alike ones share it")]


def _mesh_notes(stages: MeshStages) -> list[Note]:
    sizes = stages.sizes
    if sizes.num_devices == 1 or stages.further:
        return []
    described = f"{sizes.num_devices} devices"
    if sizes.stage > 1:
        ranges = [spec.layer_numbers for spec in stages.specs]
        layers = ", ".join(f"{r.start} to {r.stop - 1}" for r in ranges)
        described = f"stages with the layers {layers}"
    return [Note(f"mesh {sizes}: {described}")]
