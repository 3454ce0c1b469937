"""Rules between several settings of a job, and of a run.

Each function adds the settings that break its rules, with the rule and the cure.
"""

import collections
from typing import Any, Literal, get_args

from jaxlora.config.clone import copies_follow_their_jobs
from jaxlora.config.schedules import schedule_problem
from jaxlora.config.starts import start_rules
from jaxlora.config.strict import Rules, Wrong


def _is_evaluated(job: Any) -> bool:
    return job.eval_data is not None or job.eval_fraction > 0


def _evaluation(job: Any, wrong: Wrong) -> None:
    if job.eval_data is not None and job.eval_fraction > 0:
        wrong["eval_fraction"] = "give eval_data or eval_fraction, not both."
    if job.eval_seed and not job.eval_fraction:
        wrong["eval_seed"] = (
            f"eval_seed={job.eval_seed} chooses what eval_fraction holds out: set "
            "eval_fraction, or leave eval_seed out."
        )
    for setting in ("eval_every", "early_stopping", "keep_best"):
        if not _is_evaluated(job) and getattr(job, setting):
            wrong[setting] = (
                f"{setting} needs held-out records: set eval_data or eval_fraction."
            )
    if job.early_stopping and not job.eval_every:
        wrong["early_stopping"] = "early_stopping counts evaluations: set eval_every."
    if job.eval_data is not None and job.eval_data.mix != "concat":
        wrong["eval_data"] = (
            "held-out data sets are evaluated whole, one after the other. Leave mix "
            "and probabilities out of eval_data."
        )


def _schedule(job: Any, wrong: Wrong) -> None:
    problem = schedule_problem(job.lr_schedule, job.lr_schedule_args, job.learning_rate)
    if problem is not None:
        wrong["lr_schedule_args"] = problem


def _trained_modules(job: Any, wrong: Wrong) -> None:
    targets = job.target_modules
    is_regex = isinstance(targets, str) and targets.lower() != "all-linear"
    if not targets and not job.target_parameters:
        wrong["target_modules"] = (
            "target_modules is empty, so nothing would be trained. Give suffixes "
            "such as ['q_proj', 'v_proj'], a regular expression, or 'all-linear'."
        )
    if job.layers_pattern and not job.layers_to_transform:
        wrong["layers_pattern"] = (
            "layers_pattern says where layers_to_transform counts: set that, or leave "
            "both out."
        )
    if job.layers_to_transform and is_regex:
        wrong["layers_to_transform"] = (
            "layers_to_transform selects layers of a list of target_modules, or of "
            "all-linear; a regular expression selects them by itself."
        )
    if both := [m for m in job.modules_to_save if job.token_ids[m]]:
        wrong["modules_to_save"] = (
            f"modules_to_save trains all rows of {both[0]}, and "
            "trainable_token_indices some of them. Keep one."
        )


def row_tokens(tokens: Any) -> Any:
    """Returns the tokens of `trainable_token_indices`, of which PEFT has two forms.

    Tokens of the embedding alone are a list. If rows of the head are trained, they are
    lists by name of the module, without those that are empty.

    Raises:
        ValueError: They are of another module, or one occurs twice in its module.
    """
    if tokens is None:
        return ()
    by_module = tokens if isinstance(tokens, dict) else {"embed_tokens": tokens}
    others = sorted(str(name) for name in by_module.keys() - set(WHOLE_MODULES))
    if others:
        raise ValueError(
            f"only rows of {' and '.join(WHOLE_MODULES)} are trained, not of "
            f"{others[0]}. Give a list of tokens, or "
            "{embed_tokens: [...], lm_head: [...]}."
        )
    for given in by_module.values():
        counts = collections.Counter(
            map(str, given if isinstance(given, list | tuple) else ())
        )
        if twice := [token for token, num in counts.items() if num > 1]:
            raise ValueError(f"token {twice[0]} occurs twice. Give each token once.")
    ordered = {m: by_module[m] for m in WHOLE_MODULES if by_module.get(m)}
    return ordered if "lm_head" in ordered else by_module.get("embed_tokens") or ()


# Modules of which rows, or whole copies, are trained.
WholeModule = Literal["embed_tokens", "lm_head"]
WHOLE_MODULES = get_args(WholeModule)


def whole_modules(modules: Any) -> Any:
    """Returns the modules of `modules_to_save`, sorted.

    PEFT takes the end of a module's name, so the whole name is one, too. LLaMA-Factory
    joins names by commas.

    Raises:
        ValueError: Another module is named.
    """
    if modules is None:
        return ()
    given = modules.split(",") if isinstance(modules, str) else modules
    if not isinstance(given, list | tuple):
        return modules
    names = [str(name).strip().removeprefix("model.") for name in given]
    if others := sorted(set(names) - set(WHOLE_MODULES)):
        raise ValueError(
            f"only {' and '.join(WHOLE_MODULES)} are trained as whole copies, not "
            f"{others[0]}. Leave it out; a reward model has its score head without it."
        )
    return tuple(sorted(set(names)))


# Settings of LoRA that VeRA does not have.
NOT_OF_VERA = (
    "use_dora",
    "use_rslora",
    "init_lora_weights",
    "lora_alpha",
    "lora_plus_ratio",
    "rank_pattern",
    "alpha_pattern",
    "expert_rank",
    "target_parameters",
    "trainable_token_indices",
    "new_special_tokens",
)


