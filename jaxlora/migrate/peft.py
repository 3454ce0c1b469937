"""PEFT's adapter_config.json."""

from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration, Table, To, set_parameters
from jaxlora.migrate.reasons import TRANSPOSED, by_key

_LISTS = ("target_modules", "rank_pattern", "alpha_pattern", "exclude_modules")
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
    for key, value in _DEFAULTS.items():
        if given.get(key) == value:
            del given[key]
    for key in _LISTS:  # Their order in the file is that of a set.
        if isinstance(given.get(key), list):
            given[key] = sorted(map(str, given[key]))
    migration.job |= {"name": "adapter", "data": {"path": "records.jsonl"}}
    migration.convert(_TABLE)
    migration.to_do += [
        "data.path: give the file to train on.",
        "init_from: set it to the adapter's folder to train this adapter further, and "
        "leave out rank, lora_alpha and targets then.",
    ]
    migration.take_rest(_TABLE)
    return migration


def _set_model(migration: Migration, _: str, model: Any) -> None:
    migration.run["model"] = model
    if "/" not in str(model):
        migration.to_do.append(
            "model: if it was a folder, give its path; adapters may tell only its name."
        )


def _set_kind(migration: Migration, _: str, kind: Any) -> None:
    if kind not in ("LORA", "VERA"):
        raise ConfigError(
            f"peft_type is {kind!r}, and jaxlora trains LoRA and VeRA adapters. Only "
            "LORA and VERA can be converted."
        )
    if kind == "VERA":
        migration.job["use_vera"] = True
        migration.convert({"r": To("rank", 256), "vera_dropout": To("dropout", 0.0)})
    else:
        migration.convert({"r": To("rank", 8), "lora_alpha": To("lora_alpha", 8)})
        migration.convert({"lora_dropout": To("dropout", 0.0)})


_TABLE: Table = {
    "peft_type": _set_kind,
    "base_model_name_or_path": _set_model,
    "revision": To("revision"),
    **{key: To(key) for key in _LISTS},
    "target_parameters": set_parameters,
    **by_key(
        {
            "It names the class of the model in transformers.": "auto_mapping",
            "The objective decides it.": "task_type",
            "It does not matter for training.": "inference_mode peft_version",
            "The matrices are always saved beside the vectors.": "save_projection",
            TRANSPOSED: "fan_in_fan_out",
            "Biases stay frozen.": "bias",
            "There are no such adapters here; this one is trained without it.": (
                "use_qalora layer_replication alora_invocation_tokens arrow_config"
            ),
        }
    ),
}
