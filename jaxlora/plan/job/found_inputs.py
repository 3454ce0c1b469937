"""Looks for the files and folders that a run names, without reading any."""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlora.config.data_config import DataConfig
from jaxlora.errors import AdapterError, CheckpointError, JaxloraError
from jaxlora.problems import Path


def missing_inputs(values: Mapping[str, Any]) -> list[tuple[Path, JaxloraError]]:
    """Finds the files and folders that a run names and that do not exist.

    Args:
        values: Settings of the run by our names. They may be invalid, and jobs may be
            configurations or mappings; what is no path is left to other checks.

    Returns:
        For each missing file or folder, the path of the setting and the error. Ids on
        the hub are not looked up.
    """
    from jaxlora.data.records.read import find_files
    from jaxlora.hf.files import find_local

    found: list[tuple[Path, JaxloraError]] = []

    def look(path: Path, check: Any, *arguments: Any) -> None:
        try:
            check(*arguments)
        except JaxloraError as error:
            found.append((path, error))

    if isinstance(model := values.get("model"), str) and model:
        look(("model",), find_local, model)
    for path, data in data_sets(values.get("jobs")):
        look((*path, "path"), find_files, data)
    for path, job in _jobs(values.get("jobs")):
        for key, check in _FOLDERS.items():
            if isinstance(folder := job.get(key), str):
                look((*path, key), check, folder)
    return found


def data_sets(jobs: Any) -> Iterator[tuple[Path, DataConfig]]:
    """Yields the data sets of a run's jobs, and the setting that has each."""
    for path, job in _jobs(jobs):
        for key in ("data", "eval_data"):
            for inner, one in _sets(job.get(key)):
                if (data := _data(one)) is not None:
                    yield (*path, key, *inner), data


def _jobs(jobs: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for number, job in enumerate(jobs if isinstance(jobs, list | tuple) else ()):
        if not isinstance(job, dict):
            job = dict(job) if hasattr(job, "model_fields_set") else {}
        yield ("jobs", number), job


def _sets(data: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the data sets of a job, and where in its data each of them is."""
    several = data.get("datasets") if isinstance(data, dict) else None
    if isinstance(data, DataConfig):
        several = data.datasets
    if not isinstance(several, list | tuple) or not several:
        yield (), data
        return
    for number, one in enumerate(several):
        is_path = isinstance(one, str)
        yield ("datasets", number), {"path": one} if is_path else one


def _data(data: Any) -> DataConfig | None:
    """Returns where data are; of invalid settings, the path alone."""
    if isinstance(data, DataConfig):
        return data
    if not isinstance(data, dict) or not isinstance(data.get("path"), str):
        return None
    try:
        return DataConfig(**data)
    except (JaxloraError, TypeError):
        pass
    try:
        return DataConfig(path=data["path"])
    except JaxloraError:
        return None


def _check_adapter(folder: str) -> None:
    if not _has(folder, "adapter_config.json"):
        raise AdapterError(
            f"init_from={folder!r}: there is no PEFT folder with adapter_config.json "
            f"(looked in {pathlib.Path.cwd()}). Give the folder of an adapter."
        )


def _check_run(folder: str) -> None:
    if not _has(folder, "checkpoints"):
        raise CheckpointError(
            f"{pathlib.Path(folder) / 'checkpoints'} holds no complete checkpoint. "
            "Give the output_dir of a run that has one."
        )


def _has(folder: str, name: str) -> bool:
    try:
        return os.path.lexists(pathlib.Path(folder) / name)
    except ValueError:  # a NUL, which the settings' own check reports
        return True


_FOLDERS = {"init_from": _check_adapter, "continue_from": _check_run}
