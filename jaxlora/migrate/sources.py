"""Finds the records of another tool's data set."""

import re
from collections.abc import Sequence
from typing import Any

from jaxlora.errors import ConfigError
from jaxlora.migrate.migration import Migration

# Suffixes of files with records, and of those that have to be converted first.
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".feather")
_OTHER_FILES = (".txt", ".tsv", ".gz", ".zst", ".zip", ".bz2", ".xz")
# The names that the package `datasets` gives to its readers of files.
_READERS = ("json", "csv", "parquet", "arrow", "text")
_FIRST_RECORDS = re.compile(r"\w*\[:([0-9]{1,15})\]")


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


def join(sets: Sequence[dict[str, Any]], **mix: Any) -> dict[str, Any]:
    """Returns `data` of some data sets.

    Args:
        sets: The settings of each data set.
        **mix: How several of them are mixed.
    """
    if len(sets) == 1:
        return dict(sets[0])
    return {**mix, "datasets": list(sets)}


def sets_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of each data set of `data`."""
    return data.get("datasets") or [data]


def take_sources(
    migration: Migration, key: str, dataset: dict[str, Any], default_split: str
) -> list[dict[str, Any]]:
    """Pops the location of a data set from its description.

    Args:
        migration: The settings; it is told what is left out.
        key: Names the description, such as `datasets.0`.
        dataset: The description, with the arguments of `datasets.load_dataset`: path,
            name, data_files, split and revision.
        default_split: The split of a data set on the hub, if none is given.

    Returns:
        path, subset, split, revision and limit of `data`, where they are needed, for
        each of its files.
    """
    split, name, revision = (
        dataset.pop(setting, None) for setting in ("split", "name", "revision")
    )
    paths = _take_paths(migration, key, dataset, str(split or default_split))
    if not is_on_hub(paths[0]):
        for setting, value in (("name", name), ("revision", revision)):
            if value:
                migration.left_out[f"{key}.{setting}"] = (
                    f"{value!r}: it is for data sets on the hub."
                )
        limit = _split_of_file(migration, key, str(split)) if split else {}
        if limit and len(paths) > 1:
            migration.to_do.append(
                f"data.limit: {key} had the first {limit['limit']} records of "
                f"{len(paths)} files together; here it is of each."
            )
        return [{"path": path, **limit} for path in paths]
    source: dict[str, Any] = {"path": paths[0]}
    migration.to_do.append(
        f"data.path: {paths[0]} is a data set on the hub. It needs `pip install "
        "'jaxlora[datasets]'`; or download it, and give the file."
    )
    if name:
        source["subset"] = name
    source["split"] = str(split or default_split)
    if revision:
        source["revision"] = revision
    return [source]


def is_on_hub(path: str) -> bool:
    """Whether a path is the id of a data set on the hub, by its form."""
    is_place = path.startswith((".", "/", "~")) or ":" in path or "\\" in path
    return (
        not is_place
        and path.count("/") <= 1
        and not path.endswith((*_FILES, *_OTHER_FILES))
    )


def _take_paths(
    migration: Migration, key: str, dataset: dict[str, Any], split: str
) -> list[str]:
    path = str(dataset.pop("path", None) or "")
    files = dataset.pop("data_files", None)
    if isinstance(files, dict):  # of a file, or a list of files, by split
        others = [name for name in files if name != split]
        if split in files:
            for name in others:
                migration.left_out[f"{key}.data_files.{name}"] = (
                    f"The split {split} is read."
                )
            others = [split]
        files = [f for name in others for f in _as_list(files[name])]
    paths = list(map(str, _as_list(files))) or [path]
    if files and path and path not in _READERS:
        verb = "download" if is_on_hub(path) else "find"
        for file in paths:
            migration.to_do.append(
                f"data.path: {verb} {file} of {path}, and give its path here."
            )
    for one in paths:
        _note_form(migration, one)
    return paths


def _note_form(migration: Migration, path: str) -> None:
    """Says what to do with a file that cannot be read where or as it is."""
    if path.endswith(_OTHER_FILES):
        migration.to_do.append(
            f"data.path: convert {path} to one of {', '.join(_FILES)}, and give it."
        )
    elif "://" in path:
        migration.to_do.append(f"data.path: download {path}, and give the file.")
    elif "*" in path:
        migration.to_do.append(f"data.path: list the files {path} in datasets.")


def _split_of_file(migration: Migration, key: str, split: str) -> dict[str, Any]:
    """Replaces a split that a local file, which is read as a whole, does not have."""
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
