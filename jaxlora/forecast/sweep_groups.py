"""Plans the configurations of a sweep on groups of GPUs: which, where, and when.

A group holds the base once. Its slots are refilled as configurations end. `scheduler`
has the planner; here are the costs of groups, by what was measured or by estimate.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence

from rich.console import Console

from jaxlora.common.console import show
from jaxlora.config import RunConfig
from jaxlora.costs.stages import decoder_seconds, total
from jaxlora.errors import ConfigError
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.mesh.predict import (
    Rates,
    exchange_seconds,
    shape_seconds,
    step_seconds,
    table_seconds,
)
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stages import (
    MeshStages,
    check_division,
    estimated_footprint,
)
from jaxlora.scheduler.sweep import (
    AnalyticCosts,
    Configuration,
    GroupCosts,
    PlannedSweep,
    StepLine,
    Sweep,
    SweepPlan,
    fewest_gpus,
    one_at_a_time,
    plan_sweep,
)
from jaxlora.scheduler.sweep.report import comparison_table, draw_sweep, group_table
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.sweeps.decisions import compared_steps

# A job's next batch is planned when its step was reported, two microbatches later. So
# the samples of as many, and of the one that trains, keep a group busy; more slots only
# make its tables larger.
_MOST_MICROBATCHES = 3.0

NO_TIME = (
    "groups of GPUs: not planned, as the rates of this device are not known. `jaxlora "
    "profile` measures them, and `jaxlora plan --gpu h100x4` and the like plan for "
    "GPUs that are not here."
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedGroups:
    """The plan of a sweep on groups of GPUs, if no configuration ends early.

    Attributes:
        planned: The plan, with lower bounds of the makespan.
        alone: One configuration at a time on groups of the fewest GPUs, side by side.
        meshes: The mesh of groups, by their number of GPUs.
        capacities: Tokens of their microbatches, at most, by their number of GPUs.
        longest: Tokens of the longest group of samples, which a microbatch must hold.
        notes: Lines that say what the figures follow from.
    """

    planned: PlannedSweep
    alone: SweepPlan
    meshes: dict[int, str]
    capacities: dict[int, int]
    longest: int
    notes: tuple[str, ...]


def plan_groups(
    plan: RunPlan, jobs: Sequence[PreparedJob], machine: Machine
) -> PlannedGroups | None:
    """Plans a sweep on all GPUs of a machine.

    Args:
        plan: The plan of the run. Its mesh and its number of slots do not matter.
        jobs: The configurations.
        machine: The GPUs.

    Returns:
        The plan; None if the rates of the device are not known.

    Raises:
        ConfigError: A configuration fits into no group.
    """
    if not plan.rates.are_known:
        return None
    configurations = tuple(_configuration(plan, job) for job in jobs)
    per_host = max(1, machine.num_devices // machine.num_hosts)
    sweep = Sweep(
        configurations=configurations,
        num_gpus=machine.num_devices,
        max_degree=per_host,
    )
    longest = max(job.longest_group for job in jobs)
    found: dict[int, _Kind] = {}  # the faster mesh of so many GPUs
    for degree in sweep.degrees:
        meshes = [f"{axis}={degree}" for axis in ("fsdp", "stage")]
        kinds = [
            kind
            for mesh in (meshes if degree > 1 else [ONE_DEVICE])
            if (kind := _kind(plan, machine, mesh, configurations, longest)) is not None
        ]
        if kinds:
            found[degree] = min(kinds, key=lambda one: one.costs.step[1].per_token)
    costs = AnalyticCosts(
        by_degree={d: kind.costs for d, kind in found.items()}, pads_ranks=True
    )
    try:
        alone = one_at_a_time(sweep, costs, fewest_gpus(sweep, costs))
        planned = plan_sweep(sweep, costs)
    except ValueError as error:
        raise ConfigError(
            f"the sweep fits into no group of GPUs: {error} Lower rank or max_length, "
            "set remat: layer or quantize_base, or plan for larger GPUs."
        ) from error
    return PlannedGroups(
        planned=planned,
        alone=alone,
        meshes={d: kind.mesh for d, kind in found.items()},
        capacities={d: kind.capacity for d, kind in found.items()},
        longest=longest,
        notes=tuple(_notes(plan, machine)),
    )


def _configuration(plan: RunPlan, job: PreparedJob) -> Configuration:
    batch_size = job.settings.batch_size
    tokens = job.batch_tokens + _evaluated_tokens(plan, job) / max(1, job.num_steps)
    return Configuration(
        name=job.name,
        # Configurations that may join later need slots of `slot_rank`.
        rank=max(plan.config.slot_rank or 1, *(m.rank for m in job.modules.values())),
        batch_size=batch_size,
        num_steps=job.num_steps,
        sample_tokens=max(1, round(tokens / batch_size)),
    )


def _evaluated_tokens(plan: RunPlan, job: PreparedJob) -> float:
    """Tokens that take as long in both passes as all evaluations of a job.

    It is evaluated before its first step, behind its last one, every `eval_every` and
    at rungs, by forward passes.
    """
    assert plan.config.sweep is not None
    if job.eval_data is None:
        return 0.0
    last, every = job.num_steps, job.settings.eval_every
    steps = {0, last} | compared_steps(plan.config.sweep.early_exit, last)
    steps |= set(range(every, last, every)) if every else set()
    whole = total(decoder_seconds(plan.spec, plan.rates.speed))
    return len(steps) * job.eval_data.num_tokens * whole.forward / whole.both


# ---- the costs of groups -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Kind:
    """A mesh that groups may have, with the capacity of their microbatches."""

    mesh: str
    capacity: int
    costs: GroupCosts


def _kind(
    plan: RunPlan,
    machine: Machine,
    mesh: str,
    configurations: Sequence[Configuration],
    longest: int,
) -> _Kind | None:
    """Returns groups with a mesh; None if the run cannot have it."""
    low = min(c.rank for c in configurations)
    high = max(c.rank for c in configurations)
    try:
        config = plan.config.replace(mesh=mesh)
        sizes = config.mesh_sizes
        check_division(plan.model.config, plan.model.dtype, sizes)
        narrow, wide = (
            MeshStages.of(config, _with_slot(plan.spec, rank)) for rank in (low, high)
        )
    except (ValueError, ConfigError):
        # The model does not divide into so many parts, or a setting of the run, such
        # as pipeline_microbatches, is of smaller meshes.
        return None
    room = _room(plan, machine, config, wide, longest)
    if room is None:
        return None
    capacity, free_bytes, slot_bytes = room
    rates = machine.rates(plan.spec, config.network_gbits)
    base, each, full = _tick_seconds(narrow, capacity, rates)
    *_, widest = _tick_seconds(wide, capacity, rates)
    tokens = capacity * sizes.fsdp  # of a tick: each device of a stage has its own
    steps = max(1, high - low)
    rank_token = max(0.0, widest - full) / steps / tokens
    of_low = rank_token * low
    # Each microbatch has the time of all slots' tables, and most end somebody's batch.
    mean = sum(c.step_tokens for c in configurations) / len(configurations)
    most_slots = max(1.0, _MOST_MICROBATCHES * tokens / mean)
    num_ticks = max(1.0, min(most_slots, len(configurations)) * mean / tokens)
    exchange = exchange_seconds(wide, rates) / high
    tables = step_seconds(wide, rates) / high
    tables += max(table_seconds(wide, spec, rates) for spec in wide.specs) / high
    free_bytes = min(free_bytes, most_slots * slot_bytes)
    costs = GroupCosts(
        step=(
            StepLine(
                fixed=base,
                per_token=max(0.0, each / sizes.fsdp - of_low),
                per_rank_token=rank_token,
                per_rank=exchange + tables,
            ),
            StepLine(
                fixed=0.0,
                per_token=max(0.0, full / tokens - of_low),
                per_rank_token=rank_token,
                per_rank=exchange + num_ticks * tables,
            ),
        ),
        free_bytes=sizes.num_devices * free_bytes,
        bytes_per_rank=sizes.num_devices * slot_bytes / high,
    )
    return _Kind(mesh=mesh, capacity=capacity, costs=costs)


def _with_slot(spec: DecoderSpec, rank: int) -> DecoderSpec:
    """Returns the decoder with one slot of a rank."""
    assert spec.slots is not None
    slots = dataclasses.replace(spec.slots, num_slots=1, rank=rank)
    return dataclasses.replace(spec, slots=slots)


def _tick_seconds(
    stages: MeshStages, capacity: int, rates: Rates
) -> tuple[float, float, float]:
    """Returns base, time of a token and time of a full microbatch, both passes.

    In the steady state of a pipeline, the slowest stage sets the pace.
    """
    cost = shape_seconds(stages, capacity, rates)
    both = [
        (s.forward.base + s.backward.base, s.forward.per_token + s.backward.per_token)
        for s in cost.stages
    ]
    base, each = max(both, key=lambda one: one[0] + one[1] * capacity)
    return max(0.0, base), each, base + each * capacity


def _room(
    plan: RunPlan, machine: Machine, config: RunConfig, stages: MeshStages, longest: int
) -> tuple[int, float, float] | None:
    """Returns the capacity, and bytes of a device that are left for slots.

    The capacity is that of the run, or the largest half of it, and so on, with which a
    slot fits.

    Returns:
        Capacity in tokens, bytes for slots, and bytes of a slot; None: no slot fits.
    """
    capacity = config.limits.capacity
    available = machine.memory_of(stages.sizes.num_devices)
    found = estimated_footprint(stages, config.block_tokens, capacity)
    slot = max(stage.adapter_bytes for stage in found.stages)
    if available is None:
        return capacity, float(plan.num_slots * slot), float(slot)
    while capacity >= longest:
        found = estimated_footprint(stages, config.block_tokens, capacity)
        used = max(s.total_bytes(capacity) - s.adapter_bytes for s in found.stages)
        if (free := available.num_bytes - used) >= slot:
            return capacity, float(free), float(slot)
        capacity = capacity // 2 // config.block_tokens * config.block_tokens
    return None


# ---- showing -------------------------------------------------------------------------


def _notes(plan: RunPlan, machine: Machine) -> Iterator[str]:
    profile = plan.rates.profile
    if profile is not None:
        day = profile.measured[:10]
        yield f"Times follow what `jaxlora profile` measured here on {day}."
    else:
        yield (
            "Times are estimates from the GPU's data sheet; `jaxlora profile` measures "
            "them on the GPU."
        )
    if machine.memory is None:
        yield (
            "The memory of the device is not known: a group has as many slots as the "
            "run."
        )
    yield (
        "All configurations go to their last step here, with their evaluations; early "
        "exit takes less. Checkpoints come on top."
    )


def print_groups(
    groups: PlannedGroups, console: Console, *, price_per_hour: float | None = None
) -> None:
    """Prints the makespan beside its bounds, and the groups with slots and ranks.

    Args:
        groups: The plan.
        console: Console to print to.
        price_per_hour: Price of one GPU for an hour, in any currency.
    """
    planned, degree = groups.planned, len(groups.alone.groups[0].gpus)
    gpus = "a GPU" if degree == 1 else f"{degree} GPUs"
    others = {f"one at a time, on {gpus} each": groups.alone}
    table = comparison_table(planned, others, per_gpu_hour=price_per_hour)
    num_gpus = planned.plan.sweep.num_gpus
    title = f"groups of GPUs, {num_gpus} in all" if num_gpus > 1 else "as a sweep"
    for text in (
        "",
        title,
        table,
        "",
        group_table(planned.plan),
        *(f"{d} GPUs: mesh {m}" for d, m in groups.meshes.items() if d > 1),
        *groups.notes,
    ):
        show(console, text, soft_wrap=True)


def draw_groups(groups: PlannedGroups, path: str | os.PathLike) -> None:
    """Draws the plan, and one configuration at a time, as Gantt charts."""
    plans = {"plan": groups.planned.plan, "one at a time": groups.alone}
    draw_sweep(plans, path)
