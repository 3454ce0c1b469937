"""The groups of a sweep with `groups: auto`, of its plan on the present devices."""

import math

from jaxlora.config import RunConfig
from jaxlora.errors import ConfigError
from jaxlora.forecast.sweep_groups import plan_groups
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.memory.need import DoesNotFitError
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.mesh.predict import SLOT_SECONDS
from jaxlora.plan.run_plan import RunPlan
from jaxlora.sweeps.engine.group_plan import GroupPlan, GroupPlans
from jaxlora.train.saved.continue_job import continued_step

NOT_KNOWN = (
    "sweep.groups is auto, and the rates of this device are not known, so groups "
    "cannot be planned. `jaxlora profile MODEL` measures them; or give a number of "
    "groups, or a list."
)


def group_plans(config: RunConfig) -> GroupPlans:
    """Plans a sweep on the devices of this machine.

    Raises:
        ConfigError: The rates of the device are not known.
        JaxloraError: The run cannot be trained.
    """
    assert config.sweep is not None
    run = _with_slots(config.replace(sweep=config.sweep.replace(groups=1)))
    found = plan_groups(*run, this_machine())
    if found is None:
        raise ConfigError(NOT_KNOWN)
    block, plan = config.block_tokens, found.planned.plan
    groups = []
    for group in plan.groups:
        tokens = found.capacities[group.degree]
        if config.microbatch_tokens == "auto":  # larger ones would only be padded
            most = max(group.round_tokens, found.longest)
            tokens = min(tokens, block * math.ceil(most / block))
        runs = sorted(group.runs, key=lambda one: (one.start, one.slot))
        groups.append(
            GroupPlan(
                mesh=found.meshes[group.degree],
                num_slots=group.num_slots,
                slot_rank=group.slot_rank,
                microbatch_tokens=tokens,
                names=tuple(one.configuration.name for one in runs),
            )
        )
    most = max(len(one.names) for one in groups)
    return GroupPlans(
        groups=tuple(groups),
        ranks={c.name: c.rank for c in plan.sweep.configurations},
        seconds=plan.makespan + 2 * most * SLOT_SECONDS,  # into slots, and out of them
    )


def _with_slots(config: RunConfig) -> tuple[RunPlan, list[PreparedJob]]:
    """Prepares the run with as many slots as fit; groups have slots of their own."""
    num_slots = len(config.jobs)
    while True:
        fewer = config.replace(max_concurrent_jobs=num_slots)
        try:
            return prepare_run(fewer, continued_step)[:2]
        except DoesNotFitError:
            if num_slots == 1 and config.mesh == "auto":
                raise
        if num_slots == 1:
            config = config.replace(mesh="auto")
        else:
            num_slots //= 2
