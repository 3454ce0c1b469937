"""Reads and checks checkpoints without changing them, so the run may be active."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import safetensors
import xxhash

from jaxlora.errors import CheckpointError
from jaxlora.train.saved_run import SavedCheckpoint, SavedRun, read_sealed

FORMAT = 5
# A checkpoint is the folder checkpoints/<rounds>/run/ with these files.
ITEM, META_FILE, TABLES_FILE = "run", "meta.json", "tables.safetensors"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
Kind = Literal["params", "mu", "nu"]
KINDS: tuple[Kind, ...] = ("params", "mu", "nu")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was read, with correct checksums.

    Attributes:
        number: Rounds done.
        run: State of the run that was saved with the tables.
        layout: Shape of each table, by path.
        tables: Tables on the host, by path, for each kind that was asked for.
    """

    number: int
    run: SavedRun
    layout: dict[str, list[int]]
    tables: dict[Kind, dict[str, np.ndarray]]


def newest_checkpoint(folder: pathlib.Path) -> int | None:
    """Rounds done at the newest complete checkpoint in a folder, if there is one."""
    return max(_numbers(folder), default=None)


def _numbers(folder: pathlib.Path) -> list[int]:
    if not folder.is_dir():
        return []
    # Incomplete checkpoints have longer names.
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def read_newest(folder: pathlib.Path, kinds: Sequence[Kind] = ()) -> ReadCheckpoint:
    """Reads the newest checkpoint.

    An active run removes old checkpoints. If a checkpoint disappears while it is read,
    the newer one is read instead.

    Args:
        folder: The `checkpoints` folder of the run.
        kinds: Kinds of tables to read.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the text says how to
            go on.
    """
    number = newest_checkpoint(folder)
    if number is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint.")
    while True:
        try:
            return _read(folder, number, kinds)
        except CheckpointError:
            newer = newest_checkpoint(folder)
            if newer is None or newer <= number:
                raise
            number = newer


def _read(folder: pathlib.Path, number: int, kinds: Sequence[Kind]) -> ReadCheckpoint:
    place, cure = folder / str(number) / ITEM, _cure(folder, number)
    saved = read_sealed(place / META_FILE, SavedCheckpoint, version=FORMAT, cure=cure)
    tables = place / TABLES_FILE
    arrays = _arrays(tables, kinds, cure) if kinds else {}
    for kind, array in arrays.items():
        size = sum(math.prod(shape) for shape in saved.layout.values())
        if array.shape != (size,) or checksum(array) != saved.checksums.get(kind):
            raise CheckpointError(
                f"{tables} is damaged: the checksum of {kind} does not match. {cure}"
            )
    return ReadCheckpoint(
        number=number,
        run=saved.run,
        layout=saved.layout,
        tables={kind: split(array, saved.layout) for kind, array in arrays.items()},
    )


def _arrays(path: pathlib.Path, kinds: Sequence[Kind], cure: str) -> dict:
    """Reads the arrays of some kinds from a file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {kind: file.get_tensor(kind) for kind in kinds}
    except (OSError, safetensors.SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {cure}") from error


def _cure(folder: pathlib.Path, number: int) -> str:
    before = max((n for n in _numbers(folder) if n < number), default=None)
    if before is None:
        return (
            "There is no checkpoint before it. Restore it from a copy; or remove "
            f"{folder / str(number)}, and --resume trains from the start."
        )
    return (
        f"To go on from checkpoint {before}, remove {folder / str(number)} and start "
        "it again."
    )


def checksum(array: np.ndarray) -> str:
    """XXH3 of an array's dtype and bytes."""
    digest = xxhash.xxh3_128(array.dtype.str.encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


def split(flat: np.ndarray, layout: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Splits an array into its tables, by path; they are views."""
    tables, start = {}, 0
    for path, shape in layout.items():
        end = start + math.prod(shape)
        tables[path] = flat[start:end].reshape(shape)
        start = end
    return tables
