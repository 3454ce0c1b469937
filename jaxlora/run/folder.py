"""Reads and checks a run's folder: which run it holds, and what may be written."""

import dataclasses
import datetime
import json
import logging
import os
import pathlib
from typing import Any

from jaxlora.adapters.files.export_record import is_ours, read_export
from jaxlora.common.atomic import remove_leftovers, write_text
from jaxlora.common.note import Note
from jaxlora.config import LoraJob, RunConfig
from jaxlora.distributed import processes
from jaxlora.errors import AdapterError, CheckpointError, StorageError
from jaxlora.run.live.status_file import STATUS_FILE
from jaxlora.run.log import METRICS_FILE
from jaxlora.run.saved_run import RunRecord, read_sealed, sealed

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
SETTINGS_FILE = "settings.yaml"
RUN_FILE_COPY = "run_file.yaml"
SAMPLES_FILE = "samples.txt"
SUMMARY_FILE = "summary.json"
PICTURE = "losses.png"
TOKENIZER = "tokenizer"  # the base's, for exports that do not load the base
SWEEP_FILES = "sweep.csv", "sweep.png", "sweep.html"
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
_VERSION = 1


def read_run_record(folder: pathlib.Path) -> RunRecord | None:
    """Reads the record of the run that has begun in a folder; None if none has.

    Raises:
        CheckpointError: The record is damaged.
    """
    path = folder / RUN_FILE
    if not os.path.lexists(path):
        return None
    cure = "Restore the file from a copy, or choose another output_dir."
    return read_sealed(path, RunRecord, version=_VERSION, cure=cure)


def write_run_record(folder: pathlib.Path, record: RunRecord) -> None:
    """Writes the record of the run that has begun in a folder."""
    values = sealed({"format": _VERSION, **dataclasses.asdict(record)})
    write_text(folder / RUN_FILE, json.dumps(values, indent=1) + "\n")


def _begun_settings(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Returns what the settings that are `auto` became when they were chosen.

    These are `microbatch_tokens`, `remat` and `replicas`, or the mesh that
    `replicas: auto` has chosen, and the number and rank of the slots if jobs have
    joined since.

    Raises:
        CheckpointError: `block_tokens` differs from what the run began with.
    """
    begun: dict[str, Any] = {}
    replicas = config.replicas
    if config.has_open_replicas and record.replicas:
        begun["replicas"] = record.replicas
    if replicas == "auto" and record.mesh is not None:
        begun |= {"replicas": None, "mesh": record.mesh}
        replicas = None
    if config.microbatch_tokens == "auto" and replicas is None:
        begun["microbatch_tokens"] = record.microbatch_tokens
        if record.microbatch_tokens % config.block_tokens:
            raise CheckpointError(
                f"the run in {config.output_dir} began with "
                f"{record.microbatch_tokens} for microbatch_tokens: auto, which is not "
                f"a multiple of block_tokens={config.block_tokens}. Give the "
                "block_tokens that the run began with, or choose another output_dir."
            )
    if config.remat == "auto":
        begun["remat"] = record.remat
    if record.added:
        # The slots were made for the jobs that the run began with.
        then = record.identity.settings
        for name in ("max_concurrent_jobs", "slot_rank"):
            if getattr(config, name) is None and name in then:
                begun[name] = then[name]
    return begun


def _added_jobs(config: RunConfig, record: RunRecord) -> list[dict[str, Any]]:
    """Returns the settings of jobs that joined later and are not in the run file."""
    names = {job.name for job in config.jobs}
    found = []
    for name in record.added:
        if name not in names:
            values = record.identity.jobs[name].items()
            found.append({k: v for k, v in values if k in LoraJob.model_fields})
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BegunRun:
    """A run as `--resume` continues it.

    Attributes:
        config: The run, with the settings that it began with and the jobs that joined
            while it trained.
        has_begun: Whether there is a run in `output_dir`.
        started: Time at which it began, or now, in ISO format. Chat templates may print
            the date, so a resumed run uses that of its start.
        notes: Lines for the log about the settings and the jobs.
        ended: Jobs that its replicas need not hold; see `RunRecord`.
        chosen: Settings that are `auto` and stay as they were chosen.
    """

    config: RunConfig
    has_begun: bool
    started: str
    notes: tuple[Note, ...]
    ended: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()


def as_begun(config: RunConfig, *, replan: bool = False) -> BegunRun:
    """Returns a run as `--resume` continues it, or unchanged if it has not begun.

    All processes of a run get what the first one reads.

    Args:
        config: The run.
        replan: Whether what is `auto` stays so, to be chosen anew; only the number of
            slots is that with which the run began.

    Raises:
        CheckpointError: The run's record is damaged or contradicts the settings.
    """

    def read() -> tuple[str | None, dict, list[dict[str, Any]], list[str], str]:
        now = datetime.datetime.now().isoformat()
        record = read_run_record(pathlib.Path(config.output_dir))
        if record is None:
            return None, {}, [], [], now
        added = _added_jobs(config, record)
        begun = _begun_settings(config, record)
        if replan:
            begun = {k: v for k, v in begun.items() if k == "max_concurrent_jobs"}
        return record.started, begun, added, record.ended, now

    started, begun, added, ended, now = processes.from_first(read)
    joined = [LoraJob.model_validate(job) for job in added]
    chosen = [name for name in begun if getattr(config, name) == "auto"]
    notes = [
        Note(f"{name}: auto: {begun[name]}, as when the run began")
        for name in chosen
        if begun[name]
    ]
    if (mesh := begun.get("mesh")) is not None:
        notes.append(Note(f"replicas: auto: mesh {mesh}, as in the run so far"))
    joining = "joined while the run trained; it is in the run"
    notes += [Note(joining, job=job.name) for job in joined]
    config = config.replace(**begun, jobs=(*config.jobs, *joined))
    return BegunRun(
        config=config,
        has_begun=started is not None,
        started=started or now,
        notes=tuple(notes),
        ended=tuple(ended),
        chosen=tuple(chosen),
    )


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
