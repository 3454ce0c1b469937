"""Reads a file of another tool, and finds out which tool it is of."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxlora.common.yaml_file import parse_yaml
from jaxlora.config import LoraJob
from jaxlora.errors import ConfigError, ModelError
from jaxlora.migrate import axolotl, llama_factory, peft, trl
from jaxlora.migrate.migration import Migration

if TYPE_CHECKING:
    from jaxlora.models.config import ModelConfig

_Convert = Callable[[dict[str, Any]], Migration]
# Keys that only the files of a tool have, and the tool. The first that fits is taken.
_TOOLS: tuple[tuple[tuple[str, ...], _Convert], ...] = (
    (("peft_type",), peft.migrate),
    (("finetuning_type", "stage", "lora_rank", "lora_target"), llama_factory.migrate),
    (("base_model",), axolotl.migrate),
    (
        ("dataset_name", "use_peft", "lora_r", "per_device_train_batch_size"),
        trl.migrate,
    ),
)
# YAML 1.1, which the other tools read, has more words for true and false than ours.
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_LARGEST = 2**53
_IMPORT = re.compile(r"^(import \w|from [\w.]+ import )", re.MULTILINE)


def migrate_file(path: str | os.PathLike) -> Migration:
    """Converts a file of Axolotl, LLaMA-Factory or TRL, or PEFT's adapter_config.json.

    Raises:
        ConfigError: The file cannot be read, is of no tool that is known, or describes
            a training that jaxlora does not do.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path /= "adapter_config.json"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the path
        raise ConfigError(f"{path} cannot be read: {why}.") from error
    _check_script(path, text)
    values = parse_yaml(text, str(path), any_keys=True)  # JSON is YAML
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a mapping of settings.")
    for keys, convert in _TOOLS:
        if any(key in values for key in keys):
            try:
                migration = convert({k: _as_yaml_1_1(v, k) for k, v in values.items()})
                model = _read_model(migration.run.get("model"))
                migration.drop_invalid()
                if model is not None and _adapts_experts(migration.job, model):
                    migration.job["expert_rank"] = "full"
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error
            return migration
    raise ConfigError(
        f"{path} is not a file that can be converted: it has none of the keys "
        "base_model (Axolotl), finetuning_type (LLaMA-Factory), dataset_name or "
        "use_peft (TRL) and peft_type (PEFT's adapter_config.json). "
        "docs/run_file.md lists the settings of a run file."
    )


def _check_script(path: pathlib.Path, text: str) -> None:
    """Refuses a program, whose settings cannot be read without running it."""
    if path.suffix in (".py", ".ipynb") or _IMPORT.search(text):
        raise ConfigError(
            f"{path} is a Python program, and only files of settings are converted. "
            "docs/howto/from_peft.md shows how a script with LoraConfig and SFTConfig "
            "becomes a run file, and docs/howto/from_unsloth.md how a notebook of "
            "Unsloth does."
        )


def _read_model(model: Any) -> "ModelConfig | None":
    """Reads a base model that is here, and refuses one that cannot be used."""
    if not isinstance(model, str) or "\0" in model:
        return None
    folder = pathlib.Path(model)
    if not (folder / "config.json").is_file():
        return None
    # Imported late, because most settings name a model that is not here.
    from jaxlora.hf.files import read_json
    from jaxlora.hf.quantized.config import read_quantization
    from jaxlora.models.registry import model_config

    try:
        config = read_json(folder / "config.json")
        found = model_config(config)
        read_quantization(config)
    except ModelError as error:
        raise ConfigError(f"the model {folder} cannot be used: {error}") from error
    return found


def _adapts_experts(job: Mapping[str, Any], model: "ModelConfig") -> bool:
    """Returns whether a job adapts experts, whose rank others do not scale."""
    from jaxlora.adapters.targets import Targets, choose_linears
    from jaxlora.common.patterns import Patterns
    from jaxlora.models.config import is_of_expert
    from jaxlora.models.structure import linear_names

    fields = {field.name for field in dataclasses.fields(Targets)} & job.keys()
    given = {"target_modules": LoraJob.model_fields["target_modules"].default}
    given |= {name: job[name] for name in fields}
    targets = Targets(where="the job", **given)
    try:
        names = choose_linears(targets, linear_names(model), Patterns("the job"))
    except ConfigError:  # which training reports, with the job's name
        return False
    return any(map(is_of_expert, names))


def _as_yaml_1_1(value: Any, key: str) -> Any:
    """Returns a value as YAML 1.1 reads it, where `yes` and `off` are booleans.

    Raises:
        ConfigError: A number is beyond all settings, and could not be computed with.
    """
    if isinstance(value, dict):
        return {name: _as_yaml_1_1(item, key) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_yaml_1_1(item, key) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(
            f"{key!r:.80} has a whole number of {len(str(abs(value)))} digits. The "
            f"largest that is read is 2^53 = {_LARGEST}. Correct it."
        )
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value
