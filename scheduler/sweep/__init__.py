"""Plans the configurations of a sweep on groups of GPUs."""

from jaxlora.scheduler.sweep.baselines import (
    fewest_gpus,
    one_at_a_time,
    sequential_packs,
)
from jaxlora.scheduler.sweep.planner import PlannedSweep, plan_sweep
from jaxlora.scheduler.sweep.problem import (
    AnalyticCosts,
    Bound,
    Configuration,
    Costs,
    Group,
    GroupCosts,
    Run,
    StepLine,
    Sweep,
    SweepPlan,
)

__all__ = [
    "AnalyticCosts",
    "Bound",
    "Configuration",
    "Costs",
    "Group",
    "GroupCosts",
    "PlannedSweep",
    "Run",
    "StepLine",
    "Sweep",
    "SweepPlan",
    "fewest_gpus",
    "one_at_a_time",
    "plan_sweep",
    "sequential_packs",
]
