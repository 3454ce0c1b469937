"""Writes an adapter of a run as a PEFT folder, with a model card."""

import pathlib
from typing import Any

from jaxlora._version import __version__
from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import run_base
from jaxlora.adapters.files.export_record import ExportRecord
from jaxlora.adapters.files.model_card import model_card
from jaxlora.adapters.files.peft_export import export_peft
from jaxlora.adapters.files.tokenizer_copy import COPIED, TokenizerCopy, job_template
from jaxlora.config.data_config import common_template_kwargs
from jaxlora.hf.files import tokenizer_files
from jaxlora.run.folder import TOKENIZER
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import RunRecord


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
    return model_card(
        name=job,
        base=run_base(record.base_model, record.base_revision),
        job=record.identity.jobs[job],
        figures=figures,
        has_tokenizer=has_tokenizer,
        version=__version__,
    )
