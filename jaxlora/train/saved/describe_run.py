"""Describes a run for its files."""

from collections.abc import Sequence
from typing import Any

from jaxlora.config.replicas_config import listed
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.identity import RunIdentity


def run_identity(
    model: PlannedModel, jobs: Sequence[PreparedJob], base: str = ""
) -> RunIdentity:
    """Returns what must not change when a run is resumed.

    Args:
        model: The planned base model.
        jobs: Jobs of the run.
        base: Fingerprint of the base model; empty if its weights are not known.
    """
    settings: dict[str, Any] = {"dtype": model.dtype.name}
    if (kept := model.base_format) is not None:
        settings |= {"quantize_base": kept.name, "keep_bf16": list(kept.kept)}
        if args := kept.options.result_settings():
            settings["quantize_base_args"] = args
    described = {job.name: job.identity for job in jobs}
    return RunIdentity(base=base, settings=settings, jobs=described)


def resolved_config(plan: RunPlan) -> dict[str, Any]:
    """Returns the settings of a run but its jobs, with values in the place of `auto`.

    Args:
        plan: The plan of the run.
    """
    config, spec = plan.config, plan.spec
    assert spec.slots is not None
    return config.model_dump(mode="json", exclude={"jobs"}) | {
        "dtype": plan.model.dtype.name,
        "implementation": spec.options.implementation,
        "attention": spec.options.attention,
        "max_concurrent_jobs": spec.slots.num_slots,
        "slot_rank": spec.slots.rank,
        "slot_dropout": spec.slots.use_dropout,
        "microbatch_shapes": list(plan.shapes.tokens),
        "replicas": listed(config.replica_shapes) or None,
    }
