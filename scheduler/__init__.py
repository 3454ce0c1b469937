"""Packs samples of many jobs into microbatches. This package does not import JAX."""

from jaxlora.scheduler.bounds import Bound, lower_bound
from jaxlora.scheduler.check import violations
from jaxlora.scheduler.cost import AffineCost, CostModel, StageCost
from jaxlora.scheduler.lanes import Lanes
from jaxlora.scheduler.pack import whole as joint
from jaxlora.scheduler.packers import PackerName, Plan, get_packer, pack_ticks, plan
from jaxlora.scheduler.papers import greedy
from jaxlora.scheduler.simulate import Simulation, simulate
from jaxlora.scheduler.types import (
    Limits,
    Microbatch,
    Pace,
    Pipeline,
    Sample,
    Schedule,
    padded_tokens,
    tokens_by_job,
)

__all__ = [
    "AffineCost",
    "Bound",
    "CostModel",
    "Lanes",
    "Limits",
    "Microbatch",
    "Pace",
    "PackerName",
    "Pipeline",
    "Plan",
    "Sample",
    "Schedule",
    "Simulation",
    "StageCost",
    "get_packer",
    "greedy",
    "joint",
    "lower_bound",
    "pack_ticks",
    "padded_tokens",
    "plan",
    "simulate",
    "tokens_by_job",
    "violations",
]
