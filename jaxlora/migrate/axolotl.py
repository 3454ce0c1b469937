"""Axolotl's YAML."""

import itertools
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate import axolotl_data, common, preferences, reasons, sources
from jaxlora.migrate.migration import Migration
from jaxlora.migrate.unsupported import describe_quantization

_TOO_LONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
_PLUGINS = "Plugins of Axolotl do not run here; the kernels are chosen by the device."
_NOT_FINITE = "A job whose loss is not finite fails by itself."
_ONE_RATE = "All that an adapter trains has the job's learning_rate."
_REASONS = {
    "model_type": "The family is read from config.json.",
    "model_config": "The model is that of the checkpoint's config.json.",
    "model_config_type": "The family is read from config.json.",
    "overrides_of_model_config": "The model is that of the checkpoint's config.json.",
    "base_model_config": "config.json is read from the folder of the model.",
    "tokenizer_config": "The tokenizer is read from the folder of the model.",
    "tokenizer_type": "The tokenizer is read from tokenizer.json.",
    "tokenizer_use_fast": "The tokenizer is read from tokenizer.json.",
    "tokenizer_legacy": "The tokenizer is read from tokenizer.json.",
    "tokenizer_use_mistral_common": "The tokenizer is read from tokenizer.json.",
    "hf_use_auth_token": "Set the environment variable HF_TOKEN.",
    "strict": "Unknown keys are always errors.",
    "dataset_prepared_path": reasons.PREPARED,
    "dataset_processes": reasons.PREPARED,
    "skip_prepare_dataset": reasons.TEXT_ONLY,
    "shuffle_merged_datasets": "Data sets are joined, and shuffle is on.",
    "eval_sample_packing": "Samples are always packed, in evaluations too.",
    "evals_per_epoch": reasons.EVERY_EVALUATION,
    "saves_per_epoch": reasons.CHECKPOINTS,
    "eot_tokens": "Which tokens end a message is found out from the chat template.",
    "flash_attention": reasons.KERNELS,
    "xformers_attention": reasons.KERNELS,
    "sdp_attention": reasons.KERNELS,
    "flex_attention": reasons.KERNELS,
    "lora_mlp_kernel": reasons.KERNELS,
    "lora_qkv_kernel": reasons.KERNELS,
    "lora_o_kernel": reasons.KERNELS,
    "plugins": _PLUGINS,
    "eval_table_size": "Set samples of the run for texts generated at evaluations.",
    "eval_max_new_tokens": "Set max_new_tokens in samples of the run.",
    "eval_causal_lm_metrics": "Evaluations measure the loss.",
    "do_causal_lm_eval": "Evaluations measure the loss.",
    "loss_watchdog_threshold": _NOT_FINITE,
    "loss_watchdog_patience": _NOT_FINITE,
    "lora_fan_in_fan_out": "Linears are never transposed here.",
    "lora_target_parameters": "Adapters are on linears; experts are not supported.",
    "quantize_moe_experts": "Mixtures of experts are not supported.",
    "loraplus_lr_embedding": "Embeddings have no LoRA here.",
    "embedding_lr": _ONE_RATE,
    "embedding_lr_scale": _ONE_RATE,
    "unfrozen_parameters": "The weights of the base stay frozen.",
    "sample_packing_sequentially": "Each optimizer step is packed by itself.",
    "batch_size": "It follows from gradient_accumulation_steps.",
    "gptq": describe_quantization("GPTQ"),
    "qat": "The base is frozen, so quantization has nothing to train there.",
    "debug": "`jaxlora data show` prints samples.",
}
# Settings of training that is not on given answers, or of more than an adapter.
_OTHER_TRAINING = (
    *("process_reward_model", "kd_trainer", "diffusion"),
    *("relora", "num_labels", "trainer_cls"),
)


def migrate(given: dict[str, Any]) -> Migration:
    """Converts Axolotl's settings.

    Raises:
        ConfigError: They are of training that jaxlora does not do.
    """
    migration = Migration(tool="Axolotl", given=given)
    _check_kind(migration)
    learns_from_preferences = preferences.set_axolotl(migration)
    migration.run["model"] = migration.take("base_model")
    common.set_output(migration, "./model-out")
    four, eight = migration.take("load_in_4bit"), migration.take("load_in_8bit")
    common.set_quantized_base(migration, 4 if four else 8 if eight else None)
    _set_data(migration, learns_from_preferences)
    _set_adapter(migration)
    _set_length(migration)
    _set_schedule(migration)
    _set_batch(migration)
    common.set_optimizer(migration, "optimizer")
    _note_end_token(migration)
    migration.job["epochs"] = migration.take("num_epochs", 1.0)
    common.take_trainer_rest(migration, _REASONS)
    return migration


