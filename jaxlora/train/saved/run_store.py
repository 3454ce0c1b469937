"""The files by which a run is resumed: record, checkpoints, exported adapters."""

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.export_record import ExportRecord
from jaxlora.adapters.peft_export import export_peft
from jaxlora.adapters.slots import ParkedSlot
from jaxlora.common.atomic import write_text
from jaxlora.common.yaml_file import dump_yaml
from jaxlora.distributed import agreement, processes
from jaxlora.hf.load import FrozenModel
from jaxlora.hf.names import linear_names
from jaxlora.run.folder import (
    ADAPTERS,
    CHECKPOINTS,
    SETTINGS_FILE,
    prepare_export_folder,
    read_run_record,
    write_run_record,
)
from jaxlora.run.identity import RunIdentity
from jaxlora.run.lock import RunLock
from jaxlora.run.saved_run import RunRecord, SavedRequests, SavedRun
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.checkpoint import Checkpoints
from jaxlora.train.saved.job_card import job_card
from jaxlora.train.saved.read_checkpoint import ReadCheckpoint, newest_checkpoint

logger = logging.getLogger(__name__)


class RunStore:
    """Writes the record and the checkpoints of a run, and finds them on resume.

    Of several processes only the first writes; the others make the same calls.

    Attributes:
        record: Record of the run as it is on the disk; None if there is none yet.
    """

    def __init__(
        self, folder: pathlib.Path, lock: RunLock, *, keep: int, is_resumed: bool
    ):
        """Opens the files of a run; changes none of them.

        Args:
            folder: Folder of the run.
            lock: Lock of the folder, which is held.
            keep: Number of checkpoints to keep.
            is_resumed: Whether the run goes on from what is on the disk.

        Raises:
            CheckpointError: A file is damaged, or processes see different checkpoints.
        """
        self._folder, self._lock = folder, lock
        self.record: RunRecord | None = None
        if is_resumed and processes.is_first():
            self.record = read_run_record(folder)
        checkpoints = folder / CHECKPOINTS
        newest = newest_checkpoint(checkpoints)
        agreement.check_newest(checkpoints, newest)
        self._is_anew = newest is None
        if is_resumed and self._is_anew:
            logger.warning("there is no complete checkpoint: training from the start")
        is_first = processes.is_first()
        self._checkpoints = Checkpoints(checkpoints, keep=keep, is_writer=is_first)

    def restore(self, identity: RunIdentity) -> ReadCheckpoint | None:
        """Reads the newest checkpoint; None if there is none.

        Raises:
            CheckpointError: It is damaged, or is of another run.
        """
        return None if self._is_anew else self._checkpoints.restore(identity)

    def saved_requests(self, found: ReadCheckpoint | None) -> SavedRequests:
        """Returns the saved requests to stop and pause jobs, the same on all processes.

        The record is written before each checkpoint, so it is never the older one.

        Args:
            found: The newest checkpoint; None if there is none.
        """

        def saved() -> dict[str, Any]:
            if self.record is not None:
                return dataclasses.asdict(self.record.requests)
            requests = SavedRequests() if found is None else found.run.requests
            return dataclasses.asdict(requests)

        return SavedRequests(**processes.from_first(saved))

    def latest(self) -> int | None:
        """Rounds done at the newest checkpoint; None if there is none."""
        return self._checkpoints.latest()

    def write_record(
        self, record: RunRecord, settings: Callable[[], dict[str, Any]]
    ) -> None:
        """Writes the run's record and its settings if the record has changed.

        Args:
            record: The record.
            settings: Returns all settings of the run, as JSON values.
        """
        if processes.is_first() and record != self.record:
            write_run_record(self._folder, record)
            write_text(self._folder / SETTINGS_FILE, dump_yaml(settings()))
            self.record = record

    def save(
        self, number: int, states: Mapping[str, ParkedSlot], run: SavedRun
    ) -> pathlib.Path:
        """Starts writing a checkpoint, and returns its folder; see `Checkpoints.save`.

        Raises:
            CheckpointError: This checkpoint, or the one before, could not be written.
        """
        if processes.is_first():
            self._lock.check()
        self._checkpoints.save(number, states, run)
        return self._folder / CHECKPOINTS / str(number)

    def close(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        self._checkpoints.close()


def export_job(
    job: JobState,
    adapter: Adapter,
    model: FrozenModel,
    folder: pathlib.Path,
    lock: RunLock,
) -> None:
    """Writes a job's adapter to its folder in a run, unless a later one is there.

    Args:
        job: The job.
        adapter: Its weights now.
        model: The base model.
        folder: Folder of the run.
        lock: Lock of that folder, which is held.
    """
    step, target = job.progress.step, folder / ADAPTERS / job.name
    lock.check()
    if not prepare_export_folder(target, step):
        return
    export_peft(
        adapter,
        target,
        base_model=model.source,
        revision=model.revision,
        linear_names=linear_names(model.config),
        record=ExportRecord(job=job.name, step=step),
        card=job_card(
            name=job.name,
            step=step,
            base_model=model.source,
            revision=model.revision,
            settings=job.settings.model_dump(mode="json"),
            progress=job.progress,
        ),
    )
