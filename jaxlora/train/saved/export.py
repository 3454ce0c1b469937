"""Exports a run's jobs as PEFT folders, without loading the base model.

The run may be active: nothing in its folder is changed.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.export_record import (
    Export,
    check_replaceable,
    read_export,
)
from jaxlora.adapters.files.model_card import write_card
from jaxlora.adapters.files.tokenizer_copy import COPIED
from jaxlora.common.atomic import (
    find_complete_folder,
    remove_leftovers,
    replace_folder,
    sync_files,
)
from jaxlora.errors import AdapterError, CheckpointError
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, begun_record
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import RunRecord
from jaxlora.train.saved.read_checkpoint import (
    ReadCheckpoint,
    newest_checkpoint,
    read_newest,
)
from jaxlora.train.saved.write_adapter import job_card, run_tokenizer, write_adapter

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        folders: PEFT folders that were written, one per job.
        left_out: Jobs that were not written, and the reasons.
    """

    folders: tuple[pathlib.Path, ...]
    left_out: dict[str, str]


def export_checkpoint(
    run_dir: pathlib.Path,
    out: pathlib.Path,
    jobs: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
    tokenizers: bool = True,
) -> Exported:
    """Writes the adapter of each of a run's jobs, finished or not.

    A job that has ended, and one with `keep_best`, is written as the run itself
    exported it. A job that is training is written with its weights at the newest
    checkpoint.

    Args:
        run_dir: `output_dir` of the run, which may be active.
        out: Folder that gets one PEFT folder per job.
        jobs: Names of the jobs to write; None: all that can be written.
        overwrite: Whether to replace folders in `out` that hold files other than an
            export's.
        tokenizers: Whether to write the tokenizer of each job beside its adapter.

    Raises:
        JaxloraError: The run cannot be read, one of `jobs` cannot be written, or `out`
            cannot be used. Then nothing has been written.
    """
    record, checkpoint = begun_record(run_dir), None
    if newest_checkpoint(run_dir / CHECKPOINTS) is not None:
        checkpoint = read_newest(run_dir / CHECKPOINTS, exported_only=True)
    known = record.identity.jobs
    wanted = tuple(dict.fromkeys(jobs or known))
    if unknown := [name for name in wanted if name not in known]:
        raise CheckpointError(
            f"{run_dir} has no job {unknown[0]!r}; it has: {', '.join(known)}."
        )
    sources = {name: _source(run_dir, record, checkpoint, name) for name in wanted}
    left_out = {n: text for n, text in sources.items() if isinstance(text, str)}
    if left_out and (jobs or len(left_out) == len(wanted)):
        reasons = "".join(f"\n- {name}: {text}" for name, text in left_out.items())
        raise CheckpointError(f"{run_dir}: nothing was exported, as of{reasons}")
    writable = {n: s for n, s in sources.items() if not isinstance(s, str)}
    check_out(run_dir, out, list(writable), overwrite=overwrite)
    remove_leftovers(out)
    for name, source in writable.items():
        progress = None if checkpoint is None else checkpoint.run.progress.get(name)
        if isinstance(source, Export):
            has_tokenizer = _copy(source, out / name, record, progress, tokenizers)
        else:
            assert progress is not None
            kept = run_tokenizer(run_dir, record, name) if tokenizers else None
            write_adapter(
                source, out / name, record, name, progress, kept, overwrite=overwrite
            )
            has_tokenizer = kept is not None
        if tokenizers and not has_tokenizer:
            logger.warning("%s has no tokenizer, as the base has none", out / name)
    return Exported(folders=tuple(out / n for n in writable), left_out=left_out)


def _source(
    run_dir: pathlib.Path,
    record: RunRecord,
    checkpoint: ReadCheckpoint | None,
    name: str,
) -> Export | Adapter | str:
    """Returns the export or adapter of a job, or the reason why there is none."""
    folder = run_dir / ADAPTERS / name
    own = _own_export(folder)
    if own is not None and own.record.job != name:
        raise AdapterError(
            f"{folder} holds the adapter of job {own.record.job!r}. Put back the "
            "folder that was there."
        )
    if checkpoint is None or name not in checkpoint.run.progress:
        return own or "it has not been in a checkpoint yet"
    progress = checkpoint.run.progress[name]
    if not progress.has_state:
        return own or _nothing(progress, folder)
    keep_best = record.identity.jobs[name].get("keep_best", False)
    if own is not None and (keep_best or own.record.step >= progress.step):
        return own
    return checkpoint.adapter(name)


def _own_export(folder: pathlib.Path) -> Export | None:
    """Reads the run's own export, even while the run replaces it."""
    while True:
        place = find_complete_folder(folder)
        found = read_export(place) if place.is_dir() else None
        if found is not None or place == find_complete_folder(folder):
            return found


def _nothing(progress: JobProgress, folder: pathlib.Path) -> str:
    if progress.status == "waiting":
        return "it waits for a slot, so nothing has been trained yet"
    if progress.status == "failed":
        return f"it failed: {progress.reason}"
    if not progress.step:
        return f"it ended before its first step: {progress.reason}"
    return f"it has ended ({progress.reason}), and {folder} has been removed"


def check_out(
    run_dir: pathlib.Path, out: pathlib.Path, names: Sequence[str], *, overwrite: bool
) -> None:
    """Refuses a place for exports before anything is written.

    Raises:
        CheckpointError: `out` is a file, or lies in the run's own folder.
        JaxloraError: A folder in `out` must not be replaced.
    """
    run, place = run_dir.resolve(), out.resolve()
    if os.path.lexists(out) and not out.is_dir():
        raise CheckpointError(f"{out} is no folder. Choose another place.")
    if run == place or run in place.parents:
        raise CheckpointError(
            f"{out} is inside {run_dir}, the run's own folder, which only the run "
            "itself writes to. Choose a place outside."
        )
    for name in names:
        if place / name in (run, *run.parents):
            raise CheckpointError(
                f"{out / name} holds the run itself. Choose another place than {out}."
            )
        check_replaceable(out / name, overwrite=overwrite)


def _copy(
    source: Export,
    folder: pathlib.Path,
    record: RunRecord,
    progress: JobProgress | None,
    tokenizers: bool,
) -> bool:
    """Copies an export, with a new model card; whether it has a tokenizer."""
    files = {
        name: data
        for name, data in source.files.items()
        if tokenizers or name not in COPIED
    }
    has_tokenizer = not files.keys().isdisjoint(COPIED)
    name, step = folder.name, source.record.step
    card = job_card(record, name, step, progress, has_tokenizer=has_tokenizer)
    with replace_folder(folder) as temporary:
        for file, data in files.items():
            (temporary / file).write_bytes(data)
        write_card(temporary, card)
        sync_files(temporary)
    return has_tokenizer
