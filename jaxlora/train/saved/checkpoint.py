"""Writes checkpoints of a run: its jobs and their progress; never the base.

Orbax makes, renames and removes the folders of checkpoints. To import it takes a
second, so only the thread that writes checkpoints imports this module.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy

from jaxlora.adapters.parked_slot import ParkedSlot
from jaxlora.common.atomic import sync_files, sync_folder
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError
from jaxlora.run.saved_run import SavedRun, sealed_json
from jaxlora.train.saved.read_checkpoint import (
    ITEM,
    META_FILE,
    TENSORS_FILE,
    array_name,
    checksum,
    newest_checkpoint,
    other_files,
    shapes_by_kind,
    unfinished_checkpoints,
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
        keep: int,
        make: Callable[[], None] | None = None,
    ):
        """Opens a folder, made if there is none, and removes incomplete checkpoints.

        Args:
            folder: Folder that holds only checkpoints; one process writes to it.
            keep: Number of checkpoints to keep.
            make: Makes the folder, where its path may by now lead elsewhere.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        self._folder = folder.absolute()
        # Orbax also logs the errors that it raises, with the traces of its threads.
        logging.getLogger("absl").addFilter(_is_not_raised_as_well)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_KeepNewest(folder=self._folder, count=keep),
            enable_async_checkpointing=False,
            lightweight_initialize=True,  # reads no metadata of orbax's own
            create=False,
            # Without it, orbax would wait for the other processes of the run.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=processes.index(), active_processes={processes.index()}
            ),
        )
        with self._explaining():
            for path in unfinished_checkpoints(self._folder):
                shutil.rmtree(path)
            if not self._folder.exists():
                # Without its parents: a run's folder that was removed stays so.
                (make or self._folder.mkdir)()
                sync_folder(self._folder.parent)
            self._manager = ocp.CheckpointManager(self._folder, options=options)

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
        latest = newest_checkpoint(self._folder)
        if latest is not None and number <= latest:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {latest}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )
        arrays = {}
        for job in run.adapters:
            tensors = parked[job].by_kind()
            for kind, shapes in shapes_by_kind(run, job).items():
                flat = [tensors[kind][path].ravel() for path in shapes]
                arrays[array_name(job, kind)] = np.concatenate(flat)
        sums = {name: checksum(array) for name, array in arrays.items()}
        files = _Files(arrays, sealed_json(dataclasses.replace(run, checksums=sums)))
        with self._explaining():
            items = ocp.args.Composite(**{ITEM: files})
            if not self._manager.save(number, args=items):
                raise RuntimeError("orbax declined to write it")

    def close(self) -> None:
        """Closes the folder."""
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


class _Handler(ocp.CheckpointHandler):
    """Writes the two files of a checkpoint; orbax makes and renames its folder."""

    def save(self, directory: os.PathLike, args: "_Files") -> None:
        folder = pathlib.Path(directory)
        safetensors.numpy.save_file(args.arrays, folder / TENSORS_FILE)
        (folder / META_FILE).write_text(args.meta, encoding="utf-8")
        sync_files(folder)

    def restore(self, directory: os.PathLike, args: Any = None) -> None:
        """Not supported: `read_newest` reads checkpoints."""
        raise NotImplementedError


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Files(ocp.args.CheckpointArgs):
    """Contents of a checkpoint's two files."""

    arrays: dict[str, np.ndarray]
    meta: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _KeepNewest:
    """Keeps the newest checkpoints, and folders that hold anything else.

    Attributes:
        folder: Folder of the checkpoints.
        count: Number of checkpoints to keep.
    """

    folder: pathlib.Path
    count: int

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        """Tells orbax which checkpoints, the oldest first, not to remove."""
        keeps = [True] * len(checkpoints)
        for i, checkpoint in enumerate(checkpoints[: -self.count]):
            path = self.folder / str(checkpoint.step)
            others = other_files(path)
            keeps[i] = bool(others)
            if others:
                logger.warning("%s is kept, because it holds %s", path, others[0].name)
        return keeps


def _is_not_raised_as_well(record: logging.LogRecord) -> bool:
    # The record names no file of orbax if its logger is older than the package absl.
    trace = record.exc_info and record.exc_info[2]
    return not (trace and "orbax" in trace.tb_frame.f_code.co_filename)
