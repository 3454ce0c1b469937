"""Writes a run's adapters as PEFT folders: while it trains, and from its folder.

`export_checkpoint` does not load the base model. The run may be active: nothing in its
folder is changed.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlora._version import __version__
from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import run_base
from jaxlora.adapters.files.export_record import (
    Export,
    ExportRecord,
    check_replaceable,
    read_export,
)
from jaxlora.adapters.files.model_card import model_card, write_card
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.tokenizer_copy import COPIED, TokenizerCopy, job_template
from jaxlora.common.atomic import (
    find_complete_folder,
    remove_leftovers,
    replace_folder,
    sync_files,
)
from jaxlora.config.data_config import common_template_kwargs
from jaxlora.errors import AdapterError, CheckpointError
from jaxlora.hf.files import tokenizer_files
from jaxlora.models.structure import module_prefix
from jaxlora.run.folder import ADAPTERS, CHECKPOINTS, RUN_FILE, TOKENIZER, begun_record
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import RunRecord
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
    if place.name == ADAPTERS and (place.parent / RUN_FILE).is_file():
        raise CheckpointError(
            f"{out} has the adapters of another run, which only that run writes to. "
            "Choose another place."
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


# ---- of one job ----------------------------------------------------------------------


def run_tokenizer(
    run_dir: pathlib.Path, record: RunRecord, job: str
) -> TokenizerCopy | None:
    """Returns the tokenizer of a job of a run; None: the run kept none."""
    folder = run_dir / TOKENIZER
    if not tokenizer_files(folder, COPIED):
        return None
    data = record.identity.jobs[job].get("data", {})
    return TokenizerCopy(
        folder=folder, template=job_template(data, record.chat_templates)
    )


def write_adapter(
    adapter: Adapter,
    folder: pathlib.Path,
    record: RunRecord,
    job: str,
    progress: JobProgress,
    tokenizer: TokenizerCopy | None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes the adapter of a job.

    Args:
        adapter: Its weights.
        folder: PEFT folder to write.
        record: Record of the run.
        job: Name of the job.
        progress: Its progress, which belongs to the weights.
        tokenizer: Tokenizer to write beside it; None: none.
        overwrite: Whether to replace a folder that holds files other than an export's.
    """
    data = record.identity.jobs[job].get("data", {})
    layout = record.config.get("expert_layout", "auto")
    export_peft(
        adapter,
        folder,
        base_model=record.base_model,
        revision=record.base_revision,
        linear_names=record.linear_names,
        overwrite=overwrite,
        record=ExportRecord(
            job=job,
            step=progress.step,
            chat_template_kwargs=common_template_kwargs(data),
        ),
        card=job_card(
            record, job, progress.step, progress, has_tokenizer=tokenizer is not None
        ),
        tokenizer=tokenizer,
        expert_layout=None if layout == "auto" else layout,
        model_type=record.model_type,
    )


def job_card(
    record: RunRecord,
    job: str,
    step: int,
    progress: JobProgress | None,
    *,
    has_tokenizer: bool,
) -> str:
    """Returns the text of the model card of a job's adapter.

    Args:
        record: Record of the run.
        job: Name of the job.
        step: Optimizer steps that the exported weights have had.
        progress: The job's losses, if they are known. Figures of other weights than
            those of `step` are left out.
        has_tokenizer: Whether the tokenizer lies beside the adapter.
    """
    return model_card(
        name=job,
        base=run_base(record.base_model, record.base_revision),
        job=record.identity.jobs[job],
        figures=card_figures(step, progress),
        has_tokenizer=has_tokenizer,
        is_part=module_prefix(record.linear_names) != "model.",
        version=__version__,
    )


def card_figures(step: int, progress: JobProgress | None) -> dict[str, Any]:
    """Returns the figures in the model card of an adapter.

    Args:
        step: Optimizer steps that its weights have had.
        progress: The job's losses, if they are known. Figures of other weights are
            left out.
    """
    figures: dict[str, Any] = {"optimizer steps": step}
    if progress is not None and step == progress.step:
        figures |= {
            "tokens trained on": progress.num_target_tokens,
            "tokens, prompts included": progress.num_tokens,
            "training loss, first step": progress.first_loss,
            "training loss, last step": progress.last_loss,
            "held-out loss, before training": progress.first_eval,
            "held-out loss": progress.last_eval,
            "best held-out loss": progress.best_eval,
        }
    elif progress is not None and step == progress.best_step:
        figures |= {
            "held-out loss, before training": progress.first_eval,
            "held-out loss": progress.best_eval,
        }
    return figures