def _vera(job: Any, wrong: Wrong) -> None:
    for setting in NOT_OF_VERA if job.use_vera else ():
        if job.changes(setting):
            wrong[setting] = (
                f"{setting}={getattr(job, setting)} cannot be combined with use_vera: "
                "in PEFT, VeRA has one rank, no scaling, and nothing but its vectors "
                f"to train. Leave {setting} out of this job."
            )
    if not job.use_vera and job.projection_prng_key:
        wrong["projection_prng_key"] = (
            f"projection_prng_key={job.projection_prng_key} draws the matrices of "
            "VeRA: set use_vera: true, or leave it out."
        )


def _job_names(run: Any, wrong: Wrong) -> None:
    if not run.jobs:
        wrong["jobs"] = "jobs is empty, so there is nothing to train."
    names = [job.name for job in run.jobs]
    seen = collections.Counter(name.lower() for name in names)
    if twice := [name for name in names if seen[name.lower()] > 1]:
        wrong["jobs"] = (
            f"two jobs are named {twice[0]!r} (letter case does not count: names "
            "become folders). Rename one."
        )


def _microbatches(run: Any, wrong: Wrong) -> None:
    tokens = run.microbatch_tokens
    if tokens != "auto" and tokens % run.block_tokens:
        wrong["microbatch_tokens"] = (
            f"microbatch_tokens={tokens} is not a multiple of "
            f"block_tokens={run.block_tokens}."
        )
    if odd := [n for n in run.microbatch_shapes if n % run.block_tokens]:
        wrong["microbatch_shapes"] = (
            f"microbatch_shapes={odd} are not multiples of "
            f"block_tokens={run.block_tokens}."
        )


def _samples(run: Any, wrong: Wrong) -> None:
    if run.samples is None:
        return
    if not any(map(_is_evaluated, run.jobs)):
        wrong["samples"] = (
            "samples are generated at evaluations, and no job has held-out records: "
            "set eval_data or eval_fraction, or leave samples out."
        )
    sets = [(job, one) for job in run.jobs for one in job.data.sets]
    for job, one in sets if run.samples.chat else ():
        has_other = one.chat_template is not None
        if has_other or one.chat_template_kwargs:
            what = "another one" if has_other else "chat_template_kwargs"
            wrong["samples"] = (
                f"samples are rendered by the tokenizer's chat template, and job "
                f"{job.name!r} has {what}. Write prompts as it prints them, and "
                "leave chat out of samples."
            )
            return


def _pace(run: Any, wrong: Wrong) -> None:
    if run.pace == "equal" and run.packer != "joint":
        wrong["pace"] = (
            f"packer {run.packer} takes as many batches of each job at once, so jobs "
            "have no pace of their own. Leave pace out, or set packer: joint."
        )


def _checkpoints(run: Any, wrong: Wrong) -> None:
    if run.checkpoint_every != "auto" and run.changes("checkpoint_seconds"):
        wrong["checkpoint_seconds"] = (
            f"checkpoint_seconds={run.checkpoint_seconds} is for checkpoint_every: "
            f"auto, and it is {run.checkpoint_every}. Leave one of the two out."
        )


def _pipeline(run: Any, wrong: Wrong) -> None:
    in_flight = run.pipeline_microbatches
    if in_flight is None or run.mesh == "auto":
        return
    sizes = run.mesh_sizes
    if in_flight < sizes.stage:
        wrong["pipeline_microbatches"] = (
            f"pipeline_microbatches={in_flight} is less than the {sizes.stage} stages "
            f"of mesh {sizes}, which could then never all run. Give at least "
            f"{sizes.stage}, or leave it out."
        )


def _sweep(run: Any, wrong: Wrong) -> None:
    if run.sweep is None:
        return
    if not all(map(_is_evaluated, run.jobs)):
        job = next(job for job in run.jobs if not _is_evaluated(job))
        wrong["sweep"] = (
            "configurations are ranked by their loss on held-out records, and job "
            f"{job.name!r} has none: set eval_fraction or eval_data."
        )
    groups = run.sweep.groups
    if run.sweep.has_groups and run.mesh == "auto" and isinstance(groups, int):
        wrong["mesh"] = (
            "mesh is auto, which one process chooses for all devices, and sweep.groups "
            f"is {groups}. Give the mesh of a group, such as fsdp=2, or list the "
            "groups, such as `groups: [2, 2]`."
        )
    if groups == "auto" and run.max_concurrent_jobs is not None:
        wrong["max_concurrent_jobs"] = (
            "sweep.groups is auto, and the plan says how many slots each group has. "
            "Leave max_concurrent_jobs out, or give a number of groups, or a list."
        )


def mesh_text(mesh: Any) -> Any:
    """Returns the sizes of a mesh as text, if they are given as a mapping."""
    if isinstance(mesh, dict):
        return ",".join(f"{axis}={size}" for axis, size in mesh.items())
    return mesh


OF_A_JOB: tuple[Rules, ...] = (
    _evaluation,
    _schedule,
    start_rules,
    _vera,
    _trained_modules,
)
OF_A_RUN: tuple[Rules, ...] = (
    _job_names,
    _microbatches,
    _samples,
    _pace,
    _checkpoints,
    _pipeline,
    _sweep,
    copies_follow_their_jobs,
)
