"""Reads a run from a YAML file."""

import pathlib
from typing import Any

import pydantic

from jaxlora.config import LoraJob, RunConfig
from jaxlora.errors import ConfigError
from jaxlora.strict import format_errors
from jaxlora.yaml_file import parse_yaml


def load_run(path: str | pathlib.Path, **settings: Any) -> RunConfig:
    """Reads a run file, which has the keys of `RunConfig` and `defaults` for all jobs.

    A setting that a job lacks is taken from `defaults`, and then from the defaults of
    `LoraJob`. Paths in the file are relative to the working directory.

    Args:
        path: A YAML file.
        **settings: Settings of the run, which replace those of the file.

    Raises:
        ConfigError: The file is missing or is not YAML, a key is unknown, or a value
            is invalid. The message names the key and the value.
    """
    values = _read_mapping(path, "run file", "the keys model, output_dir and jobs")
    return run_config({**values, **settings}, where=str(path))


def load_job(path: str | pathlib.Path) -> LoraJob:
    """Reads one job from a YAML file, which has the keys of `LoraJob`.

    Args:
        path: A YAML file. Paths in it are relative to the working directory.

    Raises:
        ConfigError: As in `load_run`.
    """
    values = _read_mapping(path, "job file", "the keys of a job, such as name and data")
    try:
        return LoraJob.model_validate(_translated(values, str(path)))
    except pydantic.ValidationError as error:
        raise ConfigError(format_errors(error, str(path))) from error


def _read_mapping(path: str | pathlib.Path, kind: str, keys: str) -> dict[str, Any]:
    """Reads a YAML file that must hold a mapping."""
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: this {kind} does not exist.") from None
    # A ValueError is a byte that is not UTF-8, or a NUL in the path.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a {kind} is a mapping with {keys}, not a {type(values).__name__}."
        )
    return values


def run_config(values: dict[str, Any], *, where: str = "run") -> RunConfig:
    """Checks the contents of a run file; see `load_run`."""
    values = dict(values)
    defaults = values.pop("defaults", None) or {}
    jobs = values.get("jobs")
    if not isinstance(defaults, dict):
        raise ConfigError(
            f"{where}: defaults must be a mapping, got {defaults!r:.200}."
        )
    defaults = _translated(defaults, f"{where}: defaults")
    if isinstance(jobs, list):
        values["jobs"] = [
            {**defaults, **_translated(job, f"{where}: jobs.{i}")}
            if isinstance(job, dict)
            else job
            for i, job in enumerate(jobs)
        ]
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(format_errors(error, where)) from error


def _translated(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings of a job by our names."""
    try:
        return LoraJob.translate(values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
