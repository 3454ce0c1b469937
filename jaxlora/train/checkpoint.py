"""Checkpoints of a run: adapters, optimiser state and progress; never the base."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy

from jaxlora.atomic import sync_files
from jaxlora.errors import CheckpointError
from jaxlora.train.optimizer import AdapterState
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
        """Nothing: `read_newest` reads checkpoints."""
        raise NotImplementedError


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Files(ocp.args.CheckpointArgs):
    """What a checkpoint holds."""

    arrays: dict[str, np.ndarray]
    meta: str


class Checkpoints:
    """A folder of checkpoints, the newest few of them kept.

    A checkpoint is written in the background and appears under its name only when it is
    complete, so that a kill at any instant leaves whole ones.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int | None = None):
        """Opens a folder to write to; removes what a kill left half written.

        Args:
            folder: Holds checkpoints and nothing else; only one process writes to it.
            keep: Number of checkpoints to keep; None: all.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        self._folder = folder.absolute()
        # Orbax logs what it also raises, with the traces of its threads.
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
        """Rounds behind the newest checkpoint, also if it is still being written."""
        return self._latest

    def save(self, number: int, state: AdapterState, run: SavedRun) -> None:
        """Starts writing a checkpoint; returns before it is on the disk.

        Args:
            number: Rounds done.
            state: All slots, between global batches.
            run: What goes with them.

        Raises:
            CheckpointError: This one, or the one before, could not be written.
        """
        self._wait()
        if self._latest is not None and number <= self._latest:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {self._latest}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )
        arrays = jax.device_get(_flat(state))
        saved = SavedCheckpoint(
            run=run,
            layout=_layout(state),
            checksums={kind: checksum(arrays[kind]) for kind in KINDS},
        )
        meta = json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(saved)}))
        items = ocp.args.Composite(**{ITEM: _Files(arrays, meta)})
        self._pending = self._writer.submit(self._manager.save, number, args=items)
        self._latest = number

    def _wait(self) -> None:
        """Waits until the checkpoint under way is on the disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._explaining():
            if not pending.result():
                raise RuntimeError("orbax declined to write it")

    def restore(
        self, state: AdapterState, identity: RunIdentity
    ) -> tuple[int, SavedRun, AdapterState]:
        """Reads the newest checkpoint to go on from: its number, run and tables.

        Args:
            state: Tables of the shapes to read into; what is pending stays.
            identity: This run's.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of another run.
        """
        found = read_newest(self._folder, KINDS)
        path = self._folder / str(found.number)
        check_same_run(identity, found.run.identity, path, "the checkpoint")
        self._check_slots(found, _layout(state))
        # As in a run that begins: on the same device, and committed to it. Else JAX
        # would compile every function of the run again.
        tables = {
            kind: {
                path: jax.device_put(table, state.params[path].sharding)
                for path, table in tables.items()
            }
            for kind, tables in found.tables.items()
        }
        return found.number, found.run, AdapterState(**tables, pending=state.pending)

    def _check_slots(self, found: ReadCheckpoint, now: dict[str, list[int]]) -> None:
        """Tables of other linears may be as large, all in all."""
        if found.layout == now:
            return
        tables = [
            ", ".join(sorted(set(one) - set(other))) or "none"
            for one, other in ((found.layout, now), (now, found.layout))
        ]
        raise CheckpointError(
            f"checkpoint {found.number} in {self._folder} has slots for other linears. "
            f"Tables that only it has: {tables[0]}; that only this run has: "
            f"{tables[1]}. Give the slot_targets that the run began with."
        )

    def close(self) -> None:
        """Finishes writing and lets go of the folder.

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
        """Turns what goes wrong while writing, perhaps earlier, into our error."""
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


def _is_not_raised_as_well(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def check_same_run(
    now: RunIdentity, then: RunIdentity, path: pathlib.Path, where: str
) -> None:
    """Refuses to go on with another run than the one that was saved.

    Args:
        now: Identity of the run that is to go on.
        then: The identity that was saved.
        path: The file or folder where it was.
        where: The same in a word or two.

    Raises:
        CheckpointError: They differ; says in what.
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
    """All tables of a kind in one array: new buffers, and few transfers.

    The step donates the tables while the background write still reads; and many small
    copies from a GPU would hold up the next round.
    """
    kinds = {"params": state.params, "mu": state.mu, "nu": state.nu}
    return {
        kind: jnp.concatenate([tables[path].ravel() for path in _layout(state)])
        for kind, tables in kinds.items()
    }


def _layout(state: AdapterState) -> dict[str, list[int]]:
    """Shapes of the tables in `_flat`'s arrays, in their order."""
    return {path: list(state.params[path].shape) for path in sorted(state.params)}
