"""Writes checkpoints of a run: its jobs and their progress; never the base."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.common.atomic import make_folder
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_adapter import SavedTensors
from jaxlora.run.saved_run import SavedCheckpoint, SavedRun, sealed
from jaxlora.train.saved.read_checkpoint import (
    FORMAT,
    ITEM,
    META_FILE,
    array_name,
    checkpoint_numbers,
    checksum,
    newest_checkpoint,
    other_files,
)

_TEMPORARY = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")


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
        # Orbax also logs the errors that it raises, with the traces of its threads.
        logging.getLogger("absl").addFilter(_is_not_raised_as_well)
        if is_writer and os.path.lexists(self._folder):
            with self._explaining():
                for path in unfinished_checkpoints(self._folder):
                    shutil.rmtree(path)

    @functools.cached_property
    def _manager(self) -> Any:
        # Importing orbax takes a second, in the thread that writes.
        from jaxlora.train.saved.orbax_folder import open_manager

        make_folder(self._folder)
        return open_manager(self._folder, self._keep)

    def prepare(self) -> None:
        """Loads the library that writes checkpoints, so that the first need not."""
        with self._explaining():
            _ = self._manager

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
        with self._explaining():
            from jaxlora.train.saved.orbax_folder import save_files

            if not save_files(self._manager, number, arrays, meta):
                raise RuntimeError("orbax declined to write it")

    def close(self) -> None:
        """Closes the folder."""
        if "_manager" in vars(self):
            with self._explaining():
                self._manager.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises errors of writing as `CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except (
            OSError,
            ValueError,
            RuntimeError,
            safetensors.SafetensorError,
        ) as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self._folder}: {error}. Those "
                "before it are whole: mend the cause (is the disk full?) and resume."
            ) from error


def unfinished_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the checkpoints that a kill left incomplete; lists folders only.

    Raises:
        CheckpointError: A folder has the name of a checkpoint, complete or not, and
            holds something else.
    """
    left = [p for p in folder.iterdir() if _TEMPORARY.fullmatch(p.name)]
    found = [p for p in left if not p.is_dir() or p.is_symlink() or other_files(p)]
    for number in checkpoint_numbers(folder):
        path = folder / str(number)
        # A kill while an old checkpoint is removed leaves a part of its files.
        if not (path / ITEM / META_FILE).exists() and other_files(path):
            found.append(path)
    if found:
        raise CheckpointError(
            f"{found[0]} has the name of a checkpoint, and holds none. Move it away."
        )
    return left


def _is_not_raised_as_well(record: logging.LogRecord) -> bool:
    # The record names no file of orbax if its logger is older than the package absl.
    trace = record.exc_info and record.exc_info[2]
    return not (trace and "orbax" in trace.tb_frame.f_code.co_filename)


def _flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenates the tensors of one kind, in their order."""
    return np.concatenate([tensor.ravel() for tensor in tensors.values()])


def _shapes(tensors: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    return {path: list(tensor.shape) for path, tensor in tensors.items()}
