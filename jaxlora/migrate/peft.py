"""PEFT's adapter_config.json."""

from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration

_NO_SUCH_ADAPTER = "There are no such adapters here; this one is trained without it."
_REASONS = {
    "auto_mapping": "It names the class of the model in transformers.",
    "task_type": "The objective decides it.",
    "inference_mode": "It does not matter for training.",
    "bias": "Biases stay frozen.",
    "peft_version": "It does not matter for training.",
    "save_projection": "The matrices are always saved beside the vectors.",
    "fan_in_fan_out": "Linears are never transposed here.",
    **dict.fromkeys(
        ("use_qalora", "layer_replication", "alora_invocation_tokens", "arrow_config"),
        _NO_SUCH_ADAPTER,
    ),
    "target_parameters": _NO_SUCH_ADAPTER,
}
# PEFT's own values, which say nothing about the adapter.
_DEFAULTS = {
    "bias": "none",
    "init_lora_weights": True,
    "init_weights": True,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}


def migrate(given: dict[str, Any]) -> Migration:
    """Converts the settings of an adapter.

    Raises:
        ConfigError: The adapter is neither LoRA nor VeRA.
    """
    migration = Migration(tool="PEFT", given=given)
    kind = migration.take("peft_type")
    if kind not in ("LORA", "VERA"):
        raise ConfigError(
            f"peft_type is {kind!r}, and jaxlora trains LoRA and VeRA adapters. Only "
            "LORA and VERA can be converted."
        )
    migration.run["model"] = migration.take("base_model_name_or_path")
    if revision := migration.take("revision"):
        migration.run["revision"] = revision
    job = migration.job
    job |= {"name": "adapter", "data": {"path": "records.jsonl"}}
    if kind == "VERA":
        job |= {"use_vera": True, "rank": migration.take("r", 256)}
        job["dropout"] = migration.take("vera_dropout", 0.0)
    else:
        job["rank"] = migration.take("r", 8)
        job["lora_alpha"] = migration.take("lora_alpha", 8)
        job["dropout"] = migration.take("lora_dropout", 0.0)
    for key in ("target_modules", "rank_pattern", "alpha_pattern", "exclude_modules"):
        if value := migration.take(key):
            job[key] = sorted(map(str, value)) if isinstance(value, list) else value
    if "/" not in str(migration.run["model"]):
        migration.to_do.append(
            "model: if it was a folder, give its path; adapters may tell only its name."
        )
    migration.to_do.append("data.path: give the file to train on.")
    migration.to_do.append(
        "init_from: set it to the adapter's folder to train this adapter further, and "
        "leave out rank, lora_alpha and targets then."
    )
    for key, value in _DEFAULTS.items():
        if migration.given.get(key) == value:
            del migration.given[key]
    migration.take_rest(_REASONS)
    return migration
