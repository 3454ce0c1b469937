"""What the files of several tools have in common."""

import pathlib
from typing import Any

from jaxlora.config import check_job_name
from jaxlora.migrate.migration import Migration

TRUST = "Models are read by jaxlora itself; no code of a checkpoint runs."
CHECKPOINTS = (
    "checkpoint_every counts rounds, and is 50 by default; a checkpoint is also "
    "written at the end and on Ctrl-C."
)
TRACKING = (
    "Set report_to of the run: tensorboard (the default), wandb or trackio; the "
    "environment variables of W&B and Trackio choose the project."
)
KERNELS = "The kernels are chosen by the device; see implementation and attention."
DEVICES = "Set mesh of the run (or --mesh): data, stage and fsdp, or auto."
EVERY_EVALUATION = (
    "eval_every is a number of optimizer steps. Without it, a job is evaluated at its "
    "start and its end."
)

# Defaults of transformers' TrainingArguments, which differ from ours.
TRANSFORMERS = {"learning_rate": 5e-5, "lr_schedule": "linear", "epochs": 3.0}


def job_name(output_dir: str | None, default: str) -> str:
    """Returns a name for the job, after the folder that it was written to."""
    name = pathlib.PurePath(output_dir or "").name
    try:
        return check_job_name(name)
    except ValueError:
        return default


def set_schedule(migration: Migration, key: str, default: str) -> None:
    """Sets the job's schedule from transformers' name of it."""
    schedule = str(migration.take(key, default))
    migration.job["lr_schedule"] = schedule.removesuffix("_with_warmup")
    if schedule == "constant":
        for warmup in ("warmup_steps", "warmup_ratio"):
            if migration.take(warmup):
                migration.left_out[warmup] = (
                    "The schedule `constant` has no warm-up in transformers."
                )


def set_batch(migration: Migration, key: str, default: int) -> int:
    """Sets the samples of an optimizer step; returns them.

    Args:
        migration: The settings.
        key: The other tool's name of the samples per device.
        default: Its default.
    """
    accumulation = migration.take("gradient_accumulation_steps", 1)
    samples = migration.take(key, default)
    if not isinstance(accumulation, int) or not isinstance(samples, int):
        migration.to_do.append(
            f"batch_size: {key} is {samples!r} and gradient_accumulation_steps is "
            f"{accumulation!r}. Set batch_size to their product."
        )
        return LoraDefaults.batch_size
    migration.job["batch_size"] = samples * accumulation
    migration.to_do.append(
        f"batch_size counts the samples of an optimizer step. It is {key} times "
        "gradient_accumulation_steps; if you trained on several devices, multiply it "
        "by their number."
    )
    return samples * accumulation


class LoraDefaults:
    """Defaults of ours that are used where a value cannot be converted."""

    batch_size = 8


def set_quantized_base(migration: Migration, bits: Any) -> None:
    """Sets the format of the base from a number of bits; None: it is not quantized."""
    formats = {4: "nf4", 8: "int8"}
    if bits is None:
        return
    if bits in formats:
        migration.run["quantize_base"] = formats[bits]
    else:
        migration.left_out["quantization_bit"] = "quantize_base has fp8, int8 and nf4."


def check_evaluation(migration: Migration) -> None:
    """Leaves out settings of the evaluation that have nothing to evaluate."""
    job = migration.job
    if not isinstance(job.get("eval_every", 1), int):
        share = job.pop("eval_every")
        migration.left_out["eval_steps"] = f"{share}: {EVERY_EVALUATION}"
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


def note_dataset(migration: Migration, path: str) -> None:
    """Says what a data set needs that is not a local file."""
    is_file = bool(pathlib.PurePath(path).suffix) or path.startswith((".", "/"))
    if not is_file:
        migration.to_do.append(
            f"data.path: {path} is a data set on the hub. It needs `pip install "
            "'jaxlora[datasets]'`; or download it, and give the file."
        )
