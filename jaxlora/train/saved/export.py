"""Exports a run's jobs as PEFT folders, without loading the base model.

The run may be active: nothing in its folder is changed.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import run_base
from jaxlora.adapters.files.export_record import (
    CONFIG_FILE,
    Export,
    ExportRecord,
    check_replaceable,
    read_export,
)
from jaxlora.adapters.files.model_card import write_card
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.tokenizer_copy import (
    COPIED,
    ChatTemplate,
    TokenizerCopy,
    job_template,
)
from jaxlora.adapters.optimizers.table import evaluates_other_weights
from jaxlora.adapters.parked_slot import PARAMS
from jaxlora.common.atomic import (
    find_complete_folder,
    remove_leftovers,
    replace_folder,
    sync_files,
)
from jaxlora.config.data_config import common_template_kwargs
from jaxlora.errors import AdapterError, CheckpointError
from jaxlora.hf.files import tokenizer_files
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, TOKENIZER, read_run_record
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import SavedRun
from jaxlora.train.saved.job_card import job_card
from jaxlora.train.saved.read_checkpoint import (
    ReadCheckpoint,
    newest_checkpoint,
    read_newest,
)

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A consistent snapshot of a run's folder.

    Attributes:
        folder: The run's `output_dir`.
        jobs: Names of the run's jobs.
        checkpoint: The newest checkpoint, if there is one.
        settings: Settings of each job, by its name.
        templates: Chat templates that data of the jobs name, by the setting.
    """

    folder: pathlib.Path
    jobs: tuple[str, ...]
    checkpoint: ReadCheckpoint | None
    settings: Mapping[str, Mapping[str, Any]]
    templates: Mapping[str, ChatTemplate]

    def tokenizer(self, job: str) -> TokenizerCopy | None:
        """Returns the tokenizer of a job; None: the run kept none."""
        folder = self.folder / TOKENIZER
        if not tokenizer_files(folder, COPIED):
            return None
        data = self.settings.get(job, {}).get("data", {})
        template = job_template(data, self.templates)
        return TokenizerCopy(folder=folder, template=template)


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
    run = _read_run(run_dir)
    wanted = tuple(dict.fromkeys(jobs or run.jobs))
    unknown = [name for name in wanted if name not in run.jobs]
    if unknown:
        raise CheckpointError(
            f"{run_dir} has no job {unknown[0]!r}; it has: {', '.join(run.jobs)}."
        )
    sources = {name: _source(run, name) for name in wanted}
    left_out = {n: text for n, text in sources.items() if isinstance(text, str)}
    if left_out and (jobs or len(left_out) == len(wanted)):
        reasons = "".join(f"\n- {name}: {text}" for name, text in left_out.items())
        raise CheckpointError(f"{run_dir}: nothing was exported, as of{reasons}")
    writable = [name for name in wanted if name not in left_out]
    check_out(run_dir, out, writable, overwrite=overwrite)
    remove_leftovers(out)
    for name in writable:
        _write(run, sources[name], out / name, overwrite, tokenizers=tokenizers)
    return Exported(folders=tuple(out / n for n in writable), left_out=left_out)


def _read_run(folder: pathlib.Path) -> _Run:
    record, checkpoint = read_run_record(folder), None
    if newest_checkpoint(folder / CHECKPOINTS) is not None:
        checkpoint = read_newest(folder / CHECKPOINTS)
        optimizers = map(checkpoint.optimizer, checkpoint.tensors)
        kinds = None if any(map(evaluates_other_weights, optimizers)) else [PARAMS]
        checkpoint = read_newest(folder / CHECKPOINTS, kinds)
    elif record is None:
        raise CheckpointError(f"{folder} holds no checkpoints, so it is no run.")
    saved = {} if checkpoint is None else checkpoint.run.identity.jobs
    begun = {} if record is None else record.identity.jobs
    settings = {**saved, **begun}
    return _Run(
        folder=folder,
        jobs=tuple(settings),
        checkpoint=checkpoint,
        settings=settings,
        templates={} if record is None else record.chat_templates,
    )


def _source(run: _Run, name: str) -> Export | Adapter | str:
    """Returns the export or adapter of a job, or the reason why there is none."""
    folder = run.folder / ADAPTERS / name
    own = _own_export(folder)
    if own is not None and own.record.job != name:
        raise AdapterError(
            f"{folder} holds the adapter of job {own.record.job!r}. Put back the "
            "folder that was there."
        )
    if run.checkpoint is None or name not in run.checkpoint.run.progress:
        return own or "it has not been in a checkpoint yet"
    saved = run.checkpoint.run
    progress, keep_best = saved.progress[name], saved.adapters[name].keep_best
    if name not in run.checkpoint.tensors:
        return own or _nothing(progress, folder)
    if own is not None and (keep_best or own.record.step >= progress.step):
        return own
    return run.checkpoint.adapter(name)


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


def _write(
    run: _Run,
    source: Export | Adapter | str,
    folder: pathlib.Path,
    overwrite: bool,
    *,
    tokenizers: bool,
) -> None:
    tokenizer = run.tokenizer(folder.name) if tokenizers else None
    if isinstance(source, Export):
        has_tokenizer = tokenizers and not source.files.keys().isdisjoint(COPIED)
    else:
        has_tokenizer = tokenizer is not None
    if tokenizers and not has_tokenizer:
        logger.warning(
            "%s has no tokenizer beside the adapter: the base has none, or an earlier "
            "version of jaxlora began the run",
            folder,
        )
    card = _card(run, source, folder.name, has_tokenizer=has_tokenizer)
    if isinstance(source, Export):
        with replace_folder(folder) as temporary:
            for name, data in source.files.items():
                if tokenizers or name not in COPIED:
                    (temporary / name).write_bytes(data)
            write_card(temporary, card)
            sync_files(temporary)
    elif isinstance(source, Adapter):
        assert run.checkpoint is not None
        saved: SavedRun = run.checkpoint.run
        base = run_base(saved.base_model, saved.base_revision)
        step = saved.progress[folder.name].step
        data = run.settings[folder.name].get("data", {})
        export_peft(
            source,
            folder,
            base_model=base.path,
            revision=base.revision,
            linear_names=saved.linear_names,
            overwrite=overwrite,
            record=ExportRecord(
                job=folder.name,
                step=step,
                chat_template_kwargs=common_template_kwargs(data),
            ),
            card=card,
            tokenizer=tokenizer,
        )


def _card(
    run: _Run, source: Export | Adapter | str, name: str, *, has_tokenizer: bool
) -> str:
    """Returns the model card of a job, by what the run knows of it."""
    saved = None if run.checkpoint is None else run.checkpoint.run
    progress = None if saved is None else saved.progress.get(name)
    if isinstance(source, Export):
        step = source.record.step
        config = json.loads(source.files[CONFIG_FILE])
        path = config.get("base_model_name_or_path") or "unknown"
        base = run_base(path, config.get("revision"))
    else:
        assert saved is not None
        step = saved.progress[name].step
        base = run_base(saved.base_model, saved.base_revision)
    return job_card(
        name=name,
        step=step,
        base=base,
        settings=run.settings.get(name, {}),
        progress=progress,
        has_tokenizer=has_tokenizer,
    )
