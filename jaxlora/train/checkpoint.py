"""Checkpoints of a run: adapters, optimiser state and progress; never the base."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy

from jaxlora.adapters.optimizer import AdapterState
from jaxlora.atomic import sync_files
from jaxlora.errors import CheckpointError
from jaxlora.models.stacks import Stack, from_paths, to_paths
from jaxlora.train.read_checkpoint import (
    FORMAT,
    ITEM,
    KINDS,
    META_FILE,
    TABLES_FILE,
    ReadCheckpoint,
    checksum,
    newest_checkpoint,
    read_newest,
    split,
)
from jaxlora.train.saved_run import RunIdentity, SavedCheckpoint, SavedRun, sealed


class _Handler(ocp.CheckpointHandler):
    """Writes the two files of a checkpoint; orbax makes and renames its folder."""

    def save(self, directory: os.PathLike, args: "_Files") -> None:
        folder = pathlib.Path(directory)
        safetensors.numpy.save_file(args.arrays, folder / TABLES_FILE)
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


class Checkpoints:
    """A folder of checkpoints, of which the newest few are kept.

    A checkpoint is written in the background and gets its name only when it is
    complete, so a kill at any time leaves only complete checkpoints.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        stacks: Sequence[Stack],
        *,
        keep: int | None = None,
    ):
        """Opens a folder for writing and removes incomplete checkpoints.

        Args:
            folder: Folder that holds only checkpoints; one process writes to it.
            stacks: How the run's tables are stacked. Checkpoints hold them by path, so
                they do not depend on it.
            keep: Number of checkpoints to keep; None: all.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        self._folder, self._stacks = folder.absolute(), tuple(stacks)
        # Orbax also logs the errors that it raises, with the traces of its threads.
        logging.getLogger("absl").addFilter(_is_not_raised_as_well)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[bool] | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # reads no metadata of orbax's own
        )
        with self._explaining():
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._latest = newest_checkpoint(self._folder)

    def latest(self) -> int | None:
        """Rounds done at the newest checkpoint, which may still be being written."""
        return self._latest

    def save(self, number: int, state: AdapterState, run: SavedRun) -> None:
        """Starts writing a checkpoint; returns before it is on the disk.

        Args:
            number: Rounds done.
            state: All slots, between global batches.
            run: State of the run to save with the tables.

        Raises:
            CheckpointError: This checkpoint, or the one before, could not be written.
        """
        self._wait()
        if self._latest is not None and number <= self._latest:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {self._latest}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )
        layout = self._layout(state)
        stacked, sizes = jax.device_get(_flat(state)), _stack_sizes(state)
        arrays: dict[str, np.ndarray] = {
            kind: _joined(self._to_paths(split(stacked[kind], sizes)), layout)
            for kind in KINDS
        }
        saved = SavedCheckpoint(
            run=run,
            layout=layout,
            checksums={kind: checksum(arrays[kind]) for kind in KINDS},
        )
        meta = json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(saved)}))
        items = ocp.args.Composite(**{ITEM: _Files(arrays, meta)})
        self._pending = self._writer.submit(self._manager.save, number, args=items)
        self._latest = number

    def _wait(self) -> None:
        """Waits until the pending checkpoint is on the disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._explaining():
            if not pending.result():
                raise RuntimeError("orbax declined to write it")

    def restore(
        self, state: AdapterState, identity: RunIdentity
    ) -> tuple[int, SavedRun, AdapterState]:
        """Reads the newest checkpoint, to resume from it: its number, run and tables.

        Args:
            state: Current tables, which give the shapes and devices; `pending` is kept.
            identity: Identity of this run.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or it is of another
                run.
        """
        found = read_newest(self._folder, KINDS)
        path = self._folder / str(found.number)
        check_same_run(identity, found.run.identity, path, "the checkpoint")
        self._check_slots(found, self._layout(state))
        # As in a new run, the tables are committed to their device. Otherwise JAX
        # would compile every function of the run again.
        tables = {
            kind: {
                name: jax.device_put(array, state.params[name].sharding)
                for name, array in from_paths(self._stacks, tables, axis=1).items()
            }
            for kind, tables in found.tables.items()
        }
        return found.number, found.run, AdapterState(**tables, pending=state.pending)

    def _check_slots(self, found: ReadCheckpoint, now: dict[str, list[int]]) -> None:
        """Checks that tables are of the same linears, as equal sizes do not show it."""
        if found.layout == now:
            return
        tables = [
            _listed(sorted(set(one) - set(other)))
            for one, other in ((found.layout, now), (now, found.layout))
        ]
        raise CheckpointError(
            f"checkpoint {found.number} in {self._folder} has slots for other linears. "
            f"Tables that only it has: {tables[0]}; that only this run has: "
            f"{tables[1]}. Give the slot_targets that the run began with."
        )

    def _to_paths(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return to_paths(self._stacks, arrays, axis=1)

    def _layout(self, state: AdapterState) -> dict[str, list[int]]:
        """Shape of each table, by path, in the order in which they are saved."""
        shapes = jax.eval_shape(self._to_paths, state.params)
        return {path: list(shapes[path].shape) for path in sorted(shapes)}

    def close(self) -> None:
        """Finishes writing and closes the folder.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        try:
            self._wait()
        finally:
            self._writer.shutdown()
            with self._explaining():
                self._manager.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises errors of this or an earlier background write as `CheckpointError`."""
        try:
            yield
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


def _listed(paths: list[str]) -> str:
    shown, hidden = paths[:4], len(paths) - 4
    more = [f"and {hidden} more"] if hidden > 0 else []
    return ", ".join([*shown, *more]) or "none"


def _is_not_raised_as_well(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def check_same_run(
    now: RunIdentity, then: RunIdentity, path: pathlib.Path, where: str
) -> None:
    """Refuses to resume a run other than the one that was saved.

    Args:
        now: Identity of the run to resume.
        then: Identity that was saved.
        path: File or folder that holds the saved identity.
        where: Describes that file or folder in a word or two.

    Raises:
        CheckpointError: The identities differ; the text says how.
    """
    differences = now.differences(then, where)
    if differences:
        raise CheckpointError(
            f"{path} is of another run:\n- "
            + "\n- ".join(differences)
            + "\nRestore these settings, or train into another output_dir."
        )


@jax.jit
def _flat(state: AdapterState) -> dict[str, jax.Array]:
    """Concatenates all stacks of a kind in one new array, for few transfers.

    New buffers are needed because the step donates the tables while the background
    write still reads. Many small copies from a GPU would delay the next round.
    """
    kinds = {"params": state.params, "mu": state.mu, "nu": state.nu}
    return {
        kind: jnp.concatenate([stacks[name].ravel() for name in _stack_sizes(state)])
        for kind, stacks in kinds.items()
    }


def _stack_sizes(state: AdapterState) -> dict[str, list[int]]:
    """Shapes of the stacks in `_flat`'s arrays, in their order."""
    return {name: list(state.params[name].shape) for name in sorted(state.params)}


def _joined(tables: dict[str, np.ndarray], layout: dict[str, list[int]]) -> np.ndarray:
    """Copies tables into one new array, in the order of `layout`."""
    joined = np.empty(sum(map(math.prod, layout.values())), np.float32)
    for path, place in split(joined, layout).items():
        place[...] = tables[path]
    return joined
