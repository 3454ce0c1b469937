"""Describes a run for its files, and compares it with a run that is resumed."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.common.counted import counted
from jaxlora.config import RunConfig
from jaxlora.config.replicas_config import listed
from jaxlora.errors import CheckpointError
from jaxlora.hf.load import FrozenModel
from jaxlora.hf.names import linear_names
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.folder import CHECKPOINTS, RUN_FILE, BegunRun, read_run_record
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_adapter import SavedAdapter
from jaxlora.run.saved_run import SavedRequests, SavedRun
from jaxlora.run.saved_stream import SavedStream
from jaxlora.run.saved_sweep import SavedSweep
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.checkpoint import unfinished_checkpoints
from jaxlora.train.saved.continue_job import check_continues
from jaxlora.train.saved.read_checkpoint import (
    ended_jobs,
    newest_checkpoint,
    read_newest,
)

logger = logging.getLogger(__name__)


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
    requests: SavedRequests,
    stream: SavedStream,
    sweep: SavedSweep | None,
    suggested: Mapping[str, dict[str, float]],
) -> SavedRun:
    """Returns what a checkpoint keeps besides the tensors of the jobs.

    Args:
        identity: Identity of the run.
        jobs: The jobs.
        model: The base model.
        requests: Requests to stop and to pause jobs.
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
        requests=requests,
        stream=stream,
        sweep=sweep,
        suggested=dict(suggested),
        places={job.name: job.place for job in jobs if job.place is not None},
    )


