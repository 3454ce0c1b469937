"""The record in an adapter's folder, which shows that this program wrote the folder.

Only folders that this program wrote, without any added files, are replaced.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
import xxhash
from pydantic import Field

from jaxlora.adapters.files.model_card import CARD_FILE, is_our_card
from jaxlora.adapters.files.tokenizer_copy import COPIED
from jaxlora.common.atomic import check_no_file
from jaxlora.common.json_file import read_json_file, read_regular_file
from jaxlora.config.strict import StrictModel
from jaxlora.errors import AdapterError
from jaxlora.problems import format_errors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of tensors
RECORD_FILE = "jaxlora.json"
_File = Literal[
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_FILES: tuple[_File, ...] = (CONFIG_FILE, WEIGHTS_FILE)


class ExportRecord(StrictModel):
    """The record that a run keeps of each adapter that it exports.

    Attributes:
        job: The job's name.
        step: Optimizer steps behind the weights.
        checksums: XXH3 of each file in hexadecimal, by file name; set when the record
            is written.
        chat_template_kwargs: The setting of the job's data, if they have one.
    """

    job: str
    step: Annotated[int, Field(ge=0)]
    checksums: dict[_File, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]] = {}
    chat_template_kwargs: dict[str, Any] = {}


def write_record(folder: pathlib.Path, record: ExportRecord) -> None:
    """Writes a record with the checksums of the adapter's files into their folder."""
    copied = [name for name in COPIED if (folder / name).exists()]
    checksums = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes())
        for name in (*_FILES, *copied)
    }
    record = record.model_copy(update={"checksums": checksums})
    text = json.dumps(record.model_dump(exclude_defaults=True), indent=2) + "\n"
    (folder / RECORD_FILE).write_text(text, encoding="utf-8")


def read_record(folder: pathlib.Path) -> ExportRecord | None:
    """Reads the record of an adapter's folder; None if it has none.

    Raises:
        AdapterError: The record is damaged.
    """
    path = folder / RECORD_FILE
    try:
        data = read_regular_file(path)
        return ExportRecord.model_validate_json(data, strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}.") from error
    except pydantic.ValidationError as error:
        raise AdapterError(
            f"{format_errors(error, str(path))}\nThe file is damaged. Remove the "
            "folder, or move it away."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The files of an adapter that a run exported.

    Attributes:
        record: The run's record of the adapter.
        files: The bytes of each file, including the record, by name.
    """

    record: ExportRecord
    files: dict[str, bytes]


def read_export(folder: pathlib.Path) -> Export | None:
    """Reads an adapter's files and compares them with its record.

    Returns:
        The export; None if there is no record, so no run exported the adapter.

    Raises:
        AdapterError: A file is missing, or its bytes have changed.
    """
    return _look(folder, _read_export)


def _look[T](folder: pathlib.Path, look: Callable[[pathlib.Path], T]) -> T:
    """Looks at a folder, and again if an active run has replaced it meanwhile."""
    while True:
        before = _inode(folder)
        try:
            found = look(folder)
        except (AdapterError, FileNotFoundError):
            if _inode(folder) == before:
                raise
        else:
            if found or _inode(folder) == before:
                return found


def _inode(folder: pathlib.Path) -> int | None:
    try:
        return folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_export(folder: pathlib.Path) -> Export | None:
    record = read_record(folder)
    if record is None:
        return None
    files = {RECORD_FILE: _read(folder / RECORD_FILE)}
    for name in dict.fromkeys((*_FILES, *record.checksums)):
        files[name] = _read(folder / name)
        if xxhash.xxh3_128_hexdigest(files[name]) != record.checksums.get(name):
            raise AdapterError(
                f"{folder / name} is damaged: its bytes are not those that "
                f"{RECORD_FILE} tells of. Remove the folder, or restore it from a copy."
            )
    return Export(record=record, files=files)


def _read(path: pathlib.Path) -> bytes:
    try:
        return read_regular_file(path)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}.") from error


def is_ours(folder: pathlib.Path) -> bool:
    """Whether this program wrote everything in a folder, or it is empty or missing."""
    try:
        return _look(folder, _is_ours)
    except (AdapterError, FileNotFoundError):
        return False


def _is_ours(folder: pathlib.Path) -> bool:
    if _inode(folder) is None:
        return True
    paths = list(folder.iterdir())
    names = {path.name for path in paths}
    if not names:
        return True
    if not all(path.is_file() and not path.is_symlink() for path in paths):
        return False
    if CARD_FILE in names and not is_our_card(folder / CARD_FILE):
        return False
    if RECORD_FILE in names:
        # Another program may have written its weights beside our record.
        found = _read_export(folder)
        return found is not None and names <= {*found.files, CARD_FILE}
    if not {*_FILES} <= names <= {*_FILES, CARD_FILE}:
        return False
    # Commands that look at a run do not import JAX, as this does.
    from jaxlora.adapters.files.peft_config import written_settings

    # peft writes more settings than this program does.
    try:
        config = read_json_file(folder / CONFIG_FILE)
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    keys = config.keys() - {"loftq_config", "trainable_token_indices"}
    return keys in written_settings()


def check_replaceable(folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Refuses to replace files that this program did not write.

    Args:
        folder: Where an adapter is to be written.
        overwrite: Whether a folder may be replaced whatever it contains; a file or a
            symbolic link is refused anyway.

    Raises:
        StorageError: `folder` is a file or a symbolic link.
        AdapterError: `folder` holds files that this program did not write.
    """
    folder = pathlib.Path(folder)
    check_no_file(folder)
    if overwrite or is_ours(folder):
        return
    raise AdapterError(
        f"{folder} holds files that jaxlora did not write, and an adapter would "
        "replace them. Move them away, choose another folder, or overwrite it "
        "(overwrite=True, or --overwrite)."
    )
