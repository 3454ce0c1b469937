"""Which samples run together, and when. Pure Python: no JAX, no GPU."""

from scheduler import greedy, joint
from scheduler.bounds import Bound, lower_bound
from scheduler.check import violations
from scheduler.cost import AffineCost, CostModel, StageCost
from scheduler.named import PackerName, named
from scheduler.plan import Plan, plan
from scheduler.simulate import Simulation, lock_step_time, simulate, window_sum
from scheduler.types import (
    Limits,
    Microbatch,
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
    "Limits",
    "Microbatch",
    "PackerName",
    "Pipeline",
    "Plan",
    "Sample",
    "Schedule",
    "Simulation",
    "StageCost",
    "greedy",
    "joint",
    "lock_step_time",
    "lower_bound",
    "named",
    "padded_tokens",
    "plan",
    "simulate",
    "tokens_by_job",
    "violations",
    "window_sum",
]
