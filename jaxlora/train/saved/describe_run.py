"""Describes a run for its files."""

from collections.abc import Sequence
from typing import Any

from jaxlora.config.replicas_config import listed
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.identity import RunIdentity
from jaxlora.train.job_state import JobState


def run_identity(plan: RunPlan, base: str, jobs: Sequence[PreparedJob]) -> RunIdentity:
    """Returns the properties that are compared when a run is resumed.

    Args:
        plan: The plan of the run.
        base: Fingerprint of the base model; empty if its weights are not known.
        jobs: Jobs of the run.
    """
    config, spec = plan.config, plan.spec
    replicas = config.replica_shapes
    assert spec.slots is not None
    return RunIdentity(
        base=base,
        settings={
            **_base_settings(plan.model),
            **(
                {"replicas": listed(replicas)}
                if replicas
                else {"mesh": str(config.mesh_sizes)}
            ),
            "microbatch_tokens": config.microbatch_tokens,
            "microbatch_shapes": list(plan.shapes.tokens),
            "block_tokens": config.block_tokens,
            "remat": config.remat,
            "window_steps": config.window_steps,
            "packer": config.packer,
            "preempt": config.preempt,
            "max_concurrent_jobs": spec.slots.num_slots,
            "slot_rank": spec.slots.rank,
        },
        jobs={job.name: job.identity for job in jobs},
    )


def planned_identity(model: PlannedModel, jobs: Sequence[PreparedJob]) -> RunIdentity:
    """Returns what must not change in a resumed run, but for the base itself."""
    described = {job.name: job.identity for job in jobs}
    return RunIdentity(base="", settings=_base_settings(model), jobs=described)


def _base_settings(model: PlannedModel) -> dict[str, Any]:
    """Settings of the base that change its products."""
    out: dict[str, Any] = {"dtype": model.dtype.name}
    if (base := model.base_format) is not None:
        out |= {"quantize_base": base.name, "keep_bf16": list(base.kept)}
        if settings := base.options.result_settings():
            out["quantize_base_args"] = settings
    return out


def resolved_settings(plan: RunPlan, jobs: Sequence[JobState]) -> dict[str, Any]:
    """Returns all settings of a run as a run file, with values in the place of `auto`.

    Args:
        plan: The plan of the run.
        jobs: The jobs, with those that have joined.
    """
    spec = plan.spec
    assert spec.slots is not None
    resolved = plan.config.replace(
        dtype=plan.model.dtype.name,
        implementation=spec.options.implementation,
        attention=spec.options.attention,
        max_concurrent_jobs=spec.slots.num_slots,
        slot_rank=spec.slots.rank,
        slot_dropout=spec.slots.use_dropout,
        microbatch_shapes=plan.shapes.tokens,
        jobs=tuple(job.settings for job in jobs),
    )
    return resolved.model_dump(mode="json")
