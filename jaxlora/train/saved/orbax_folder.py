"""The Orbax checkpoint manager, which makes and renames folders and keeps a few."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

from jaxlora.common.atomic import sync_files
from jaxlora.distributed import processes
from jaxlora.train.saved.read_checkpoint import (
    ITEM,
    META_FILE,
    TENSORS_FILE,
    other_files,
)

logger = logging.getLogger(__name__)


class _Handler(ocp.CheckpointHandler):
    """Writes the two files of a checkpoint; orbax makes and renames its folder."""

    def save(self, directory: os.PathLike, args: "_Files") -> None:
        folder = pathlib.Path(directory)
        safetensors.numpy.save_file(args.arrays, folder / TENSORS_FILE)
        (folder / META_FILE).write_text(args.meta + "\n", encoding="utf-8")
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
        count: Number of checkpoints to keep; None: all.
    """

    folder: pathlib.Path
    count: int | None

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        """Tells orbax which checkpoints, the oldest first, not to remove."""
        num_old = 0 if self.count is None else max(0, len(checkpoints) - self.count)
        keeps = [True] * len(checkpoints)
        for i, checkpoint in enumerate(checkpoints[:num_old]):
            path = self.folder / str(checkpoint.step)
            others = other_files(path)
            keeps[i] = bool(others)
            if others:
                logger.warning("%s is kept, because it holds %s", path, others[0].name)
        return keeps


def open_manager(folder: pathlib.Path, keep: int | None) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints, for this process only.

    Args:
        folder: The folder; it exists.
        keep: Number of checkpoints to keep; None: all.
    """
    options = ocp.CheckpointManagerOptions(
        preservation_policy=_KeepNewest(folder=folder, count=keep),
        enable_async_checkpointing=False,
        lightweight_initialize=True,  # reads no metadata of orbax's own
        create=False,
        # Without it, orbax would wait for the other processes of the run.
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=processes.index(), active_processes={processes.index()}
        ),
    )
    return ocp.CheckpointManager(folder, options=options)


def save_files(
    manager: ocp.CheckpointManager,
    number: int,
    arrays: dict[str, np.ndarray],
    meta: str,
) -> bool:
    """Writes a checkpoint; returns whether orbax did so.

    Args:
        manager: Manager of the folder.
        number: Rounds done.
        arrays: Tensors of the checkpoint.
        meta: Its metadata, as JSON.
    """
    items = ocp.args.Composite(**{ITEM: _Files(arrays, meta)})
    return manager.save(number, args=items)
