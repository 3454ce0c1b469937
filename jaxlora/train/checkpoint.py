"""Checkpoints of a run: adapters, optimiser state and progress; never the base."""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxlora.errors import CheckpointError
from jaxlora.train.optimizer import AdapterState

_FORMAT = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """What must be equal for a checkpoint to continue a run; JSON values only.

    Attributes:
        base: Fingerprint of the base model.
        settings: Settings that the numbers depend on, by name.
        jobs: Each job's settings, and a fingerprint of its data, by job name.
    """

    base: str
    settings: dict[str, Any]
    jobs: dict[str, dict[str, Any]]

    def differences(self, other: "RunIdentity") -> list[str]:
        """How `other`, a checkpoint's, differs from this run; as sentences."""
        out = []
        if self.base != other.base:
            out.append(
                f"the base model is another one (fingerprint {other.base[:12]} in the "
                f"checkpoint, {self.base[:12]} now)"
            )
        out += _different("", other.settings, self.settings)
        for name in dict.fromkeys([*other.jobs, *self.jobs]):
            if name not in self.jobs:
                out.append(f"job {name!r} is in the checkpoint but not in this run")
            elif name not in other.jobs:
                out.append(f"job {name!r} is in this run but not in the checkpoint")
            else:
                out += _different(f"job {name!r}: ", other.jobs[name], self.jobs[name])
        return out


def _different(where: str, then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{where}{key} is {then.get(key)!r} in the checkpoint and {now.get(key)!r} now"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """What a checkpoint holds beside the tables; JSON values only.

    Attributes:
        identity: What a run that resumes must equal.
        progress: Each job's progress, by job name.
        adapters: Each job's adapted modules, with (rank, lora_alpha), and its
            `use_rslora` and `dropout`, by job name: enough to export without the base.
        base_model: Folder or hub id of the base.
        linear_names: Names of the base's linears.
        stopping: Why jobs are to end after their batch, by job name.
        base_revision: Commit of a base from the hub; None: a folder.
    """

    identity: RunIdentity
    progress: dict[str, dict[str, Any]]
    adapters: dict[str, dict[str, Any]]
    base_model: str
    linear_names: list[str]
    stopping: dict[str, str]
    base_revision: str | None = None


class Checkpoints:
    """A folder of checkpoints, the newest few of them kept.

    A checkpoint is written in the background and appears under its name only when it is
    complete, so that a kill at any instant leaves whole ones.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int | None = None):
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=True
            ),
        )

    def latest(self) -> int | None:
        """Rounds behind the newest checkpoint, also if it is still being written."""
        return self._manager.latest_step()

    def save(self, number: int, state: AdapterState, run: SavedRun) -> None:
        """Starts writing a checkpoint; returns before it is on the disk.

        Args:
            number: Rounds done.
            state: All slots, between global batches.
            run: What goes with them.

        Raises:
            CheckpointError: This one, or the one before, could not be written.
        """
        meta = {
            "format": _FORMAT,
            "layout": _layout(state),
            **dataclasses.asdict(run),
        }
        with self._explaining():
            is_saved = self._manager.save(
                number,
                args=ocp.args.Composite(
                    tables=ocp.args.StandardSave(_flat(state)),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
        if not is_saved:
            raise CheckpointError(
                f"{self._folder} holds checkpoint {self.latest()}, so that checkpoint "
                f"{number} cannot follow: it is of another run. Choose another "
                "output_dir."
            )

    def read(self) -> tuple[int, SavedRun]:
        """The newest checkpoint's number and what goes with its tables.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        number, saved, _ = self._read_newest()
        return number, saved

    def _read_newest(self) -> tuple[int, SavedRun, dict[str, list[int]]]:
        """The same, and the layout of its tables."""
        number = self.latest()
        if number is None:
            raise CheckpointError(
                f"{self._folder} holds no complete checkpoint to resume from. Start "
                "without resume."
            )
        meta = self._meta(number)
        if meta.get("format") != _FORMAT:
            raise CheckpointError(
                f"checkpoint {number} in {self._folder} has format "
                f"{meta.get('format')}, and this version reads format {_FORMAT}."
            )
        del meta["format"]
        layout, identity = meta.pop("layout"), RunIdentity(**meta.pop("identity"))
        return number, SavedRun(identity=identity, **meta), layout

    def read_params(self, number: int) -> dict[str, np.ndarray]:
        """The slot tables A and B of a checkpoint, on the host."""
        layout = self._meta(number)["layout"]
        flat = self._read(number, tables=ocp.args.StandardRestore())["tables"]
        return _split(np.asarray(flat["params"]), layout)

    def _meta(self, number: int) -> dict[str, Any]:
        return self._read(number, meta=ocp.args.JsonRestore())["meta"]

    def restore(
        self, state: AdapterState, identity: RunIdentity
    ) -> tuple[int, SavedRun, AdapterState]:
        """Reads the newest checkpoint to go on from: its number, run and tables.

        Args:
            state: Tables of the shapes to read into; what is pending stays.
            identity: This run's.

        Raises:
            CheckpointError: There is none, it cannot be read, or it is of another run.
        """
        number, saved, then = self._read_newest()
        differences = identity.differences(saved.identity)
        if differences:
            raise CheckpointError(
                f"checkpoint {number} in {self._folder} is of another run:\n- "
                + "\n- ".join(differences)
                + "\nRestore these settings, or train into another output_dir."
            )
        layout = _layout(state)
        if then != layout:
            raise self._other_slots(number, then, layout)
        like = jax.eval_shape(_flat, state)
        flat = self._read(number, tables=ocp.args.StandardRestore(like))["tables"]
        # As in a run that begins: on the same device, and committed to it. Else JAX
        # would compile every function of the run again.
        tables = {
            kind: {
                path: jax.device_put(table, state.params[path].sharding)
                for path, table in _split(np.asarray(flat[kind]), layout).items()
            }
            for kind in flat
        }
        return number, saved, AdapterState(**tables, pending=state.pending)

    def _other_slots(
        self, number: int, then: dict[str, list[int]], now: dict[str, list[int]]
    ) -> CheckpointError:
        """Of a checkpoint whose tables may be as large, all in all."""
        tables = [
            ", ".join(sorted(set(one) - set(other))) or "none"
            for one, other in ((then, now), (now, then))
        ]
        return CheckpointError(
            f"checkpoint {number} in {self._folder} has slots for other linears. "
            f"Tables that only it has: {tables[0]}; that only this run has: "
            f"{tables[1]}. Give the slot_targets that the run began with."
        )

    def _read(self, number: int, **items) -> Any:
        try:
            return self._manager.restore(number, args=ocp.args.Composite(**items))
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {number} in {self._folder} cannot be read: {error}. To "
                f"resume from the one before, remove {self._folder / str(number)}."
            ) from error

    def close(self) -> None:
        """Finishes writing and lets go of the folder.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        try:
            with self._explaining():
                self._manager.wait_until_finished()
        finally:
            self._manager.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns what goes wrong while writing, perhaps earlier, into our error."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self._folder}: {error}. Those "
                "before it are whole: mend the cause (is the disk full?) and resume."
            ) from error


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


def _split(flat, layout: dict[str, list[int]]) -> dict:
    """The tables in one of `_flat`'s arrays, by path."""
    tables, start = {}, 0
    for path, shape in layout.items():
        end = start + math.prod(shape)
        tables[path] = flat[start:end].reshape(shape)
        start = end
    return tables
