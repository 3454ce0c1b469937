"""Reads and checks a run's folder: which run it holds, and what may be written."""

import logging
import os
import pathlib

from jaxlora.adapters.files.export_record import is_ours, read_export
from jaxlora.common.atomic import remove_leftovers, write_text
from jaxlora.errors import AdapterError, CheckpointError, StorageError
from jaxlora.run.live.status_file import STATUS_FILE
from jaxlora.run.log import METRICS_FILE
from jaxlora.run.saved_run import RunRecord, read_sealed, sealed_json

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
SETTINGS_FILE = "settings.yaml"
RUN_FILE_COPY = "run_file.yaml"
SAMPLES_FILE = "samples.txt"
SUMMARY_FILE = "summary.json"
PICTURE = "losses.png"
TOKENIZER = "tokenizer"  # the base's, for exports that do not load the base
SWEEP_FILES = "sweep.csv", "sweep.html"
# A run writes these files, and a user may have files of the same names.
REPLACED = (
    SETTINGS_FILE,
    RUN_FILE_COPY,
    STATUS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    PICTURE,
    TOKENIZER,
    *SWEEP_FILES,
)
SWEEP_LEDGER = "sweep.jsonl"  # of a sweep over several groups of devices
ADAPTERS = "adapters"
MERGED = "merged"  # the best configuration of a sweep, with its base
CHECKPOINTS = "checkpoints"


def read_run_record(folder: pathlib.Path) -> RunRecord | None:
    """Reads the record of the run that has begun in a folder; None if none has.

    Raises:
        CheckpointError: The record is damaged.
    """
    path = folder / RUN_FILE
    if not os.path.lexists(path):
        return None
    cure = "Restore the file from a copy, or choose another output_dir."
    return read_sealed(path, RunRecord, cure)


def begun_record(folder: pathlib.Path) -> RunRecord:
    """Reads the record of the run that has begun in a folder.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if (record := read_run_record(folder)) is None:
        raise CheckpointError(f"{folder} holds no run: there is no {RUN_FILE}.")
    return record


def write_run_record(folder: pathlib.Path, record: RunRecord) -> None:
    """Writes the record of the run that has begun in a folder."""
    write_text(folder / RUN_FILE, sealed_json(record, indent=1))


def check_folder(folder: pathlib.Path, *, resume: bool) -> None:
    """Refuses to start where a run has begun, and to resume where none has.

    Raises:
        CheckpointError: A run has begun in the folder and `resume` is false, or none
            has begun and `resume` is true; or it holds a sweep over several groups.
        StorageError: A new run would replace a file in the folder.
    """
    has_begun = os.path.lexists(folder / RUN_FILE)
    has_traces = (folder / METRICS_FILE).exists() or any(
        (folder / name).is_dir() and any((folder / name).iterdir())
        for name in (CHECKPOINTS, ADAPTERS)
    )
    if not resume and (has_begun or has_traces):
        raise CheckpointError(
            f"{folder} already holds a run. Resume it (resume=True, or --resume), or "
            "choose another output_dir."
        )
    if os.path.lexists(folder / SWEEP_LEDGER):
        raise CheckpointError(
            f"{folder} holds a sweep over several groups of devices: there is "
            f"{SWEEP_LEDGER}. Resume it with sweep.groups (or sweep.ray) in the run "
            "file, or choose another output_dir."
        )
    if not resume:
        _check_replaces_nothing(folder)
    if resume and not has_begun and has_traces:
        raise CheckpointError(
            f"{folder} holds a run without {RUN_FILE}, which was removed. It cannot be "
            "resumed, because whether it is the same run is unknown. Restore the file, "
            "or choose another output_dir."
        )
    if resume and not has_begun:
        raise CheckpointError(
            f"{folder} holds no run to resume. Check output_dir, or start without "
            "resume."
        )


def _check_replaces_nothing(folder: pathlib.Path) -> None:
    # A run writes these only after its record, so it has not written what is here.
    there = [name for name in REPLACED if os.path.lexists(folder / name)]
    if there:
        raise StorageError(
            f"{folder} holds {', '.join(there)} of another origin, which a run would "
            "replace. Move what is there, or choose another output_dir."
        )


def check_writable(folder: pathlib.Path) -> None:
    """Checks that a run can write its folder, which need not exist.

    Raises:
        StorageError: It cannot.
    """
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise StorageError(
            f"{folder} cannot be written, as {there} is a file. Choose another "
            "output_dir."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(
            f"{folder} cannot be written: no permission to write into {there}. Choose "
            "another output_dir."
        )


def is_own(folder: pathlib.Path, path: str) -> bool:
    """Whether no link leads from a run's folder to a path in it, which may be missing.

    What a run removes or moves is its own: a link may lead to another run.
    """
    return (folder / path).resolve() == folder.resolve() / path


def clean_up(folder: pathlib.Path) -> None:
    """Removes incomplete files of a killed run; no other process may be writing."""
    for place in (folder, folder / ADAPTERS):
        remove_leftovers(place, alone=True)


def prepare_export_folder(folder: pathlib.Path, step: int) -> bool:
    """Prepares an adapter's folder for an export; moves other files out of the way.

    Args:
        folder: Folder of the adapter, which may hold an older export.
        step: Optimizer steps done by the weights to export.

    Returns:
        Whether to write the export. It is not written over an export of more steps,
        which the run wrote before it was killed and resumed from an older checkpoint.
    """
    if not os.path.lexists(folder):
        return True
    if folder.is_symlink() or not folder.is_dir() or not is_ours(folder):
        _move_away(folder)
        return True
    try:
        found = read_export(folder)
    except AdapterError:
        return True  # the export there is damaged
    if found is None or found.record.step <= step:
        return True
    logger.warning(
        "%s: the adapter of step %d is kept, because that of step %d is older",
        folder,
        found.record.step,
        step,
    )
    return False


def _move_away(path: pathlib.Path) -> None:
    """Renames a file or folder to a name that no job can have."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}~{number}")):
        number += 1
    path.rename(aside)
    logger.warning(
        "%s was not written by this run, or holds other files: moved to %s",
        path,
        aside,
    )
