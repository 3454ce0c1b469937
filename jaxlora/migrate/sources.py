"""Where the records of another tool's data set are."""

import re
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate import reasons
from jaxlora.migrate.migration import Migration

# Suffixes of files with records, and of those that have to be converted first.
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".feather")
_OTHER_FILES = (".txt", ".tsv", ".gz", ".zst", ".zip", ".bz2", ".xz")
# The names that the package `datasets` gives to its readers of files.
_READERS = ("json", "csv", "parquet", "arrow", "text")
_FIRST_RECORDS = re.compile(r"\w*\[:(\d+)\]")


def list_datasets(given: Any, key: str) -> list[dict[str, Any]]:
    """Returns the descriptions of data sets that a setting lists.

    Raises:
        ConfigError: It is not a list of mappings with paths.
    """
    is_list = isinstance(given, list) and all(isinstance(one, dict) for one in given)
    if not is_list or not all(
        one.get("path") or one.get("data_files") for one in given
    ):
        raise ConfigError(
            f"{key} is {given!r:.80}, which is not a list of data sets. Write it as a "
            "list of mappings with a path, such as [{path: records.jsonl}]."
        )
    return [dict(one) for one in given]


def name_others(migration: Migration, key: str, datasets: list[dict[str, Any]]) -> None:
    """Says that the data sets after the first are left out."""
    for number, other in enumerate(datasets[1:], start=1):
        name = other.get("path") or other.get("data_files")
        migration.left_out[f"{key}.{number}"] = f"{name}: {reasons.ONE_DATA_SET}"


def take_source(
    migration: Migration, key: str, dataset: dict[str, Any], default_split: str
) -> dict[str, Any]:
    """Takes where the records of a data set are out of its description.

    Args:
        migration: The settings; it is told what is left out.
        key: Names the description, such as `datasets.0`.
        dataset: The description, with the arguments of `datasets.load_dataset`: path,
            name, data_files, split and revision.
        default_split: The split of a data set on the hub, if none is given.

    Returns:
        path, subset, split, revision and limit of `data`, as far as they are needed.
    """
    path = _take_path(migration, key, dataset)
    split, name, revision = (
        dataset.pop(setting, None) for setting in ("split", "name", "revision")
    )
    source: dict[str, Any] = {"path": path}
    if not is_on_hub(path):
        for setting, value in (("name", name), ("revision", revision)):
            if value:
                migration.left_out[f"{key}.{setting}"] = (
                    f"{value!r}: it is for data sets on the hub."
                )
        if split:
            source |= _split_of_file(migration, key, str(split))
        return source
    migration.to_do.append(
        f"data.path: {path} is a data set on the hub. It needs `pip install "
        "'jaxlora[datasets]'`; or download it, and give the file."
    )
    if name:
        source["subset"] = name
    source["split"] = str(split or default_split)
    if revision:
        source["revision"] = revision
    return source


def is_on_hub(path: str) -> bool:
    """Whether a path is the id of a data set on the hub, by its form."""
    is_place = path.startswith((".", "/", "~")) or ":" in path or "\\" in path
    return (
        not is_place
        and path.count("/") <= 1
        and not path.endswith((*_FILES, *_OTHER_FILES))
    )


def _take_path(migration: Migration, key: str, dataset: dict[str, Any]) -> str:
    path = str(dataset.pop("path", None) or "")
    files = dataset.pop("data_files", None)
    if isinstance(files, dict):  # of a file, or a list of files, by split
        files = [f for some in files.values() for f in _as_list(some)]
    for number, file in enumerate(_as_list(files)[1:], start=1):
        migration.left_out[f"{key}.data_files.{number}"] = (
            f"{file}: {reasons.ONE_DATA_SET}"
        )
    if files:
        file = str(_as_list(files)[0])
        if path and path not in _READERS:
            verb = "download" if is_on_hub(path) else "find"
            migration.to_do.append(
                f"data.path: {verb} {file} of {path}, and give its path here."
            )
        path = file
    if path.endswith(_OTHER_FILES):
        migration.to_do.append(
            f"data.path: convert {path} to one of {', '.join(_FILES)}, and give it."
        )
    elif "://" in path:
        migration.to_do.append(f"data.path: download {path}, and give the file.")
    elif "*" in path:
        migration.to_do.append(f"data.path: join the files {path}, and give the file.")
    return path


def _split_of_file(migration: Migration, key: str, split: str) -> dict[str, Any]:
    """Returns what stands for a split of a local file, which is read as a whole."""
    if first := _FIRST_RECORDS.fullmatch(split):
        return {"limit": int(first[1])}
    if split != "train":
        migration.left_out[f"{key}.split"] = (
            f"{split!r}: all records of a local file are read. Set limit to read the "
            "first ones only, or give a file with those that are meant."
        )
    return {}


def _as_list(value: Any) -> list[Any]:
    if value in (None, ""):
        return []
    return list(value) if isinstance(value, list) else [value]
