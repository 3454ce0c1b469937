"""LLaMA-Factory's YAML."""

from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate import common
from jaxlora.migrate.migration import Migration

_PREPARED = "Samples are prepared at the start of each run."
_REASONS = {
    "trust_remote_code": common.TRUST,
    "do_train": "`jaxlora train` trains.",
    "do_eval": "A job with held-out records is evaluated.",
    "template": "The tokenizer's own chat template is used.",
    "overwrite_cache": _PREPARED,
    "preprocessing_num_workers": _PREPARED,
    "dataloader_num_workers": _PREPARED,
    "tokenized_path": _PREPARED,
    "logging_steps": "log_every counts rounds, and is 1 by default.",
    "save_steps": common.CHECKPOINTS,
    "save_strategy": common.CHECKPOINTS,
    "save_only_model": common.CHECKPOINTS,
    "plot_loss": "losses.png is always written.",
    "overwrite_output_dir": "A folder with a run is never overwritten.",
    "report_to": common.TRACKING,
    "run_name": common.TRACKING,
    "ddp_timeout": common.DEVICES,
    "deepspeed": common.DEVICES,
    "flash_attn": common.KERNELS,
    "enable_liger_kernel": common.KERNELS,
    "use_unsloth": common.KERNELS,
    "eval_strategy": common.EVERY_EVALUATION,
    "quantization_method": "nf4 is as bitsandbytes stores it; int8 has one scale per "
    "output feature.",
    "resume_from_checkpoint": "`jaxlora train --resume` continues a run.",
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts LLaMA-Factory's settings.

    Raises:
        ConfigError: They are not of supervised training of a LoRA adapter.
    """
    migration = Migration(tool="LLaMA-Factory", given=given)
    stage, kind = migration.take("stage", "sft"), migration.take("finetuning_type")
    if kind != "lora" or stage not in ("sft", "pt"):
        raise ConfigError(
            f"finetuning_type is {kind!r} and stage is {stage!r}, and jaxlora trains "
            "LoRA adapters on given answers. Only files with finetuning_type: lora and "
            "stage: sft or pt can be converted."
        )
    migration.run["model"] = migration.take("model_name_or_path", "")
    output_dir = migration.take("output_dir", "saves/lora")
    migration.run["output_dir"] = output_dir
    common.set_quantized_base(migration, migration.take("quantization_bit"))
    job = migration.job
    job["name"] = common.job_name(output_dir, "adapter")
    _set_data(migration, stage)
    _set_adapter(migration)
    job["max_length"] = migration.take("cutoff_len", 2048)
    job |= common.TRANSFORMERS
    job["learning_rate"] = migration.take("learning_rate", job["learning_rate"])
    job["epochs"] = migration.take("num_train_epochs", job["epochs"])
    common.set_schedule(migration, "lr_scheduler_type", job["lr_schedule"])
    common.set_batch(migration, "per_device_train_batch_size", 8)
    migration.take_rest(_REASONS)
    job.setdefault("seed", 42)
    common.check_evaluation(migration)
    return migration


def _set_data(migration: Migration, stage: str) -> None:
    names = migration.take("dataset", "records")
    names = names if isinstance(names, list) else str(names).split(",")
    folder = migration.take("dataset_dir", "data")
    job = migration.job
    job["data"] = {"path": f"{folder}/{names[0].strip()}.json"}
    if stage == "pt":
        job["data"]["kind"] = "text"
    elif migration.take("train_on_prompt"):
        job["data"]["loss_on"] = "all"
    if limit := migration.take("max_samples"):
        job["data"]["limit"] = limit
    migration.to_do.append(
        f"data.path: look up {names[0].strip()!r} in {folder}/dataset_info.json, and "
        "give its file or hub id."
    )
    for name in names[1:]:
        migration.left_out[f"dataset: {name.strip()}"] = (
            "a job has one data set. Join the files, or train a job on each."
        )
    share = migration.take("val_size")
    if isinstance(share, float) and 0 < share < 1:
        job["eval_fraction"] = share
    elif share:
        migration.left_out["val_size"] = (
            f"{share} records: eval_fraction is a share. Set it to {share} divided by "
            "the number of records."
        )


def _set_adapter(migration: Migration) -> None:
    job = migration.job
    job["rank"] = rank = migration.take("lora_rank", 8)
    job["lora_alpha"] = migration.take("lora_alpha", 2 * rank)
    job["dropout"] = migration.take("lora_dropout", 0.0)
    targets = migration.take("lora_target", "all")
    if isinstance(targets, str):
        targets = [name.strip() for name in targets.split(",")]
    job["target_modules"] = "all-linear" if targets == ["all"] else targets
    if folder := migration.take("adapter_name_or_path"):
        job["init_from"] = folder