def _check_kind(migration: Migration) -> None:
    adapter = migration.take("adapter")
    if adapter not in ("lora", "qlora"):
        raise ConfigError(
            f"adapter is {adapter!r}, and jaxlora trains LoRA adapters. Only files "
            "with adapter: lora or adapter: qlora can be converted."
        )
    for key in _OTHER_TRAINING:
        if value := migration.take(key):
            raise ConfigError(
                f"{key} is {value!r}, and jaxlora trains LoRA adapters on given "
                f"answers only. Files with {key} cannot be converted."
            )


def _set_data(migration: Migration, learns_from_preferences: bool) -> None:
    datasets = migration.take("datasets") or _pretraining(migration)
    held_out = migration.take("test_datasets")
    template = axolotl_data.take_template(
        migration,
        "chat_template",
        migration.take("chat_template"),
        migration.take("chat_template_jinja"),
    )
    on_all = migration.take("train_on_inputs") is True
    job = migration.job
    take_data = axolotl_data.take_data
    if learns_from_preferences:
        take_data, on_all = axolotl_data.take_preferences, False
    if datasets:
        job["data"] = take_data(migration, "datasets", datasets, on_all, template)
    else:
        job["data"] = {"path": "records.jsonl"}
        migration.to_do.append("data.path: there were no datasets. Give a file.")
    if held_out:
        job["eval_data"] = take_data(
            migration, "test_datasets", held_out, on_all, template
        )
    read = [job[key] for key in ("data", "eval_data") if key in job]
    sets = itertools.chain(*map(sources.sets_of, read))
    if template is not None and not any("chat_template" in one for one in sets):
        migration.left_out["chat_template"] = "No data set has messages."
    key = "chat_template_kwargs"
    common.set_template_kwargs(migration, key, migration.take(key))
    common.set_held_out_share(migration, "val_set_size")
    if migration.take("curriculum_sampling"):
        job["shuffle"] = False


def _pretraining(migration: Migration) -> Any:
    """Returns the data sets of plain text, described like the others."""
    given = migration.take("pretraining_dataset")
    if isinstance(given, str):
        given = {"path": given}
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        return given
    return [
        {"type": "completion", "field": one.get("text_column")}
        | {k: v for k, v in one.items() if k not in ("text_column", "type")}
        if isinstance(one, dict)
        else one
        for one in given
    ]


def _set_adapter(migration: Migration) -> None:
    job = migration.job
    job["rank"] = migration.take("lora_r", 8)
    job["lora_alpha"] = migration.take("lora_alpha", 16)
    job["dropout"] = migration.take("lora_dropout", 0.0)
    targets = migration.take("lora_target_modules")
    if migration.take("lora_target_linear"):
        if targets:
            migration.left_out["lora_target_modules"] = (
                "lora_target_linear adapts all linears."
            )
        targets = "all-linear"
    if not targets:
        targets = "all-linear"
        migration.to_do.append("target_modules: none were given, so it is all-linear.")
    job["target_modules"] = targets
    for theirs, ours in (
        ("lora_rank_pattern", "rank_pattern"),
        ("lora_alpha_pattern", "alpha_pattern"),
    ):
        if pattern := migration.take(theirs):
            job[ours] = pattern
    common.set_start(migration, migration.take("lora_model_dir"))


def _set_length(migration: Migration) -> None:
    job = migration.job
    job["max_length"] = migration.take("sequence_len", 512)
    strategy = str(migration.take("excess_length_strategy", "drop")).lower()
    job["too_long"] = _TOO_LONG.get(strategy, strategy)


def _set_schedule(migration: Migration) -> None:
    common.set_schedule(migration, "lr_scheduler", "cosine")
    given = migration.given.keys()
    if migration.job.get("lr_schedule") != "constant" and not (
        given & {"warmup_steps", "warmup_ratio"}
    ):
        migration.job["warmup_ratio"] = 0.03
        migration.to_do.append(
            "warmup_ratio: Axolotl warms up for 3% of the steps by default, but for "
            "100 at most. Set warmup_steps: 100 for a run of over 3,333 steps."
        )


def _set_batch(migration: Migration) -> None:
    given = migration.given
    if "batch_size" in given and not given.get("gradient_accumulation_steps"):
        # An older setting: the samples of an optimizer step on one device.
        given.pop("micro_batch_size", None)
        samples = common.set_batch(migration, "batch_size", 1)
    else:
        samples = common.set_batch(migration, "micro_batch_size", 1)
    if migration.take("sample_packing"):
        common.note_packing(migration, samples)


def _note_end_token(migration: Migration) -> None:
    tokens = migration.given.get("special_tokens")
    if isinstance(tokens, dict) and (end := tokens.get("eos_token")):
        migration.to_do.append(
            f"special_tokens: the eos_token was {end!r}. If that of the checkpoint is "
            "another one, set it in tokenizer_config.json."
        )
