"""The model card of a job's adapter: its data, its settings and what was measured."""

from collections.abc import Mapping
from typing import Any

from jaxlora._version import __version__
from jaxlora.adapters.files.base_name import BaseName
from jaxlora.adapters.files.model_card import model_card
from jaxlora.run.job_progress import JobProgress


def job_card(
    *,
    name: str,
    step: int,
    base: BaseName,
    settings: Mapping[str, Any],
    progress: JobProgress | None,
    has_tokenizer: bool,
) -> str:
    """Returns the text of the card of a job's adapter.

    Args:
        name: Name of the job.
        step: Optimizer steps that the exported weights have had.
        base: The base.
        settings: Settings of the job, by the names of `LoraJob`.
        progress: What is known of the job's losses. Figures of other weights than those
            of `step` are left out.
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
        name=name,
        base=base,
        job=settings,
        figures=figures,
        has_tokenizer=has_tokenizer,
        version=__version__,
    )
