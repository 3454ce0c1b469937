"""Rules between several settings of a job, and of a run.

Each returns the setting that breaks it, and the rule with the cure; None if none does.
"""

import collections
from typing import Any

from jaxlora.config.clone import copies_follow_their_jobs
from jaxlora.config.strict import Rule


def _is_evaluated(job: Any) -> bool:
    return job.eval_data is not None or job.eval_fraction > 0


def _held_out_in_one_way(job: Any) -> tuple[str, str] | None:
    if job.eval_data is not None and job.eval_fraction > 0:
        return "eval_fraction", "give eval_data or eval_fraction, not both."
    return None


def _seed_holds_records_out(job: Any) -> tuple[str, str] | None:
    if job.eval_seed and not job.eval_fraction:
        return "eval_seed", (
            f"eval_seed={job.eval_seed} chooses what eval_fraction holds out: set "
            "eval_fraction, or leave eval_seed out."
        )
    return None


def _needs_held_out(setting: str) -> Rule:
    def rule(job: Any) -> tuple[str, str] | None:
        if getattr(job, setting) and not _is_evaluated(job):
            return setting, (
                f"{setting} needs held-out records: set eval_data or eval_fraction."
            )
        return None

    return rule


def _stopping_counts_evaluations(job: Any) -> tuple[str, str] | None:
    if job.early_stopping and not job.eval_every:
        return (
            "early_stopping",
            "early_stopping counts evaluations: set eval_every.",
        )
    return None


def _starts_in_one_way(job: Any) -> tuple[str, str] | None:
    if job.clone_of is not None and job.continue_from is not None:
        return "clone_of", "give clone_of or continue_from, not both."
    return None


def _held_out_sets_are_whole(job: Any) -> tuple[str, str] | None:
    if getattr(job.eval_data, "mix", "concat") != "concat":
        return "eval_data", (
            "held-out data sets are evaluated whole, one after the other. Leave mix "
            "and probabilities out of eval_data."
        )
    return None


def _there_are_jobs(run: Any) -> tuple[str, str] | None:
    if not run.jobs:
        return "jobs", "jobs is empty, so there is nothing to train."
    return None


def _names_differ(run: Any) -> tuple[str, str] | None:
    names = [job.name for job in run.jobs]
    seen = collections.Counter(name.lower() for name in names)
    for name in names:
        if seen[name.lower()] > 1:
            return "jobs", (
                f"two jobs are named {name!r} (letter case does not count: names "
                "become folders). Rename one."
            )
    return None


def _microbatches_hold_whole_blocks(run: Any) -> tuple[str, str] | None:
    tokens = run.microbatch_tokens
    if tokens != "auto" and tokens % run.block_tokens:
        return "microbatch_tokens", (
            f"microbatch_tokens={tokens} is not a multiple of "
            f"block_tokens={run.block_tokens}."
        )
    return None


def _shapes_hold_whole_blocks(run: Any) -> tuple[str, str] | None:
    shapes = () if run.microbatch_shapes == "auto" else run.microbatch_shapes
    if wrong := [tokens for tokens in shapes if tokens % run.block_tokens]:
        return "microbatch_shapes", (
            f"microbatch_shapes={wrong} are not multiples of "
            f"block_tokens={run.block_tokens}."
        )
    return None


def _samples_have_evaluations(run: Any) -> tuple[str, str] | None:
    if run.samples is not None and not any(map(_is_evaluated, run.jobs)):
        return "samples", (
            "samples are generated at evaluations, and no job has held-out records: "
            "set eval_data or eval_fraction, or leave samples out."
        )
    return None


def _samples_have_the_template(run: Any) -> tuple[str, str] | None:
    if run.samples is None or not run.samples.chat:
        return None
    for job in run.jobs:
        if any(getattr(one, "chat_template", None) for one in job.data.sets):
            return "samples", (
                f"samples are rendered by the tokenizer's chat template, and job "
                f"{job.name!r} has another one. Write prompts as it prints them, and "
                "leave chat out of samples."
            )
    return None


def _first_stage_can_fill_the_pipeline(run: Any) -> tuple[str, str] | None:
    in_flight = run.pipeline_microbatches
    if in_flight is None or run.mesh == "auto":
        return None
    sizes = run.mesh_sizes
    if in_flight >= sizes.stage:
        return None
    return "pipeline_microbatches", (
        f"pipeline_microbatches={in_flight} is less than the {sizes.stage} stages of "
        f"mesh {sizes}, which could then never all run. Give at least {sizes.stage}, "
        "or leave it out."
    )


def _configurations_are_evaluated(run: Any) -> tuple[str, str] | None:
    if run.sweep is None:
        return None
    for job in run.jobs:
        if not _is_evaluated(job):
            return "sweep", (
                f"configurations are ranked by their loss on held-out records, and job "
                f"{job.name!r} has none: set eval_fraction or eval_data."
            )
    return None


def _groups_have_sizes(run: Any) -> tuple[str, str] | None:
    if run.sweep is None or not run.sweep.has_groups or run.mesh != "auto":
        return None
    if not isinstance(run.sweep.groups, int):
        return None
    return "mesh", (
        "mesh is auto, which one process chooses for all devices, and sweep.groups is "
        f"{run.sweep.groups}. Give the mesh of a group, such as fsdp=2, or list the "
        "groups, such as `groups: [2, 2]`."
    )


def mesh_text(mesh: Any) -> Any:
    """Returns the sizes of a mesh as text, if they are given as a mapping."""
    if isinstance(mesh, dict):
        return ",".join(f"{axis}={size}" for axis, size in mesh.items())
    return mesh


OF_A_JOB: tuple[Rule, ...] = (
    _held_out_in_one_way,
    _seed_holds_records_out,
    _needs_held_out("eval_every"),
    _needs_held_out("early_stopping"),
    _needs_held_out("keep_best"),
    _stopping_counts_evaluations,
    _starts_in_one_way,
    _held_out_sets_are_whole,
)
OF_A_RUN: tuple[Rule, ...] = (
    _there_are_jobs,
    _names_differ,
    _microbatches_hold_whole_blocks,
    _shapes_hold_whole_blocks,
    _samples_have_evaluations,
    _samples_have_the_template,
    _first_stage_can_fill_the_pipeline,
    _configurations_are_evaluated,
    _groups_have_sizes,
    copies_follow_their_jobs,
)
