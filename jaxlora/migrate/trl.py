"""YAML of TRL's commands (`--config`), with settings of transformers and PEFT."""

from typing import Any

from jaxlora.config.aliases import STREAMING
from jaxlora.errors import ConfigError
from jaxlora.migrate import data, preferences, reasons, trainer
from jaxlora.migrate.migration import Migration, Refused, Table, To, set_parameters
from jaxlora.migrate.reasons import by_key

_ADAPTER = {"use_peft", "lora_r", "r", "lora_alpha", "lora_target_modules"}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts TRL's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="TRL", given=given)
    given.setdefault("use_peft", bool(given.keys() & _ADAPTER))
    migration.convert(_TABLE)
    return trainer.finish(migration, _TABLE)


def _set_objective(migration: Migration, _: str, is_on: Any) -> None:
    if is_on is not True:
        raise ConfigError(
            "use_peft is not true, so TRL trains all weights, and jaxlora trains LoRA "
            "adapters. If you gave --use_peft on the command line, add use_peft: true."
        )
    preferences.set_trl(migration)


def _set_data(migration: Migration, _: str, name: Any) -> None:
    job, subset = migration.job, migration.take("dataset_config")
    train = str(migration.take("dataset_train_split", "train"))
    test = str(migration.take("dataset_test_split", "test"))
    has_test = bool(migration.given.get("eval_strategy"))  # `no` is false in YAML 1.1.
    if datasets := migration.take("datasets"):
        datasets = data.list_datasets(datasets, "datasets")
        if name:
            migration.left_out["dataset_name"] = f"{name}: datasets replaces it in TRL."
    elif name:
        datasets = [{"path": name, "name": subset, "split": train}]
    share, found = migration.take("test_split_size"), []
    for number, dataset in enumerate(datasets or ()):
        one = migration.part(f"datasets.{number}", dataset)
        found += data.take_sources(one, train)
        one.leave_rest("Give a file of the records.")
    if not found:
        found = [{"path": "records.jsonl"}]
        migration.to_do.append("data.path: there was no dataset_name. Give a file.")
    job["data"] = data.join(found)
    if share:
        job["eval_fraction"] = share
    elif has_test and data.is_on_hub(job["data"].get("path", "")):
        job["eval_data"] = job["data"] | {"split": test}
    elif has_test:
        migration.to_do.append("eval_data: give the file of held-out records.")
    if migration.objective is None:
        _set_fields(migration)


def _set_fields(migration: Migration) -> None:
    """Sets the field of the text, and which tokens are trained on."""
    field = migration.take("dataset_text_field")
    on_answers = migration.take("assistant_only_loss")
    on_completions = migration.given.pop("completion_only_loss", None)
    for one in data.all_sets(migration):
        if field:
            one["text"] = field
        if on_completions is False and not on_answers:
            one["loss_on"] = "all"
    if on_completions is None and not on_answers:
        migration.to_do.append(
            "data.loss_on: TRL trains on every token of records with messages, unless "
            "assistant_only_loss is set; here it is on the assistant's only. Set "
            "loss_on: all to do as TRL does. Records with prompt and completion are "
            "trained on the completion only, as in TRL."
        )


def _set_targets(migration: Migration, _: str, targets: Any) -> None:
    if not targets:
        targets = ["q_proj", "v_proj"]
        migration.to_do.append(
            "target_modules: none were given, and PEFT then adapts q_proj and v_proj "
            "of Llama, Qwen and most other models. Check it for yours."
        )
    is_all = targets == ["all-linear"]
    migration.job["target_modules"] = "all-linear" if is_all else targets


def _set_length(migration: Migration, _: str, older: Any) -> None:
    given = migration.given
    if "max_length" in given and given["max_length"] is None:
        migration.to_do.append(
            "max_length: TRL did not cut samples. Set it to the longest sample."
        )
    migration.job["max_length"] = migration.take("max_length", older)


def _note_truncation(migration: Migration, key: str, mode: Any) -> None:
    if mode not in (None, "keep_start"):
        migration.left_out[key] = f"{mode}: a sample is cut at its end."


_TABLE: Table = {
    **dict.fromkeys(
        ("num_generations", "reward_funcs", "reward_model_name_or_path"),
        Refused(
            "which is for training on generated answers, and jaxlora trains on given "
            "ones (supervised, of DPO, KTO, CPO, ORPO or of a reward model)"
        ),
    ),
    "use_peft": _set_objective,
    "model_name_or_path": trainer.set_model,
    "output_dir": To(trainer.set_output, "trainer_output"),
    "load_in_4bit": trainer.set_quantized,
    "dataset_name": _set_data,
    "chat_template_kwargs": data.set_template_kwargs,
    "lora_r r": To("rank", 16),
    "lora_alpha": To("lora_alpha", 32),
    "lora_dropout": To("dropout", 0.05),
    "lora_target_modules target_modules": _set_targets,
    "lora_target_parameters": set_parameters,
    "max_seq_length": To(_set_length, 1024),
    "truncation_mode": _note_truncation,
    "learning_rate": To("learning_rate", 2e-5),
    "num_train_epochs": To("epochs", 3.0),
    "lr_scheduler_type": To(trainer.set_schedule, "linear"),
    "per_device_train_batch_size": To(trainer.set_batch, 8),
    "optim": trainer.set_optimizer,
    "report_to": trainer.set_trackers,
    **by_key(
        {
            "Set environment variables before the command.": "env",
            STREAMING: "dataset_streaming streaming",
            "The tokenizer is used as it is in the checkpoint.": "eos_token pad_token",
            reasons.OWN_TEMPLATE: "chat_template_path",
            "The loss is the mean of -log p over the tokens that are trained on.": (
                "loss_type"
            ),
            "The objective decides it.": "lora_task_type",
            "Set revision, dtype and attention of the run.": "model_init_kwargs",
            "Set JAX_PLATFORMS=cpu to train on the CPU.": "use_cpu",
            "shuffle is on.": "shuffle_dataset",
            reasons.DEVICES: "ignore_bias_buffers",
            "Samples are always packed, and each attends to itself only.": (
                "eval_packing packing_strategy padding_free pad_to_multiple_of"
            ),
        }
    ),
}
