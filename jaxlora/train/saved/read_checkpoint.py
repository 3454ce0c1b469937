"""Reads and checks checkpoints without changing them, so the run may be active."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import safetensors
import xxhash

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.optimizers.state import Kind, own_shapes
from jaxlora.adapters.optimizers.table import evaluates_other_weights
from jaxlora.adapters.parked_slot import PARAMS, ParkedSlot, adapter_from_rows
from jaxlora.common.json_file import check_regular_file
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_run import SavedRun, read_sealed

# A checkpoint is the folder checkpoints/<rounds>/run/ with these files.
ITEM, META_FILE, TENSORS_FILE = "run", "meta.json", "tensors.safetensors"
# Orbax's own files also begin with an underscore.
_FILES = (META_FILE, TENSORS_FILE, "commit_success.txt")
_BEING_WRITTEN = re.compile(r"\.tmp\w{6}")  # what safetensors renames at the end
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_TEMPORARY = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was read, with correct checksums.

    Attributes:
        folder: The folder of the checkpoint.
        run: State of the run besides the tensors of its jobs.
        tensors: For each job that has begun and not ended, and each kind that was read,
            its tensors on the host, by path.
    """

    folder: pathlib.Path
    run: SavedRun
    tensors: dict[str, dict[Kind, dict[str, np.ndarray]]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def number(self) -> int:
        """Rounds done."""
        return int(self.folder.name)

    def with_tensors(self, *, exported_only: bool = False) -> "ReadCheckpoint":
        """Reads the tensors, and compares them with their checksums.

        Args:
            exported_only: Whether to read only what exported adapters need.

        Raises:
            CheckpointError: They are missing or damaged, or do not fit their adapters.
        """
        path, tensors = self.folder / ITEM / TENSORS_FILE, {}
        try:
            check_regular_file(path)
            with safetensors.safe_open(path, framework="numpy") as file:
                for job in self.run.adapters:
                    tensors[job] = {}
                    kinds = shapes_by_kind(self.run, job, exported_only=exported_only)
                    for kind, shapes in kinds.items():
                        array = file.get_tensor(name := array_name(job, kind))
                        if checksum(array) != self.run.checksums.get(name):
                            raise ValueError(f"the checksum of {kind} does not match")
                        tensors[job][kind] = _split(array, shapes)
        except (
            OSError,
            safetensors.SafetensorError,
            ValueError,
            TypeError,
            LookupError,
        ) as error:
            reason = str(error).rstrip(".")
            raise CheckpointError(
                f"{path} is damaged: {reason}. {_cure(self.folder)}"
            ) from error
        return dataclasses.replace(self, tensors=tensors)

    def adapter(self, job: str) -> Adapter:
        """Returns the adapter of a job as it is exported; its tensors were read."""
        like = self.run.adapters[job]
        if evaluates_other_weights(self.run.optimizers[job]):
            return self.parked(job).adapter(like)
        return adapter_from_rows(self.tensors[job][PARAMS], like)

    def parked(self, job: str) -> ParkedSlot:
        """Returns the state of a job's slot; all kinds must have been read."""
        return ParkedSlot.of(self.tensors[job], self.run.optimizers[job])


def read_newest(
    folder: pathlib.Path,
    *,
    has_tensors: bool = False,
    exported_only: bool = False,
) -> ReadCheckpoint:
    """Reads the newest checkpoint.

    An active run removes old checkpoints. If a checkpoint disappears while it is read,
    the newer one is read instead.

    Args:
        folder: The `checkpoints` folder of the run.
        has_tensors: Whether to read the tensors, too.
        exported_only: Whether to read only the tensors that exported adapters need.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; the text says how to
            go on.
    """
    number = newest_checkpoint(folder)
    if number is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint.")
    while True:
        place = folder / str(number)
        try:
            run = read_sealed(meta_file(place), SavedRun, _cure(place))
            found = ReadCheckpoint(folder=place, run=run)
            if has_tensors or exported_only:
                found = found.with_tensors(exported_only=exported_only)
            return found
        except CheckpointError:
            newer = newest_checkpoint(folder)
            if newer is None or newer <= number:
                raise
            number = newer


def _cure(folder: pathlib.Path) -> str:
    others = checkpoint_numbers(folder.parent)
    before = max((n for n in others if n < int(folder.name)), default=None)
    if before is None:
        return (
            "There is no checkpoint before it. Restore it from a copy; or remove "
            f"{folder}, and --resume trains from the start."
        )
    return f"To go on from checkpoint {before}, remove {folder} and start it again."


# ---- the file of tensors: an array for each job and kind -----------------------------


def array_name(job: str, kind: Kind) -> str:
    """Name of the array that holds a job's tensors of one kind."""
    return f"{job}/{kind}"


def shapes_by_kind(
    run: SavedRun, job: str, *, exported_only: bool = False
) -> Mapping[Kind, Mapping[str, tuple[int, ...]]]:
    """Returns the shapes of a job's tensors of each kind, by path, in their order.

    Args:
        run: The metadata of the checkpoint.
        job: Name of the job.
        exported_only: Whether to leave out what an exported adapter does not need.
    """
    optimizer, arrays = run.optimizers[job], run.adapters[job].by_path()
    shapes = {path: array.shape for path, array in arrays.items()}
    if exported_only and not evaluates_other_weights(optimizer):
        return {PARAMS: shapes}
    return {PARAMS: shapes, **own_shapes(optimizer, shapes)}


def _split(
    array: np.ndarray, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Splits an array into its tensors, by path; they are views.

    Raises:
        ValueError: The array has another size.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(array, ends[:-1])
    each = zip(shapes.items(), parts, strict=True)
    return {path: part.reshape(shape) for (path, shape), part in each}


def checksum(array: np.ndarray) -> str:
    """XXH3 of an array's dtype and bytes."""
    digest = xxhash.xxh3_128(array.dtype.str.encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


# ---- the folder ----------------------------------------------------------------------


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


def unfinished_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints that a kill left incomplete; lists folders only.

    Raises:
        CheckpointError: A folder has the name of a checkpoint, complete or not, and
            holds something else.
    """
    if not folder.is_dir():
        return []
    left = [p for p in folder.iterdir() if _TEMPORARY.fullmatch(p.name)]
    found = [p for p in left if not p.is_dir() or p.is_symlink() or other_files(p)]
    for number in checkpoint_numbers(folder):
        path = folder / str(number)
        # A kill while an old checkpoint is removed leaves a part of its files.
        if not meta_file(path).exists() and other_files(path):
            found.append(path)
    if found:
        raise CheckpointError(
            f"{found[0]} has the name of a checkpoint, and holds none. Move it away."
        )
    return left


def other_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files in a folder that are not those of a checkpoint."""
    return [
        path
        for path in folder.rglob("*")
        if not (path.is_dir() and not path.is_symlink())
        and not (path.name in _FILES or path.name.startswith("_"))
        and not _BEING_WRITTEN.fullmatch(path.name)
    ]