def _check_not_extended(
    progress: Mapping[str, JobProgress], jobs: Sequence[PreparedJob]
) -> None:
    for job in jobs:
        name, wanted = job.name, job.num_steps
        done = progress.get(name, JobProgress())
        if done.status == "finished" and wanted > done.step:
            raise CheckpointError(
                f"job {name!r} has finished its {counted(done.step, 'step')}, and "
                f"{wanted} are wanted now. Its optimizer state was dropped when it "
                "finished, so it cannot go on: set steps back, and add another job "
                "with init_from on its adapter."
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


def check_settings_resume(config: RunConfig) -> None:
    """Refuses a folder of another run by its settings, before any data are read.

    Args:
        config: The run, with the jobs that have joined it.

    Raises:
        CheckpointError: The run in `output_dir`, if one has begun, cannot become this
            one; or a file is damaged, or has the name of a checkpoint.
    """
    folder = pathlib.Path(config.output_dir)
    if (record := read_run_record(folder)) is None:
        return
    then, path, where = record.identity, folder / RUN_FILE, RUN_FILE
    if (checkpoints := folder / CHECKPOINTS).is_dir():
        unfinished_checkpoints(checkpoints)
    if newest_checkpoint(checkpoints) is not None:
        found = read_newest(checkpoints)
        then, where = found.run.identity, "the checkpoint"
        path = checkpoints / str(found.number)
    # Values that are not known yet count as unchanged.
    jobs = {job.name: job.model_dump(mode="json") for job in config.jobs}
    jobs = {name: then.jobs.get(name, {}) | job for name, job in jobs.items()}
    now = RunIdentity(base="", settings=then.settings, jobs=jobs)
    check_same_run(now, then, path, where)


def check_saved_states(
    config: RunConfig, model: PlannedModel, jobs: Sequence[PreparedJob]
) -> None:
    """Refuses states that the run, or a job of it, cannot continue from.

    It comes after the data are read, and before the base is. All that would refuse the
    run but the fingerprint of the base is known then.

    Args:
        config: The run.
        model: Its base model.
        jobs: Its jobs.

    Raises:
        CheckpointError: See `check_resumes` and `continue_job`.
    """
    folder = pathlib.Path(config.output_dir)
    if read_run_record(folder) is not None:
        check_resumes(folder, _planned_identity(model, jobs), jobs)
        return
    for job in jobs:
        if job.settings.continue_from is not None:
            identity = _planned_identity(model, [job])
            check_continues(job.settings, job.num_steps, identity)


def _planned_identity(model: PlannedModel, jobs: Sequence[PreparedJob]) -> RunIdentity:
    """Returns what must not change in a resumed run, but for the base itself."""
    described = {job.name: job.identity for job in jobs}
    return RunIdentity(base="", settings=_base_settings(model), jobs=described)


def check_resumes(
    folder: pathlib.Path, identity: RunIdentity, jobs: Sequence[PreparedJob]
) -> None:
    """Refuses to resume what the run in a folder cannot become; reads no tables.

    Args:
        folder: Folder of a run that has begun.
        identity: Identity of the run to resume.
        jobs: Its jobs.

    Raises:
        CheckpointError: The identities differ, a job that has finished has more steps
            now, or a file is damaged.
    """
    checkpoints = folder / CHECKPOINTS
    if newest_checkpoint(checkpoints) is not None:
        found = read_newest(checkpoints)
        path = checkpoints / str(found.number)
        check_same_run(identity, found.run.identity, path, "the checkpoint")
        _check_not_extended(found.run.progress, jobs)
    elif (record := read_run_record(folder)) is not None:
        check_same_run(identity, record.identity, folder / RUN_FILE, RUN_FILE)


def jobs_not_held(begun: BegunRun, *, replan: bool = False) -> tuple[str, ...]:
    """Returns the jobs of a run that have ended, and that its replicas need not hold.

    They are those that had ended when the replicas were chosen. If they are chosen
    anew, all that have ended are, unless a search may suggest others like them.

    Args:
        begun: The run, if it has begun.
        replan: Whether replicas are chosen anew.

    Raises:
        CheckpointError: The newest checkpoint is damaged.
    """
    if not begun.has_begun:
        return ()
    over = ended_jobs(pathlib.Path(begun.config.output_dir) / CHECKPOINTS)
    sweep = begun.config.sweep
    may_follow = sweep is not None and sweep.search is not None
    # If all have ended, there is nothing to choose replicas for.
    if replan and not may_follow and len(over) < len(begun.config.jobs):
        return tuple(over)
    return tuple(name for name in begun.ended if name in over)


def check_not_cut(
    folder: pathlib.Path, jobs: Sequence[PreparedJob], *, drop_state: bool = False
) -> None:
    """Refuses settings by which jobs of a resumed run would end at once.

    Args:
        folder: Folder of the run.
        jobs: Its jobs.
        drop_state: Whether jobs may end at once, as they have done more steps than are
            wanted now, or as early stopping has less patience.

    Raises:
        CheckpointError: There is such a job, and `drop_state` is false.
    """
    if newest_checkpoint(folder / CHECKPOINTS) is None:
        return
    progress, cut = read_newest(folder / CHECKPOINTS).run.progress, {}
    for job in jobs:
        done = progress.get(job.name, JobProgress())
        if not done.is_over and (reason := _cut_reason(job, done)):
            cut[job.name] = reason
    if not cut:
        return
    reasons = "".join(f"\n- job {name!r} {reason}" for name, reason in cut.items())
    lost = (
        "end at once, and their optimizer states are dropped, so they cannot go on in "
        "this run"
    )
    if drop_state:
        logger.warning("these jobs %s:%s", lost, reasons)
        return
    raise CheckpointError(
        f"these jobs would {lost.replace('are', 'be')} later:{reasons}\nSet these "
        "settings back; or end the jobs where they are, and keep only their adapters, "
        "with drop_state=True (--drop-state)."
    )


def _cut_reason(job: PreparedJob, done: JobProgress) -> str | None:
    """Returns why a resumed job would end at once; None if it would not."""
    if done.step > job.num_steps:
        wanted = f"the number wanted now is {job.num_steps}"
        return f"has done {counted(done.step, 'step')}, and {wanted}"
    patience = job.settings.early_stopping
    if patience and done.evals_without_gain >= patience:
        count = done.evals_without_gain
        return (
            f"has had {count} evaluation{'s' if count > 1 else ''} without a gain, and "
            f"early_stopping is {patience} now"
        )
    return None
