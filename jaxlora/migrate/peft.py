"""PEFT's adapter_config.json."""

from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration

_REASONS = {
    "auto_mapping": "It names the class of the model in transformers.",
    "task_type": "Models are causal language models.",
    "inference_mode": "It does not matter for training.",
    "bias": "Biases stay frozen.",
    "init_lora_weights": "A starts as by PEFT's default, and B at zero.",
    "peft_version": "It does not matter for training.",
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts the settings of an adapter.

    Raises:
        ConfigError: The adapter is not LoRA.
    """
    migration = Migration(tool="PEFT", given=given)
    kind = migration.take("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"peft_type is {kind!r}, and jaxlora trains LoRA adapters. Only LORA can "
            "be converted."
        )
    migration.run["model"] = migration.take("base_model_name_or_path", "")
    if revision := migration.take("revision"):
        migration.run["revision"] = revision
    job = migration.job
    job |= {"name": "adapter", "data": {"path": "records.jsonl"}}
    job["rank"] = migration.take("r", 8)
    job["lora_alpha"] = migration.take("lora_alpha", 8)
    job["dropout"] = migration.take("lora_dropout", 0.0)
    for key in ("target_modules", "rank_pattern", "alpha_pattern", "exclude_modules"):
        if value := migration.take(key):
            job[key] = sorted(value) if isinstance(value, list) else value
    migration.to_do.append("data.path: give the file to train on.")
    migration.to_do.append(
        "init_from: set it to the adapter's folder to train this adapter further, and "
        "leave out rank, lora_alpha and targets then."
    )
    for key, value in list(migration.given.items()):
        is_off = value is False or (key == "bias" and value == "none")
        is_default = key == "init_lora_weights" and value is True
        if is_off or is_default:
            del migration.given[key]
    migration.take_rest(_REASONS)
    return migration
