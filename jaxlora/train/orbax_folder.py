"""Orbax's part in checkpoints: it makes and renames folders, and keeps a few."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy

from jaxlora.atomic import sync_files
from jaxlora.distributed import processes
from jaxlora.train.read_checkpoint import ITEM, META_FILE, TENSORS_FILE


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


def open_manager(folder: pathlib.Path, keep: int | None) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints, for this process only.

    Args:
        folder: The folder; it exists.
        keep: Number of checkpoints to keep; None: all.
    """
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
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
