"""Reads a file of another tool, and finds out which tool it is of."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate import axolotl, llama_factory, peft
from jaxlora.migrate.migration import Migration
from jaxlora.yaml_file import parse_yaml

# A key that only the files of the tool have, and the tool.
_TOOLS: dict[str, Callable[[dict[str, Any]], Migration]] = {
    "peft_type": peft.migrate,
    "finetuning_type": llama_factory.migrate,
    "base_model": axolotl.migrate,
}


def migrate_file(path: str | os.PathLike) -> Migration:
    """Converts a file of Axolotl or LLaMA-Factory, or PEFT's adapter_config.json.

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
        raise ConfigError(f"{path} cannot be read: {error}") from error
    values = parse_yaml(text, str(path))  # JSON is YAML
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a mapping of settings.")
    for key, migrate in _TOOLS.items():
        if key in values:
            migration = migrate(dict(values))
            migration.drop_invalid()
            return migration
    raise ConfigError(
        f"{path} is not a file that can be converted: it has none of the keys "
        "base_model (Axolotl), finetuning_type (LLaMA-Factory) and peft_type (PEFT's "
        "adapter_config.json). docs/run_file.md lists the settings of a run file."
    )
