"""Chooses the compiled shapes of a run's microbatches, and when they are used."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxlora.common.note import Note
from jaxlora.config import RunConfig
from jaxlora.memory.mesh import MeshStages
from jaxlora.scheduler import CostModel, Lanes, Sample
from jaxlora.scheduler.streams.buckets import Buckets, choose
from jaxlora.train.plan.auto_mesh.predict import Rates, shape_seconds
from jaxlora.train.plan.job_slots import JobPosition
from jaxlora.train.plan.prepared_job import PreparedJob

# Part of the run that is packed to choose by: full ticks, and samples.
_MAX_TICKS, _MAX_SAMPLES = 48, 1024
# Shapes that are tried, in eighths of the capacity.
_EIGHTHS = (1, 2, 3, 4, 6)
# A microbatch takes at least as long, as the host launches its kernels. Ten
# milliseconds were measured for 448 tokens of a model of 135M parameters on an H100.
_LEAST_SECONDS = 0.01
# A microbatch lasts longer where programs of several shapes take turns: by 9 ms for 30
# layers of a model of 135M parameters and by 7 ms for 16 layers of 1B on an H200. As a
# multiple of a layer's time without any tokens.
_TURN = 1.3
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

    def below(self, capacity: int) -> "Shapes":
        """Returns the shapes that are smaller than a capacity."""
        tokens = tuple(n for n in self.tokens if n < capacity)
        return dataclasses.replace(self, tokens=tokens)


ONE_SHAPE = Shapes()


def choose_shapes(
    config: RunConfig,
    stages: MeshStages,
    lanes: Lanes,
    positions: Callable[[], Sequence[JobPosition]],
    jobs: Sequence[PreparedJob],
    rates: Rates,
) -> tuple[Shapes, list[Note]]:
    """Chooses the shapes of a run, and says why.

    An automatic choice is made by simulation. There is one shape if others would save
    less time than they may take to compile, or if the time is not known.

    Args:
        config: The run, with a mesh and a capacity.
        stages: Its stages.
        lanes: Its lanes.
        positions: Returns the positions of the jobs at the start.
        jobs: The jobs.
        rates: What the time follows from.
    """
    asked, capacity = config.microbatch_shapes, config.limits.capacity
    is_known, limit = rates.are_known, config.shape_compile_seconds
    if asked == () or (asked == "auto" and not (is_known and config.packer == "joint")):
        return ONE_SHAPE, []
    cost = shape_seconds(stages, capacity, rates)
    both = [s.forward + s.backward for s in cost.stages]
    tick_seconds = max(_LEAST_SECONDS, *(each(capacity, 0) for each in both))
    if not is_known:
        tick_seconds = _UNKNOWN_SECONDS
    from_tick = math.ceil(limit / tick_seconds)
    if asked != "auto":
        shapes = Shapes(tokens=tuple(sorted(set(asked))), from_tick=from_tick)
        return shapes.below(capacity), []
    found, seconds = _simulated(config, stages, lanes, positions(), jobs, cost)
    layers = stages.spec.config.num_layers / stages.sizes.stage
    turn = _TURN * rates.links.speed.layer_seconds * layers
    found = dataclasses.replace(found, time=found.time + turn * found.num_ticks)
    saved = (seconds - limit) * (1 - found.time / found.single_bucket_time)
    if len(found.sizes) == 1 or saved < limit:
        return ONE_SHAPE, []
    shapes = Shapes(tokens=found.sizes[:-1], from_tick=from_tick)
    return shapes, [Note(_describe(found, shapes))]


def _simulated(
    config: RunConfig,
    stages: MeshStages,
    lanes: Lanes,
    positions: Sequence[JobPosition],
    jobs: Sequence[PreparedJob],
    cost: CostModel,
) -> tuple[Buckets, float]:
    """Returns the best shapes for a part of a run, and the time of all of it in one."""
    assert stages.spec.slots is not None
    running = list(positions[: stages.spec.slots.num_slots])
    most = _MAX_TICKS * lanes.num_lanes * config.limits.capacity
    samples = _some_samples(running, jobs, most)
    candidates = _candidates(config)
    found = choose(samples, config.limits, lanes, cost, candidates=candidates)
    part = sum(s.num_tokens for s in samples) / sum(p.tokens_left for p in positions)
    return found, found.single_bucket_time / part


def _candidates(config: RunConfig) -> list[int]:
    """Returns shapes to choose from, multiples of a large power of two."""
    capacity, unit = config.limits.capacity, config.block_tokens
    while 16 * unit <= capacity:
        unit *= 2
    sizes = {math.ceil(capacity * n / 8 / unit) * unit for n in _EIGHTHS}
    return sorted(size for size in sizes if size < capacity)


def _some_samples(
    positions: Sequence[JobPosition], jobs: Sequence[PreparedJob], most_tokens: int
) -> list[Sample]:
    """Returns the first batches of each job, the same part of each."""
    steps = {p.job: p.num_steps - p.step for p in positions}
    num = sum(n * jobs[job].settings.batch_size for job, n in steps.items())
    part = min(
        1.0,
        most_tokens / sum(p.tokens_left for p in positions),
        _MAX_SAMPLES / num,
    )
    return [
        Sample(owner=p.job, batch=step, index=i, num_tokens=int(tokens))
        for p in positions
        for step in range(p.step, p.step + max(1, round(part * steps[p.job])))
        for i, tokens in enumerate(jobs[p.job].lengths(step))
    ]


def _describe(found: Buckets, shapes: Shapes) -> str:
    *others, last = (f"{n:,}" for n in found.sizes)
    speed, fill = found.single_bucket_time / found.time, found.single_bucket_fill
    return (
        f"microbatch_shapes: auto: {', '.join(others)} and {last} tokens fill "
        f"{found.fill:.0%} of the microbatches, {last} alone {fill:.0%}; predicted "
        f"{speed:.2f} times as fast. Used from microbatch {shapes.from_tick + 1:,} on, "
        "and compiled until then"
    )
