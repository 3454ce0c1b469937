"""Compares packers on kinds of jobs that are hard to pack, on several pipelines."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlora.bench.scheduler.lengths import jobs
from jaxlora.scheduler import (
    AffineCost,
    CostModel,
    Lanes,
    Limits,
    Pipeline,
    Sample,
    Schedule,
    get_packer,
    joint,
    lower_bound,
    pack_ticks,
    simulate,
    violations,
)
from jaxlora.scheduler.algorithms import lorafusion, mlora
from jaxlora.scheduler.streams.lane_fill import fill_ticks, queue_of
from jaxlora.scheduler.streams.ticks import arrange

STAGES, LANES, LAST_STAGES = (1, 4, 8, 16), (1, 2, 8), (1.0, 1.06)
_PLAIN = joint.Effort(polish_rounds=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Jobs with samples of `lengths`, and the capacity of a microbatch in tokens."""

    lengths: str
    num_samples: tuple[int, ...]
    batch_size: int
    capacity: int = 6144

    def samples(self) -> list[Sample]:
        """Makes the samples."""
        names = [self.lengths] * len(self.num_samples)
        return jobs(names, num_samples=self.num_samples, batch_size=self.batch_size)


KINDS = {
    "1 job": Kind(lengths="mix", num_samples=(96,), batch_size=16),
    "1 job ten times 3 others": Kind(
        lengths="mix", num_samples=(160, 16, 16, 16), batch_size=8
    ),
    "4 jobs, batches of 1": Kind(lengths="mix", num_samples=(24,) * 4, batch_size=1),
    "4 jobs, heavy tail": Kind(
        lengths="heavy", num_samples=(48,) * 4, batch_size=8, capacity=4096
    ),
    "4 jobs": Kind(lengths="mix", num_samples=(96,) * 4, batch_size=16),
    "16 jobs": Kind(lengths="mix", num_samples=(64,) * 16, batch_size=8),
}


def rows(quick: bool, time_limit: float) -> Iterator[dict[str, Any]]:
    """Yields the makespan of each packer over the bound.

    Args:
        quick: Whether to take only four stages, and one lane.
        time_limit: Seconds of LoRAFusion's solver per stage.
    """
    stages, lanes = ((4,), (1,)) if quick else (STAGES, LANES)
    for num_lanes, last, num, (name, kind) in itertools.product(
        lanes, LAST_STAGES, stages, KINDS.items()
    ):
        if last > 1 and (num == 1 or num_lanes > 1):
            continue
        of_case = {
            "table": "kinds",
            "kind": name,
            "lanes": num_lanes,
            "stages": num,
            "last_stage": last,
        }
        yield from (
            of_case | row for row in _of_case(kind, num_lanes, last, num, time_limit)
        )


def _of_case(
    kind: Kind, num_lanes: int, last: float, num_stages: int, time_limit: float
) -> Iterator[dict[str, Any]]:
    samples, limits = kind.samples(), Limits(capacity=kind.capacity, block_tokens=64)
    pipeline = Pipeline.one_f_one_b(num_stages)
    cost = CostModel.uniform(
        num_stages,
        forward=AffineCost(base=256.0, per_token=1.0, per_square=2e-5),
        backward=AffineCost(base=256.0, per_token=1.0, per_square=5e-5),
        last_stage=last,
    )
    lanes = Lanes(data=num_lanes, pipeline=pipeline)
    bound = lower_bound(samples, limits, pipeline, cost, num_lanes=num_lanes)
    for packer, pack in _packers(samples, limits, lanes, cost, time_limit).items():
        began = time.process_time()
        schedule = pack()
        seconds = time.process_time() - began
        if wrong := violations(
            schedule, samples, distance=num_stages, num_lanes=num_lanes
        ):
            raise RuntimeError(f"{packer} breaks a rule: {wrong[0]}")
        found = simulate(schedule, cost, pipeline, num_lanes=num_lanes)
        yield {
            "packer": packer,
            "makespan_over_bound": round(found.makespan / bound.makespan, 3),
            "bubble_percent": round(100 * found.bubble, 1),
            "planning_s": round(seconds, 3),
        }


def _packers(
    samples: Sequence[Sample],
    limits: Limits,
    lanes: Lanes,
    cost: CostModel,
    time_limit: float,
) -> dict[str, Callable[[], Schedule]]:
    """Returns the packers; `plain` has no polishing, ramps or targets of ticks."""
    n, pipeline = lanes.num_lanes, lanes.pipeline
    distance = pipeline.distance

    def plain() -> Schedule:
        if n == 1:
            return joint.pack(samples, limits, pipeline, cost, _PLAIN)
        queue = queue_of(joint.job_batches(samples), limits, lanes, cost)
        return _in_ticks(fill_ticks(queue, limits, lanes), limits, n)

    def arranged(pack: Callable[[Pipeline], Schedule]) -> Schedule:
        if n == 1:
            return pack(pipeline)
        far = Pipeline(num_stages=pipeline.num_stages, distance=n * distance)
        ticks = arrange(pack(far).microbatches, n, distance)
        return _in_ticks(ticks, limits, n)

    def joint_() -> Schedule:
        if n == 1:
            return get_packer("joint")(samples, limits, pipeline, cost)
        return pack_ticks(samples, limits, "joint", lanes, cost)

    return {
        "mlora": lambda: arranged(lambda p: mlora.pack(samples, limits, p)),
        "paper": lambda: arranged(
            lambda p: lorafusion.pack(samples, limits, p, time_limit=time_limit)
        ),
        "plain": plain,
        "joint": joint_,
    }


def _in_ticks(ticks: Sequence[Sequence], limits: Limits, num_lanes: int) -> Schedule:
    padded = [(*tick, *((),) * (num_lanes - len(tick))) for tick in ticks]
    return Schedule(microbatches=tuple(itertools.chain(*padded)), limits=limits)
