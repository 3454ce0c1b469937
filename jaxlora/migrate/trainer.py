"""Settings of transformers' trainer, which the files of several tools have."""

import json
import math
import pathlib
import shlex
from typing import Any

from jaxlora.adapters.optimizers.table import OPTIMIZERS, Optimizer, find_by_other_name
from jaxlora.common.job_name import check_job_name
from jaxlora.config import LoraJob
from jaxlora.config.schedules import SCHEDULES, schedule_problem
from jaxlora.migrate import reasons
from jaxlora.migrate.migration import Migration, Table

_TRACKERS = ("tensorboard", "wandb", "trackio")
_ADAPTER = ("rank", "lora_alpha", "target_modules")
# Settings of other tools that add tokens which are not special.
_PLAIN_TOKENS = ("tokens", "add_tokens")
# Names of optimizer settings that have another name here.
_OPTIMIZER_ARGS = {"beta1": "b1", "beta2": "b2"}


def set_model(migration: Migration, _: str, model: Any) -> None:
    """Sets the base model, which a run must have."""
    migration.run["model"] = model


def set_output(migration: Migration, _: str, folder: Any) -> None:
    """Sets the run's folder, and the name of the job after it."""
    migration.run["output_dir"] = folder
    try:
        name = check_job_name(pathlib.PurePath(str(folder or "")).name)
    except ValueError:
        name = "adapter"
    migration.job["name"] = name


