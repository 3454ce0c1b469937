"""Which adapter folders this program wrote, and what is in them.

Only folders that it wrote, and to which nobody has added anything, are replaced.
"""

import dataclasses
import json
import os
import pathlib
from typing import Annotated, Literal

import pydantic
import xxhash
from pydantic import Field

from jaxlora.atomic import check_no_file
from jaxlora.errors import AdapterError
from jaxlora.strict import Strict, explain

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
RECORD_FILE = "jaxlora.json"
_File = Literal["adapter_config.json", "adapter_model.safetensors"]
_FILES: tuple[_File, ...] = (CONFIG_FILE, WEIGHTS_FILE)
# The settings that this program writes into adapter_config.json. peft writes others as
# well, so that a folder without a record that has exactly these is ours.
_CONFIG_KEYS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}


class ExportRecord(Strict):
    """What a run says of an adapter that it exports.

    Attributes:
        job: The job's name.
        step: Optimiser steps behind the weights.
        checksums: XXH3 of each file, in hexadecimal, by its name; filled in when the
            record is written.
    """

    job: str
    step: Annotated[int, Field(ge=0)]
    checksums: dict[_File, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]] = {}


def write_record(folder: pathlib.Path, record: ExportRecord) -> None:
    """Writes a record beside the files of an adapter, with their checksums."""
    checksums = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in _FILES
    }
    record = record.model_copy(update={"checksums": checksums})
    text = json.dumps(record.model_dump(), indent=2) + "\n"
    (folder / RECORD_FILE).write_text(text, encoding="utf-8")


def read_record(folder: pathlib.Path) -> ExportRecord | None:
    """The record of an adapter's folder, or None if it has none.

    Raises:
        AdapterError: The record is damaged.
    """
    path = folder / RECORD_FILE
    try:
        return ExportRecord.model_validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}.") from error
    except pydantic.ValidationError as error:
        raise AdapterError(
            f"{explain(error, str(path))}\nThe file is damaged. Remove the folder, or "
            "move it away."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """An adapter that a run exported, as it is in its files.

    Attributes:
        record: What the run said of it.
        files: The bytes of each file, the record's included, by name.
    """

    record: ExportRecord
    files: dict[str, bytes]


def read_export(folder: pathlib.Path) -> Export | None:
    """Reads an adapter's files and compares them with its record.

    A run that is going on may replace the folder meanwhile; it is then read again.

    Returns:
        None where there is no record, so that no run exported it.

    Raises:
        AdapterError: A file is missing, or its bytes have changed.
    """
    while True:
        before = _inode(folder)
        try:
            found = _read_export(folder)
        except AdapterError:
            if _inode(folder) == before:
                raise
        else:
            if found is not None or _inode(folder) == before:
                return found


def _inode(folder: pathlib.Path) -> int | None:
    return folder.stat().st_ino if folder.is_dir() else None


def _read_export(folder: pathlib.Path) -> Export | None:
    record = read_record(folder)
    if record is None:
        return None
    files = {RECORD_FILE: _read(folder / RECORD_FILE)}
    for name in _FILES:
        files[name] = _read(folder / name)
        if xxhash.xxh3_128_hexdigest(files[name]) != record.checksums.get(name):
            raise AdapterError(
                f"{folder / name} is damaged: its bytes are not those that "
                f"{RECORD_FILE} tells of. Remove the folder, or restore it from a copy."
            )
    return Export(record=record, files=files)


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}.") from error


def is_ours(folder: pathlib.Path) -> bool:
    """Whether this program wrote all that is in a folder."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if not set(_FILES) <= names <= {*_FILES, RECORD_FILE}:
        return False
    if RECORD_FILE in names:
        try:
            return read_record(folder) is not None
        except AdapterError:
            return False
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.keys() == _CONFIG_KEYS


def check_replaceable(folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Refuses to replace what this program did not write.

    Args:
        folder: Where an adapter is to be written.
        overwrite: Replace a folder whatever is in it; a file or a symbolic link is
            refused all the same.

    Raises:
        StorageError: There is a file or a symbolic link.
        AdapterError: There is a folder with other files.
    """
    folder = pathlib.Path(folder)
    check_no_file(folder)
    if overwrite or not folder.exists() or is_ours(folder):
        return
    raise AdapterError(
        f"{folder} holds files that jaxlora did not write, and an adapter would "
        "replace them. Move them away, choose another folder, or overwrite it "
        "(overwrite=True, or --overwrite)."
    )
