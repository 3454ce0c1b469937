"""YAML of TRL's commands (`--config`), with settings of transformers and PEFT."""

import itertools
from typing import Any

from jaxlora.config.aliases import STREAMING
from jaxlora.errors import ConfigError
from jaxlora.migrate import common, preferences, reasons, sources
from jaxlora.migrate.migration import Migration

_ADAPTER = ("use_peft", "lora_r", "r", "lora_alpha", "lora_target_modules")
# Settings of training on generated answers.
_OTHER_TRAINING = ("num_generations", "reward_funcs", "reward_model_name_or_path")
_TOKENS = "The tokenizer is used as it is in the checkpoint."
_REASONS = {
    "env": "Set environment variables before the command.",
    "dataset_streaming": STREAMING,
    "streaming": STREAMING,
    "eos_token": _TOKENS,
    "pad_token": _TOKENS,
    "chat_template_path": reasons.OWN_TEMPLATE,
    "loss_type": "The loss is the mean of -log p over the tokens that are trained on.",
    "lora_task_type": "The objective decides it.",
    "lora_target_parameters": "Adapters are on linears; experts are not supported.",
    "model_init_kwargs": "Set revision, dtype and attention of the run.",
    "use_cpu": "Set JAX_PLATFORMS=cpu to train on the CPU.",
    "shuffle_dataset": "shuffle is on.",
    "ignore_bias_buffers": reasons.DEVICES,
    **dict.fromkeys(
        ("eval_packing", "packing_strategy", "padding_free", "pad_to_multiple_of"),
        "Samples are always packed, and each attends to itself only.",
    ),
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts TRL's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="TRL", given=given)
    _check_kind(migration)
    if objective := preferences.trl_objective(given):
        preferences.set_trl(migration, objective)
    migration.run["model"] = migration.take("model_name_or_path")
    common.set_output(migration, "trainer_output")
    bits = [b for b in (4, 8) if migration.take(f"load_in_{b}bit")]
    common.set_quantized_base(migration, bits[0] if bits else None)
    _set_data(migration, objective is not None)
    key = "chat_template_kwargs"
    common.set_template_kwargs(migration, key, migration.take(key))
    _set_adapter(migration)
    _set_length(migration)
    job = migration.job
    rate = 2e-5
    if objective is not None:
        rate = preferences.TRL_RATES.get(objective, preferences.TRL_RATE)
    job["learning_rate"] = migration.take("learning_rate", rate)
    job["epochs"] = migration.take("num_train_epochs", common.TRANSFORMERS["epochs"])
    common.set_schedule(migration, "lr_scheduler_type", "linear")
    samples = common.set_batch(migration, "per_device_train_batch_size", 8)
    if migration.take("packing"):
        common.note_packing(migration, samples)
    common.set_optimizer(migration, "optim")
    common.set_trackers(migration)
    common.take_trainer_rest(migration, _REASONS)
    return migration


def _check_kind(migration: Migration) -> None:
    keys = migration.given.keys()
    if found := [key for key in _OTHER_TRAINING if key in keys]:
        raise ConfigError(
            f"{found[0]} is a setting of training on generated answers, and jaxlora "
            "trains on given answers only. Settings of supervised training, of "
            "preferences (DPO, KTO, CPO, ORPO) and of reward models can be converted."
        )
    is_on = migration.given.get("use_peft", bool(keys & set(_ADAPTER)))
    migration.take("use_peft")
    if is_on is not True:
        raise ConfigError(
            "use_peft is not true, so TRL trains all weights, and jaxlora trains LoRA "
            "adapters. If you gave --use_peft on the command line, add use_peft: true."
        )


def _set_data(migration: Migration, learns_from_preferences: bool) -> None:
    job = migration.job
    name, subset = migration.take("dataset_name"), migration.take("dataset_config")
    train = str(migration.take("dataset_train_split", "train"))
    test = str(migration.take("dataset_test_split", "test"))
    has_test = bool(migration.given.get("eval_strategy"))  # `no` is false in YAML 1.1.
    if datasets := migration.take("datasets"):
        datasets = sources.list_datasets(datasets, "datasets")
        if name:
            migration.left_out["dataset_name"] = f"{name}: datasets replaces it in TRL."
    elif name:
        datasets = [{"path": name, "name": subset, "split": train}]
    share = migration.take("test_split_size")
    if datasets:
        found = []
        for number, dataset in enumerate(map(dict, datasets)):
            where = f"datasets.{number}"
            found += sources.take_sources(migration, where, dataset, train)
            for key, value in dataset.items():
                if value:
                    migration.left_out[f"{where}.{key}"] = "Give a file of the records."
        job["data"] = sources.join(found)
    else:
        job["data"] = {"path": "records.jsonl"}
        migration.to_do.append("data.path: there was no dataset_name. Give a file.")
    if share:
        job["eval_fraction"] = share
    elif has_test and sources.is_on_hub(job["data"].get("path", "")):
        job["eval_data"] = job["data"] | {"split": test}
    elif has_test:
        migration.to_do.append("eval_data: give the file of held-out records.")
    if not learns_from_preferences:
        _set_fields(migration)


def _set_fields(migration: Migration) -> None:
    """Sets the field of the text, and which tokens are trained on."""
    both = [d for k in ("data", "eval_data") if (d := migration.job.get(k))]
    field = migration.take("dataset_text_field")
    on_answers = migration.take("assistant_only_loss")
    on_completions = migration.given.pop("completion_only_loss", None)
    for data in itertools.chain(*map(sources.sets_of, both)):
        if field:
            data["text"] = field
        if on_completions is False and not on_answers:
            data["loss_on"] = "all"
    if on_completions is None and not on_answers:
        migration.to_do.append(
            "data.loss_on: TRL trains on every token of records with messages, unless "
            "assistant_only_loss is set; here it is on the assistant's only. Set "
            "loss_on: all to do as TRL does. Records with prompt and completion are "
            "trained on the completion only, as in TRL."
        )


def _set_adapter(migration: Migration) -> None:
    job = migration.job
    job["rank"] = migration.take("lora_r", migration.take("r", 16))
    job["lora_alpha"] = migration.take("lora_alpha", 32)
    job["dropout"] = migration.take("lora_dropout", 0.05)
    targets = migration.take("lora_target_modules", migration.take("target_modules"))
    if not targets:
        targets = ["q_proj", "v_proj"]
        migration.to_do.append(
            "target_modules: none were given, and PEFT then adapts q_proj and v_proj "
            "of Llama, Qwen and most other models. Check it for yours."
        )
    job["target_modules"] = "all-linear" if targets == ["all-linear"] else targets


def _set_length(migration: Migration) -> None:
    if "max_length" in migration.given and migration.given["max_length"] is None:
        migration.to_do.append(
            "max_length: TRL did not cut samples. Set it to the longest sample."
        )
    job = migration.job
    job["max_length"] = migration.take(
        "max_length", migration.take("max_seq_length", 1024)
    )
    if (mode := migration.take("truncation_mode", "keep_start")) != "keep_start":
        migration.left_out["truncation_mode"] = f"{mode}: a sample is cut at its end."
