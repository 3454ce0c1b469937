"""Writes checkpoints of a run: its jobs and their progress; never the base."""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxlora.adapters.slots import ParkedSlot
from jaxlora.common.atomic import make_folder
from jaxlora.errors import CheckpointError
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.run.saved_run import SavedCheckpoint, SavedRun, SavedTensors, sealed
from jaxlora.train.saved.read_checkpoint import (
    FORMAT,
    ReadCheckpoint,
    array_name,
    checksum,
    newest_checkpoint,
    read_newest,
)

logger = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints, of which the newest few are kept.

    A checkpoint is written in the background and gets its name only when it is
    complete, so a kill at any time leaves only complete checkpoints.
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
            folder: Folder that holds only checkpoints; one process writes to it.
            keep: Number of checkpoints to keep; None: all.
            is_writer: Whether it is this process that writes to it. If not, `save`
                only takes note of the number.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        self._folder = folder.absolute()
        # Orbax also logs the errors that it raises, with the traces of its threads.
        logging.getLogger("absl").addFilter(_is_not_raised_as_well)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[bool] | None = None
        self._manager = self._open(keep) if is_writer else None
        self._latest = newest_checkpoint(self._folder)

    def _open(self, keep: int | None) -> Any:
        # Importing orbax takes half a second, which a run that is refused need not pay.
        from jaxlora.train.saved.orbax_folder import open_manager

        with self._explaining():
            make_folder(self._folder)
            return open_manager(self._folder, keep)

    def latest(self) -> int | None:
        """Rounds done at the newest checkpoint, which may still be being written."""
        return self._latest

    def save(
        self, number: int, parked: Mapping[str, ParkedSlot], run: SavedRun
    ) -> None:
        """Starts writing a checkpoint; returns before it is on the disk.

        Args:
            number: Rounds done.
            parked: By job name, the state of each job that has begun and not ended,
                between two global batches. The arrays must not change afterwards.
            run: State of the run to save with them.

        Raises:
            CheckpointError: This checkpoint, or the one before, could not be written.
        """
        self.wait()
        if self._latest is not None and number <= self._latest:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {self._latest}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )
        self._latest = number
        if self._manager is not None:
            self._pending = self._writer.submit(self._write, number, dict(parked), run)

    def _write(self, number: int, parked: dict[str, ParkedSlot], run: SavedRun) -> bool:
        arrays = {
            array_name(job, kind): _flat(tensors, state)
            for job, state in parked.items()
            for kind, tensors in state.by_kind().items()
        }
        tensors = {
            job: SavedTensors(
                shapes={path: list(a.shape) for path, a in state.params.items()},
                checksums={
                    kind: checksum(arrays[array_name(job, kind)])
                    for kind in state.by_kind()
                },
            )
            for job, state in parked.items()
        }
        saved = SavedCheckpoint(run=run, tensors=tensors)
        meta = json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(saved)}))
        from jaxlora.train.saved.orbax_folder import save_files

        assert self._manager is not None
        return save_files(self._manager, number, arrays, meta)

    def wait(self) -> None:
        """Waits until the pending checkpoint is on the disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._explaining():
            if not pending.result():
                raise RuntimeError("orbax declined to write it")

    def restore(self, identity: RunIdentity) -> ReadCheckpoint:
        """Reads the newest checkpoint, to resume from it; logs what has changed.

        Args:
            identity: Identity of this run.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or it is of another
                run.
        """
        found = read_newest(self._folder, None)
        then = found.run.identity
        path = self._folder / str(found.number)
        check_same_run(identity, then, path, "the checkpoint")
        for change in identity.changes(then):
            logger.warning("changed since the checkpoint: %s", change)
        return found

    def close(self) -> None:
        """Finishes writing and closes the folder.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._manager is not None:
                with self._explaining():
                    self._manager.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises errors of this or an earlier background write as `CheckpointError`."""
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


def _is_not_raised_as_well(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _flat(tensors: Mapping[str, np.ndarray], state: ParkedSlot) -> np.ndarray:
    """Concatenates the tensors of one kind in one array, in the order of `params`."""
    return np.concatenate([tensors[path].ravel() for path in state.params])