def set_schedule(migration: Migration, _: str, given: Any) -> None:
    """Sets the job's schedule and warm-up."""
    schedule = str(given)
    name = schedule.removesuffix("_with_warmup")
    migration.job["lr_schedule"] = name
    _set_schedule_args(migration, name)
    if schedule == "constant":
        for warmup in ("warmup_steps", "warmup_ratio"):
            if migration.take(warmup):
                migration.left_out[warmup] = (
                    "The schedule `constant` has no warm-up in transformers."
                )
    steps = migration.given.get("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        migration.given["warmup_ratio"] = migration.take("warmup_steps")


def _set_schedule_args(migration: Migration, schedule: str) -> None:
    """Takes `lr_scheduler_kwargs`: a mapping, or its text on a command line."""
    given = migration.take("lr_scheduler_kwargs", {})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {given: None}
    lowest = migration.take("cosine_min_lr_ratio")  # Axolotl
    if lowest and schedule == "cosine":
        schedule, given = "cosine_with_min_lr", {"min_lr_rate": lowest}
    if schedule not in SCHEDULES or not isinstance(given, dict):
        return  # the schedule is left out with the others that are not known
    rate = migration.job.get("learning_rate") or migration.given.get("learning_rate")
    peak = rate if isinstance(rate, float) else math.inf
    problem = schedule_problem(schedule, given, peak)
    if problem is None:
        migration.job["lr_schedule"] = schedule
        migration.job |= {"lr_schedule_args": given} if given else {}
        return
    del migration.job["lr_schedule"]
    migration.left_out["lr_schedule"] = (
        f"{schedule} with the settings {given}: {problem} The default is used: "
        f"{LoraJob.model_fields['lr_schedule'].default!r}."
    )


def set_batch(migration: Migration, key: str, samples: Any) -> None:
    """Sets the samples of an optimizer step from those of a device's pass.

    If the tool packs samples, it counts packed sequences, which is said.
    """
    product = key
    if "gradient_accumulation_steps" in migration.given:
        product += " times gradient_accumulation_steps"
    accumulation = migration.take("gradient_accumulation_steps", 1)
    if isinstance(accumulation, int) and isinstance(samples, int):
        batch = migration.job["batch_size"] = samples * accumulation
        migration.to_do.append(
            "batch_size counts the samples of an optimizer step. It is "
            f"{migration.tool}'s {product}; if you trained on several devices, "
            "multiply it by their number."
        )
    else:
        batch = LoraJob.model_fields["batch_size"].default
        migration.to_do.append(
            f"batch_size: {key} is {samples!r} and gradient_accumulation_steps is "
            f"{accumulation!r}. Set batch_size to their product."
        )
    is_axolotl = migration.tool == "Axolotl"
    keys = ("sample_packing",) if is_axolotl else ("packing", "neat_packing")
    if any([migration.take(name) for name in keys]) or migration.is_text:
        tokens = migration.job["max_length"]
        migration.to_do.append(
            f"batch_size: {migration.tool} packed samples, so its batch was {batch} "
            f"sequences of {tokens} tokens, each with many samples. For as many tokens "
            f"in a step, set batch_size to {batch} x {tokens} divided by the mean "
            "number of tokens of a sample."
        )


def set_optimizer(migration: Migration, key: str, name: Any) -> None:
    """Sets the optimizer; says which one takes the place of one that is not here."""
    name = "muon" if migration.take("use_muon") else name  # LLaMA-Factory
    args = _optimizer_args(migration)
    if name is None:
        return
    found = find_by_other_name(str(name))
    if found is None:
        text = f"{name} is replaced by AdamW, which may need another learning_rate."
        migration.to_do.append(f"learning_rate: {key} {text}")
        migration.left_out[key] = text
        return
    own = {n for n, one in found.settings.items() if one.job_setting is None}
    taken = {_OPTIMIZER_ARGS.get(n, n): value for n, value in args.items()}
    taken = {n: value for n, value in taken.items() if n in own}
    if found is OPTIMIZERS["lion"]:
        # transformers gives the betas of Adam to Lion.
        betas = {"b1": ("adam_beta1", 0.9), "b2": ("adam_beta2", 0.999)}
        taken = {ours: migration.take(*theirs) for ours, theirs in betas.items()}
    if found.name != "adamw":
        migration.job["optimizer"] = found.name
    if taken:
        migration.job["optimizer_args"] = taken
    left = [f"{n}={v}" for n, v in args.items() if _OPTIMIZER_ARGS.get(n, n) not in own]
    if left:
        migration.left_out["optim_args"] = (
            f"{', '.join(left)}: {found.name} has no such settings here."
        )
    if name != found.name or name == "muon":
        migration.left_out[key] = f"{name}: {_difference(str(name), found)}"
    schedule = migration.job.get("lr_schedule", "cosine")
    if found.has_constant_rate and schedule != "constant":
        migration.job["lr_schedule"] = "constant"
        migration.job.pop("lr_schedule_args", None)
        migration.left_out["lr_scheduler_type"] = (
            f"{schedule}: {found.name} averages weights instead of lowering the rate."
        )


def _optimizer_args(migration: Migration) -> dict[str, Any]:
    """Takes the settings of the optimizer: `a=1, b=2` as text, or a mapping."""
    found: dict[str, Any] = {}
    for key in ("optim_args", "optimizer_args"):
        given = migration.take(key)
        if isinstance(given, str):
            pairs = (part.partition("=") for part in given.split(","))
            given = {name.strip(): value.strip() for name, _, value in pairs}
        if isinstance(given, dict):
            found |= {name: _number(value) for name, value in given.items()}
    return found


def _number(value: Any) -> Any:
    """Returns a number or a truth value that is given as text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return float(value)
    except ValueError:
        return value


def _difference(name: str, optimizer: Optimizer) -> str:
    """Says how an optimizer here differs from one of another name."""
    said = [f"the optimizer is {optimizer.name}"]
    if name.startswith("paged_"):
        said.append("its state stays on the device")
    if any(part in name for part in ("8bit", "4bit", "fp8")):
        said.append("its state is float32")
    if optimizer.name == "muon":
        said.append("its updates are scaled as Moonlight does")
    return f"{', and '.join(said)}."


def set_trackers(migration: Migration, key: str, names: Any) -> None:
    """Sets the experiment trackers; says which ones are not there."""
    if names is None or names == "all":
        return
    names = names if isinstance(names, list) else [names]
    migration.run["report_to"] = [n for n in names if n in _TRACKERS] or "none"
    others = [str(n) for n in names if n not in (*_TRACKERS, "none")]
    if others:
        migration.left_out[key] = f"{', '.join(others)}: {reasons.TRACKING}"


def set_quantized(migration: Migration, _: str, four: Any) -> None:
    """Sets the format of the base from `load_in_4bit` and `load_in_8bit`."""
    eight = migration.take("load_in_8bit")
    if four or eight:
        migration.run["quantize_base"] = "nf4" if four else "int8"


def not_quantized(method: Any) -> str:
    """Says what to use instead of a quantization method that is not supported."""
    return (
        f"{method}: it is not supported. quantize_base has nf4 (as bitsandbytes), int8 "
        "and fp8, which quantize the original model when it is loaded."
    )


def set_start(migration: Migration, _: str, folder: Any) -> None:
    """Starts the job from an adapter, whose rank, lora_alpha and targets it takes."""
    if not folder:
        return
    migration.job["init_from"] = folder
    for key in _ADAPTER:
        migration.job.pop(key, None)
        migration.left_out[key] = f"It is taken from the adapter in {folder}."


def set_new_tokens(migration: Migration, key: str, texts: Any) -> None:
    """Trains the rows of tokens that the other tool adds to the tokenizer."""
    if not texts:
        return
    if isinstance(texts, str):
        texts = list(filter(None, map(str.strip, texts.split(","))))
    is_list = isinstance(texts, list) and all(isinstance(one, str) for one in texts)
    if not (is_list and all(texts)):
        migration.left_out[key] = f"{texts!r:.80} is no list of texts."
        return
    found = migration.job.get("new_special_tokens", ())
    migration.job["new_special_tokens"] = list(dict.fromkeys([*found, *texts]))
    if key in _PLAIN_TOKENS:
        migration.left_out[key] = (
            "The tokens are special here, so generated texts leave them out. In "
            f"{migration.tool}, they are not."
        )


def set_held_out_share(migration: Migration, key: str, share: Any) -> None:
    """Sets the share of the records that is held out, if it is a share."""
    if not share:
        return
    if "eval_data" in migration.job:
        migration.left_out[key] = f"{share}: there is a data set of held-out records."
    elif isinstance(share, int | float) and 0 < share < 1:
        migration.job["eval_fraction"] = share
    else:
        migration.left_out[key] = (
            f"{share}, a number of records: eval_fraction is a share. Set it to "
            f"{share} divided by the number of records."
        )


def finish(migration: Migration, table: Table) -> Migration:
    """Takes the settings that are left, by our names or with reasons; returns all."""
    given = migration.given
    _note_epochs_of_evaluation(migration)
    if given.get("max_steps") in (-1, 0):  # The number of epochs decides.
        del given["max_steps"]
    if given.get("max_grad_norm") == 0:
        migration.job["max_grad_norm"] = migration.take("max_grad_norm") or None
    migration.take_rest(table)
    _note_new_tokens(migration)
    _check_optimizer(migration)
    migration.job.setdefault("seed", 42)
    _check_evaluation(migration)
    return migration


def _note_epochs_of_evaluation(migration: Migration) -> None:
    """Says how often to evaluate, if the other tool did so by epochs."""
    for key in ("evals_per_epoch", "eval_strategy", "evaluation_strategy"):
        value = migration.given.get(key)
        times = 1 if value == "epoch" else value
        if isinstance(times, int | float) and times > 0:
            batch = migration.job.get("batch_size", "batch_size")
            divisor = batch if times == 1 else f"{batch} x {times}"
            migration.left_out[key] = (
                f"{migration.take(key)}: eval_every is a number of optimizer steps. To "
                "evaluate as often, set it to the number of training records divided "
                f"by {divisor}."
            )


def _note_new_tokens(migration: Migration) -> None:
    """Says how new tokens get into the base, and which of its weights are trained."""
    job = migration.job
    if not (texts := job.get("new_special_tokens")):
        return
    command = [str(migration.run.get("model")), "OUT"]
    how = "model to OUT"
    if revision := migration.run.get("revision"):
        command += ["--revision", str(revision)]
        how += ", without revision"
    command += ["--new-tokens", *texts]
    migration.to_do.append(
        f"new_special_tokens: run `jaxlora convert {shlex.join(command)}` and set "
        f"{how}. Leave out of the command the tokens that the tokenizer has."
    )
    if job.get("modules_to_save"):
        migration.to_do.append(
            "modules_to_save: whole copies of modules are trained, with the rows of "
            "new tokens. Without this setting, only those rows are, which takes far "
            "less memory."
        )
    else:
        migration.to_do.append(
            f"new_special_tokens: {migration.tool} trains new tokens with whole copies "
            "of embedding and head; here only their rows are trained, as copies take "
            "far more memory. For copies, set modules_to_save: [embed_tokens, lm_head]."
        )


def _check_optimizer(migration: Migration) -> None:
    """Leaves out an optimizer that cannot train whole modules or rows of tokens."""
    job = migration.job
    found = OPTIMIZERS.get(job.get("optimizer", "adamw"))
    for setting in ("modules_to_save", "trainable_token_indices", "new_special_tokens"):
        if job.get(setting) and found is not None and found.mixes_elements:
            del job["optimizer"]
            job.pop("optimizer_args", None)
            migration.left_out["optimizer"] = (
                f"{found.name} cannot be combined with {setting}: AdamW takes its "
                "place, which may need another learning_rate."
            )
            return


def _check_evaluation(migration: Migration) -> None:
    """Leaves out settings of the evaluation that have nothing to evaluate."""
    job = migration.job
    if not isinstance(job.get("eval_every", 1), int):
        share = job.pop("eval_every")
        migration.left_out["eval_steps"] = (
            f"{share}: {reasons.EVERY_EVALUATION} For a share of the training, "
            "multiply it by the job's steps, which `jaxlora plan` prints."
        )
    has_data = bool(job.get("eval_fraction")) or "eval_data" in job
    if job.get("early_stopping") and not job.get("eval_every"):
        del job["early_stopping"]
        job.pop("early_stopping_delta", None)
        migration.left_out["early_stopping_patience"] = (
            "early_stopping counts evaluations: set eval_every with it."
        )
    for key in ("eval_every", "early_stopping", "keep_best"):
        if key in job and not has_data:
            del job[key]
            migration.left_out[key] = "There are no held-out records."
