"""Rules between several settings of a job, and of a run.

Each returns the setting that breaks it, and the rule with the cure; None if none does.
"""

import collections
from typing import Any

from jaxlora.config.clone import copies_follow_their_jobs
from jaxlora.config.schedules import schedule_problem
from jaxlora.config.starts import START_RULES
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
    if job.eval_data is not None and job.eval_data.mix != "concat":
        return "eval_data", (
            "held-out data sets are evaluated whole, one after the other. Leave mix "
            "and probabilities out of eval_data."
        )
    return None


def _schedule_has_its_settings(job: Any) -> tuple[str, str] | None:
    problem = schedule_problem(job.lr_schedule, job.lr_schedule_args, job.learning_rate)
    return None if problem is None else ("lr_schedule_args", problem)


def _layers_are_of_a_list(job: Any) -> tuple[str, str] | None:
    targets = job.target_modules
    is_regex = isinstance(targets, str) and targets.lower() != "all-linear"
    if job.layers_pattern and not job.layers_to_transform:
        return "layers_pattern", (
            "layers_pattern says where layers_to_transform counts: set that, or leave "
            "both out."
        )
    if job.layers_to_transform and is_regex:
        return "layers_to_transform", (
            "layers_to_transform selects layers of a list of target_modules, or of "
            "all-linear; a regular expression selects them by itself."
        )
    return None


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
WHOLE_MODULES = "embed_tokens", "lm_head"


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


def _modules_are_trained_in_one_way(job: Any) -> tuple[str, str] | None:
    both = [m for m in job.modules_to_save if job.token_ids[m]]
    if not both:
        return None
    return "modules_to_save", (
        f"modules_to_save trains all rows of {both[0]}, and trainable_token_indices "
        "some of them. Keep one."
    )


# Settings of LoRA that VeRA does not have, and their defaults.
NOT_OF_VERA = {
    "use_dora": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "lora_alpha": 32.0,
    "lora_plus_ratio": 1.0,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": (),
    "train_bias": False,
}


def _vera_has_its_settings(job: Any) -> tuple[str, str] | None:
    for setting, default in NOT_OF_VERA.items():
        value = getattr(job, setting)
        if job.use_vera and value != default:
            return setting, (
                f"{setting}={value} cannot be combined with use_vera: in PEFT, VeRA "
                "has one rank, no scaling, and nothing but its vectors to train. Leave "
                f"{setting} out of this job."
            )
    if not job.use_vera and job.projection_prng_key:
        return "projection_prng_key", (
            f"projection_prng_key={job.projection_prng_key} draws the matrices of "
            "VeRA: set use_vera: true, or leave it out."
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
    if wrong := [n for n in run.microbatch_shapes if n % run.block_tokens]:
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
        for one in job.data.sets:
            has_other = one.chat_template is not None
            if not has_other and not one.chat_template_kwargs:
                continue
            what = "another one" if has_other else "chat_template_kwargs"
            return "samples", (
                f"samples are rendered by the tokenizer's chat template, and job "
                f"{job.name!r} has {what}. Write prompts as it prints them, and "
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


def _planned_groups_have_their_slots(run: Any) -> tuple[str, str] | None:
    if run.sweep is None or run.sweep.groups != "auto":
        return None
    if run.max_concurrent_jobs is None:
        return None
    return "max_concurrent_jobs", (
        "sweep.groups is auto, and the plan says how many slots each group has. Leave "
        "max_concurrent_jobs out, or give a number of groups, or a list."
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
    _schedule_has_its_settings,
    *START_RULES,
    _modules_are_trained_in_one_way,
    _vera_has_its_settings,
    _layers_are_of_a_list,
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
    _planned_groups_have_their_slots,
    copies_follow_their_jobs,
)
