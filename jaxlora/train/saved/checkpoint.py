"""Writes checkpoints of a run: its jobs and their progress; never the base."""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.common.atomic import new_folder, remove_leftovers, sync_files
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_adapter import SavedTensors
from jaxlora.run.saved_run import SavedCheckpoint, SavedRun, sealed
from jaxlora.train.saved.read_checkpoint import (
    FORMAT,
    META_FILE,
    TENSORS_FILE,
    array_name,
    checkpoint_numbers,
    checksum,
    newest_checkpoint,
    other_files,
)

logger = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints, of which the newest few are kept.

    A checkpoint gets its name only when it is complete, so a kill at any time leaves
    only complete checkpoints.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        keep: int | None = None,
        is_writer: bool = True,
    ):
        """Opens a folder for writing and removes incomplete checkpoints.

        Args:
            folder: Folder that holds only checkpoints; one process writes to it. It is
                made before the first of them.
            keep: Number of checkpoints to keep; None: all.
            is_writer: Whether this process writes; otherwise it only reads, and the
                folder is left as it is.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        self._folder, self._keep = folder.absolute(), keep
        if is_writer and os.path.lexists(self._folder):
            try:
                check_names(self._folder)
            except OSError as error:
                raise self._unwritten(error) from error
            remove_leftovers(self._folder, alone=True)

    def latest(self) -> int | None:
        """Rounds done at the newest complete checkpoint; None if there is none."""
        return newest_checkpoint(self._folder)

    def save(
        self, number: int, parked: Mapping[str, ParkedSlot], run: SavedRun
    ) -> None:
        """Writes a checkpoint; it is on the disk when this returns.

        Args:
            number: Rounds done.
            parked: By job name, the state of each job that has begun and not ended,
                between two global batches.
            run: State of the run to save with them.

        Raises:
            CheckpointError: It could not be written.
        """
        latest = self.latest()
        if latest is not None and number <= latest:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {latest}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )
        arrays = {
            array_name(job, kind): _flat(tensors)
            for job, state in parked.items()
            for kind, tensors in state.by_kind().items()
        }
        tensors = {
            job: SavedTensors(
                shapes=_shapes(state.params),
                checksums={
                    kind: checksum(arrays[array_name(job, kind)])
                    for kind in state.by_kind()
                },
                state_shapes={
                    kind: _shapes(tensors)
                    for kind, tensors in state.optimizer_state.items()
                    if _shapes(tensors) != _shapes(state.params)
                },
            )
            for job, state in parked.items()
        }
        saved = SavedCheckpoint(run=run, tensors=tensors)
        meta = json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(saved)}))
        try:
            with new_folder(self._folder / str(number)) as folder:
                safetensors.numpy.save_file(arrays, folder / TENSORS_FILE)
                (folder / META_FILE).write_text(meta + "\n", encoding="utf-8")
                sync_files(folder)
            self._prune()
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._unwritten(error) from error

    def _prune(self) -> None:
        """Removes old checkpoints, but for what holds anything else."""
        if self._keep is None:
            return
        for number in sorted(checkpoint_numbers(self._folder))[: -self._keep]:
            path = self._folder / str(number)
            others = [path] if path.is_symlink() else other_files(path)
            if others:
                logger.warning("%s is kept, because it holds %s", path, others[0].name)
            else:
                shutil.rmtree(path)

    def _unwritten(self, error: Exception) -> CheckpointError:
        reason = error.__cause__ or error
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder}: {reason}. Those "
            "before it are whole: mend the cause (is the disk full?) and resume."
        )


def check_names(folder: pathlib.Path) -> None:
    """Refuses what has the name of a checkpoint and is none; reads no file.

    Raises:
        CheckpointError: There is such a folder.
    """
    for number in checkpoint_numbers(folder):
        path = folder / str(number)
        # A kill while an old checkpoint is removed leaves a part of its files.
        if not (path / META_FILE).exists() and other_files(path):
            raise CheckpointError(
                f"{path} has the name of a checkpoint, and holds none. Move it away."
            )


def _flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenates the tensors of one kind, in their order."""
    return np.concatenate([tensor.ravel() for tensor in tensors.values()])


def _shapes(tensors: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    return {path: list(tensor.shape) for path, tensor in tensors.items()}
