"""Describes a run for its files."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.config.replicas_config import listed
from jaxlora.hf.load import FrozenModel
from jaxlora.hf.names import linear_names
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.identity import RunIdentity
from jaxlora.run.saved_adapter import SavedAdapter
from jaxlora.run.saved_run import SavedRun, SavedSweep
from jaxlora.run.saved_stream import SavedStream
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
            **({"replicas": listed(replicas)} if replicas else {}),
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


def saved_run(
    identity: RunIdentity,
    jobs: Sequence[JobState],
    model: FrozenModel,
    stream: SavedStream,
    sweep: SavedSweep | None,
    suggested: Mapping[str, dict[str, float]],
) -> SavedRun:
    """Returns what a checkpoint keeps besides the tensors of the jobs.

    Args:
        identity: Identity of the run.
        jobs: The jobs.
        model: The base model.
        stream: The microbatches that follow.
        sweep: Decisions of the sweep; None if there is none.
        suggested: The place on each axis of configurations that were suggested.
    """
    return SavedRun(
        identity=identity,
        progress={job.name: job.progress for job in jobs},
        adapters={job.name: _saved_adapter(job) for job in jobs},
        base_model=model.source,
        base_revision=model.revision,
        linear_names=list(linear_names(model.config)),
        stream=stream,
        sweep=sweep,
        suggested=dict(suggested),
    )


def _saved_adapter(job: JobState) -> SavedAdapter:
    vera = job.like.vera
    ids = job.like.token_ids
    return SavedAdapter(
        modules={
            name: (weights.rank, weights.lora_alpha)
            for name, weights in job.like.modules.items()
        },
        use_rslora=job.like.use_rslora,
        dropout=job.like.dropout,
        keep_best=job.settings.keep_best,
        has_score=job.like.score is not None,
        token_ids=list(ids["embed_tokens"]),
        head_token_ids=list(ids["lm_head"]),
        modules_to_save=list(job.like.modules_to_save),
        vera=None if vera is None else dataclasses.astuple(vera),
        loftq_bits=job.like.loftq_bits,
    )
