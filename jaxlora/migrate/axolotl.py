"""Axolotl's YAML."""

from collections.abc import Mapping
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate import common
from jaxlora.migrate.migration import Migration

_ALPACA = """\
{% if input is defined and input %}\
Below is an instruction that describes a task, paired with an input that provides \
further context. Write a response that appropriately completes the request.

### Instruction:
{{ instruction }}

### Input:
{{ input }}

### Response:
{% else %}\
Below is an instruction that describes a task. Write a response that appropriately \
completes the request.

### Instruction:
{{ instruction }}

### Response:
{% endif %}"""
_TYPES: Mapping[str, dict[str, Any]] = {
    "alpaca": {
        "kind": "prompt_completion",
        "prompt": _ALPACA,
        "completion": "output",
    },
    "completion": {"kind": "text"},
    "chat_template": {"kind": "messages"},
    "sharegpt": {"kind": "messages", "messages": "conversations"},
}
_TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
_PREPARED = "Samples are prepared at the start of each run."
_KEPT_TOKENS = (
    "The tokenizer is used as it is in the checkpoint. Samples are packed, so no "
    "padding token is needed."
)
_REASONS = {
    "model_type": "The family is read from config.json.",
    "tokenizer_type": "The tokenizer is read from tokenizer.json.",
    "trust_remote_code": common.TRUST,
    "strict": "Unknown keys are always errors.",
    "dataset_prepared_path": _PREPARED,
    "dataset_processes": _PREPARED,
    "sequence_len": "It became max_length.",
    "eval_sample_packing": "Samples are always packed, in evaluations too.",
    "evals_per_epoch": common.EVERY_EVALUATION,
    "saves_per_epoch": common.CHECKPOINTS,
    "save_steps": common.CHECKPOINTS,
    "save_strategy": common.CHECKPOINTS,
    "save_first_step": common.CHECKPOINTS,
    "resume_from_checkpoint": "`jaxlora train --resume` continues a run.",
    "logging_steps": "log_every counts rounds, and is 1 by default.",
    "wandb_project": common.TRACKING,
    "wandb_entity": common.TRACKING,
    "wandb_watch": common.TRACKING,
    "wandb_name": common.TRACKING,
    "wandb_log_model": common.TRACKING,
    "hub_model_id": "`jaxlora export RUN OUT --push OWNER/NAME` uploads the adapters.",
    "special_tokens": _KEPT_TOKENS,
    "tokens": _KEPT_TOKENS,
    "flash_attention": common.KERNELS,
    "xformers_attention": common.KERNELS,
    "sdp_attention": common.KERNELS,
    "lora_mlp_kernel": common.KERNELS,
    "lora_qkv_kernel": common.KERNELS,
    "lora_o_kernel": common.KERNELS,
    "plugins": common.KERNELS,
    "torch_compile": common.KERNELS,
    "tf32": "Products of float32 are computed as JAX does by default.",
    "gradient_checkpointing_kwargs": "Set remat of the run, if memory is short.",
    "deepspeed": common.DEVICES,
    "fsdp": common.DEVICES,
    "fsdp_config": common.DEVICES,
    "fsdp_version": common.DEVICES,
    "eval_table_size": "Nothing is generated during evaluations.",
    "eval_max_new_tokens": "Nothing is generated during evaluations.",
    "loss_watchdog_threshold": "A job whose loss is not finite fails by itself.",
    "loss_watchdog_patience": "A job whose loss is not finite fails by itself.",
    "lora_fan_in_fan_out": "Linears are never transposed here.",
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts Axolotl's settings.

    Raises:
        ConfigError: They are not of supervised training of a LoRA adapter.
    """
    migration = Migration(tool="Axolotl", given=given)
    _check_kind(migration)
    migration.run["model"] = migration.take("base_model")
    output_dir = migration.take("output_dir", "./model-out")
    migration.run["output_dir"] = output_dir
    _set_base(migration)
    migration.job["name"] = common.job_name(output_dir, "adapter")
    _set_data(migration)
    _set_adapter(migration)
    _set_length(migration)
    common.set_schedule(migration, "lr_scheduler", "cosine")
    _set_batch(migration)
    migration.job["epochs"] = migration.take("num_epochs", 1.0)
    _set_false_as_unset(migration)
    migration.take_rest(_REASONS)
    migration.job.setdefault("seed", 42)
    common.check_evaluation(migration)
    return migration


def _check_kind(migration: Migration) -> None:
    adapter, rl = migration.take("adapter"), migration.take("rl")
    if adapter not in ("lora", "qlora"):
        raise ConfigError(
            f"adapter is {adapter!r}, and jaxlora trains LoRA adapters. Only files "
            "with adapter: lora or adapter: qlora can be converted."
        )
    if rl is not None:
        raise ConfigError(
            f"rl is {rl!r}, and jaxlora trains on given answers only. Files with rl "
            "cannot be converted."
        )


def _set_base(migration: Migration) -> None:
    four, eight = migration.take("load_in_4bit"), migration.take("load_in_8bit")
    common.set_quantized_base(migration, 4 if four else 8 if eight else None)


def _set_data(migration: Migration) -> None:
    datasets = migration.take("datasets", [])
    held_out = migration.take("test_datasets", [])
    template = migration.take("chat_template")
    on_all = migration.take("train_on_inputs", False)
    if template not in (None, "tokenizer_default"):
        migration.left_out["chat_template"] = (
            f"{template!r}: the tokenizer's own chat template is used."
        )
    job = migration.job
    job["data"] = {"path": "records.jsonl"}
    if datasets:
        job["data"] = _dataset(migration, "datasets", datasets, on_all)
    else:
        migration.to_do.append("data.path: there were no datasets. Give a file.")
    if held_out:
        job["eval_data"] = _dataset(migration, "test_datasets", held_out, on_all)
    share = migration.take("val_set_size")
    if isinstance(share, float) and 0 < share < 1:
        job["eval_fraction"] = share
    elif share:
        migration.left_out["val_set_size"] = (
            f"{share} records: eval_fraction is a share. Set it to {share} divided by "
            "the number of records."
        )


def _dataset(
    migration: Migration, where: str, datasets: list[Any], on_all: bool
) -> dict[str, Any]:
    """Converts the first of some data sets; names the others."""
    first = dict(datasets[0]) if isinstance(datasets[0], dict) else {}
    kind = str(first.pop("type", "completion"))
    path = str(first.pop("path", "records.jsonl"))
    files = first.pop("data_files", None)
    if files:
        path = str(files[0] if isinstance(files, list) else files)
    data: dict[str, Any] = {"path": path, **_TYPES.get(kind.split(":")[0], {})}
    common.note_dataset(migration, path)
    if kind.split(":")[0] not in _TYPES:
        migration.to_do.append(
            f"data: type {kind!r} has no counterpart. Name the fields: prompt and "
            "completion (which may be templates), messages or text."
        )
    for key, ours in (
        ("name", "subset"),
        ("split", "split"),
        ("revision", "revision"),
        ("field_messages", "messages"),
        ("field", "text"),
    ):
        if value := first.pop(key, None):
            data[ours] = value
    if on_all:
        data["loss_on"] = "all"
    first.pop("ds_type", None)
    for key, value in first.items():
        if value not in (None, "", [], {}):
            migration.left_out[f"{where}.0.{key}"] = (
                "Check with `jaxlora plan` and the log that the records are read as "
                "you expect."
            )
    for number, other in enumerate(datasets[1:], start=1):
        name = other.get("path") if isinstance(other, dict) else other
        migration.left_out[f"{where}.{number}"] = (
            f"{name}: a job has one data set. Join the files, or train a job on each."
        )
    return data


def _set_adapter(migration: Migration) -> None:
    job = migration.job
    job["rank"] = migration.take("lora_r", 8)
    job["lora_alpha"] = migration.take("lora_alpha", 16)
    job["dropout"] = migration.take("lora_dropout", 0.0)
    targets = migration.take("lora_target_modules")
    if migration.take("lora_target_linear") or not targets:
        targets = "all-linear"
    job["target_modules"] = targets
    if folder := migration.take("lora_model_dir"):
        job["init_from"] = folder


def _set_length(migration: Migration) -> None:
    job = migration.job
    job["max_length"] = migration.take("sequence_len", 512)
    strategy = migration.take("excess_length_strategy", "drop")
    job["too_long"] = _TOO_LONG.get(strategy, strategy)


def _set_batch(migration: Migration) -> None:
    samples = common.set_batch(migration, "micro_batch_size", 1)
    if migration.take("sample_packing"):
        tokens = migration.job["max_length"]
        migration.to_do.append(
            f"batch_size: Axolotl packed samples, so its batch was {samples} sequences "
            f"of {tokens} tokens, each with many samples. For as many tokens in a "
            f"step, set batch_size to {samples} x {tokens} divided by the mean number "
            "of tokens of a sample."
        )


def _set_false_as_unset(migration: Migration) -> None:
    """Drops settings that are false, which turn nothing on."""
    for key, value in list(migration.given.items()):
        if value is False:
            del migration.given[key]
