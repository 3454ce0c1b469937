"""Reads and checks checkpoints without changing them, so the run may be active."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence

import numpy as np
import safetensors
import xxhash

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Kind
from jaxlora.adapters.optimizers.table import evaluates_other_weights
from jaxlora.adapters.parked_slot import PARAMS, ParkedSlot
from jaxlora.common.json_file import check_regular_file
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_run import (
    SavedCheckpoint,
    SavedRun,
    SavedTensors,
    read_sealed,
)

FORMAT = 8
# A checkpoint is the folder checkpoints/<rounds>/run/ with these files.
ITEM, META_FILE, TENSORS_FILE = "run", "meta.json", "tensors.safetensors"
# Orbax's own files also begin with an underscore.
_FILES = (META_FILE, TENSORS_FILE, "commit_success.txt")
_BEING_WRITTEN = re.compile(r"\.tmp\w{6}")  # what safetensors renames at the end
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was read, with correct checksums.

    Attributes:
        folder: The folder of the checkpoint.
        meta: Its metadata.
        tensors: For each job that has begun and not ended, and each kind that was read,
            its tensors on the host, by path.
    """

    folder: pathlib.Path
    meta: SavedCheckpoint
    tensors: dict[str, dict[Kind, dict[str, np.ndarray]]]

    @property
    def number(self) -> int:
        """Rounds done."""
        return int(self.folder.name)

    @property
    def run(self) -> SavedRun:
        """State of the run besides the tensors of its jobs."""
        return self.meta.run

    def with_tensors(self, kinds: Sequence[Kind] | None = None) -> "ReadCheckpoint":
        """Reads the tensors, and compares them with their checksums.

        Args:
            kinds: Kinds of tensors to read; None: all that there are.

        Raises:
            CheckpointError: They are missing or damaged.
        """
        return dataclasses.replace(self, tensors=_read_tensors(self, kinds))

    def adapter(self, job: str) -> Adapter:
        """Returns the adapter of a job as it is exported.

        Its weights must have been read; all kinds, if `evaluates_other_weights`.
        """
        adapter = self.run.adapters[job].adapter(self.tensors[job][PARAMS])
        if not evaluates_other_weights(self.optimizer(job)):
            return adapter
        return self.parked(job).adapter(adapter)

    def parked(self, job: str) -> ParkedSlot:
        """Returns the state of a job's slot; all kinds must have been read."""
        return ParkedSlot.of(self.tensors[job], self.optimizer(job))

    def optimizer(self, job: str) -> str:
        """Returns the name of a job's optimizer."""
        return self.run.identity.jobs[job]["optimizer"]


def newest_checkpoint(folder: pathlib.Path) -> int | None:
    """Rounds done at the newest complete checkpoint in a folder, if there is one."""
    return max(checkpoint_numbers(folder), default=None)


def meta_file(folder: pathlib.Path) -> pathlib.Path:
    """Path of the metadata of the checkpoint in a folder."""
    return folder / ITEM / META_FILE


def checkpoint_numbers(folder: pathlib.Path) -> list[int]:
    """Rounds done at each complete checkpoint in a folder, in any order."""
    if not folder.is_dir():
        return []
    # Incomplete checkpoints have longer names.
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def other_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files in a folder that are not those of a checkpoint."""
    return [
        path
        for path in folder.rglob("*")
        if not (path.is_dir() and not path.is_symlink())
        and not (path.name in _FILES or path.name.startswith("_"))
        and not _BEING_WRITTEN.fullmatch(path.name)
    ]


def read_newest(
    folder: pathlib.Path, kinds: Sequence[Kind] | None = ()
) -> ReadCheckpoint:
    """Reads the newest checkpoint.

    An active run removes old checkpoints. If a checkpoint disappears while it is read,
    the newer one is read instead.

    Args:
        folder: The `checkpoints` folder of the run.
        kinds: Kinds of tensors to read; None: all that there are.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the text says how to
            go on.
    """
    number = newest_checkpoint(folder)
    if number is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint.")
    while True:
        try:
            found = _read(folder / str(number))
            return found if kinds == () else found.with_tensors(kinds)
        except CheckpointError:
            newer = newest_checkpoint(folder)
            if newer is None or newer <= number:
                raise
            number = newer


def _read(folder: pathlib.Path) -> ReadCheckpoint:
    path, cure = meta_file(folder), _cure(folder)
    meta = read_sealed(path, SavedCheckpoint, version=FORMAT, cure=cure)
    nothing = {name: {} for name in meta.tensors}
    return ReadCheckpoint(folder=folder, meta=meta, tensors=nothing)


def _read_tensors(
    checkpoint: ReadCheckpoint, kinds: Sequence[Kind] | None
) -> dict[str, dict[Kind, dict[str, np.ndarray]]]:
    path = checkpoint.folder / ITEM / TENSORS_FILE
    out: dict[str, dict[Kind, dict[str, np.ndarray]]] = {}
    try:
        check_regular_file(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            held = list(file.keys())
            for job, saved in checkpoint.meta.tensors.items():
                wanted = kinds
                if wanted is None:  # an array without a checksum is refused, too
                    arrays = (name.rsplit("/", 1) for name in held)
                    own = {kind for owner, kind in arrays if owner == job}
                    both = own | saved.checksums.keys()
                    wanted = sorted(both, key=lambda kind: (kind != PARAMS, kind))
                out[job] = {
                    kind: _split(file.get_tensor(array_name(job, kind)), saved, kind)
                    for kind in wanted
                }
    except (OSError, safetensors.SafetensorError, ValueError, TypeError) as error:
        cure = _cure(checkpoint.folder)
        raise CheckpointError(f"{path} is damaged: {error}. {cure}") from error
    return out


def array_name(job: str, kind: Kind) -> str:
    """Name of the array that holds a job's tensors of one kind."""
    return f"{job}/{kind}"


def _split(array: np.ndarray, saved: SavedTensors, kind: Kind) -> dict[str, np.ndarray]:
    """Splits an array into its tensors, by path; they are views.

    Raises:
        ValueError: The array is not the one that was saved.
    """
    shapes = saved.shapes_of(kind)
    size = sum(math.prod(shape) for shape in shapes.values())
    if array.shape != (size,) or checksum(array) != saved.checksums.get(kind):
        raise ValueError(f"the checksum of {kind} does not match")
    tensors, start = {}, 0
    for path, shape in shapes.items():
        end = start + math.prod(shape)
        tensors[path] = array[start:end].reshape(shape)
        start = end
    return tensors


def _cure(folder: pathlib.Path) -> str:
    others = checkpoint_numbers(folder.parent)
    before = max((n for n in others if n < int(folder.name)), default=None)
    if before is None:
        return (
            "There is no checkpoint before it. Restore it from a copy; or remove "
            f"{folder}, and --resume trains from the start."
        )
    return f"To go on from checkpoint {before}, remove {folder} and start it again."


def checksum(array: np.ndarray) -> str:
    """XXH3 of an array's dtype and bytes."""
    digest = xxhash.xxh3_128(array.dtype.str.encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()
