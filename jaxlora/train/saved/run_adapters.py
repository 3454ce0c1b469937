"""Loads the base model and the latest adapters of a run, which may be training."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.export_record import read_record
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.tokenizer_copy import ChatTemplate, job_template
from jaxlora.errors import CheckpointError
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.models.slot_modules import SCORE
from jaxlora.models.structure import linear_shapes
from jaxlora.run.folder import begun_record
from jaxlora.run.saved_run import RunRecord
from jaxlora.train.saved.export import export_checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAdapters:
    """The base model and the latest adapters of a run.

    Attributes:
        model: The base model.
        adapters: The adapters, by job.
        templates: The chat template of each job that has its own, by job.
        notes: What is to be said about each job: the step of its weights, or why it
            has none.
    """

    model: FrozenModel
    adapters: dict[str, Adapter]
    templates: dict[str, ChatTemplate]
    notes: dict[str, str]


def load_run_adapters(
    run_dir: str | pathlib.Path,
    jobs: Sequence[str] | None = None,
    *,
    model: str | pathlib.Path | None = None,
) -> RunAdapters:
    """Loads the base model of a run, and its jobs' adapters as `jaxlora export` does.

    A job that is training has its weights at the newest checkpoint. Nothing in the
    run's folder is changed.

    Args:
        run_dir: `output_dir` of the run, which may be active.
        jobs: Names of the jobs; None: all that have weights.
        model: Folder or hub id of the base; None: that of the run.

    Raises:
        JaxloraError: The run cannot be read, one of `jobs` has no weights, or the model
            is another one than the run's.
    """
    run_dir = pathlib.Path(run_dir)
    with tempfile.TemporaryDirectory(prefix="jaxlora-generate-") as temporary:
        out = pathlib.Path(temporary)
        exported = export_checkpoint(run_dir, out, jobs, tokenizers=False)
        record = begun_record(run_dir)
        loaded = _load_base(run_dir, record, model)
        adapters, notes = {}, dict(exported.left_out)
        shapes, size = linear_shapes(loaded.config), loaded.config.hidden_size
        for folder in exported.folders:
            # A reward model that was asked for by name is refused.
            adapter = import_peft(folder, shapes, score_size=None if jobs else size)
            if SCORE.name in adapter.outside:
                notes[folder.name] = "is a reward model, which predicts no text"
                continue
            adapters[folder.name] = adapter
            own = read_record(folder)
            notes[folder.name] = f"weights of step {own.step}" if own else ""
    templates: dict[str, ChatTemplate] = {}
    for name in adapters:
        data = record.identity.jobs[name].get("data", {})
        if (template := job_template(data, record.chat_templates)) is not None:
            templates[name] = template
    return RunAdapters(
        model=loaded, adapters=adapters, templates=templates, notes=notes
    )


def _load_base(
    run_dir: pathlib.Path,
    record: RunRecord,
    model: str | pathlib.Path | None,
) -> FrozenModel:
    settings = record.identity.settings
    source, revision = record.base_model, record.base_revision
    if model is not None:
        source, revision = model, None
    loaded = load_model(
        source,
        revision=revision,
        dtype=settings.get("dtype", "auto"),
        quantize=settings.get("quantize_base"),
        quantize_args=settings.get("quantize_base_args"),
        keep_bf16=settings.get("keep_bf16", ()),
    )
    if loaded.fingerprint != record.identity.base:
        raise CheckpointError(
            f"{source} is not the base model of {run_dir}: its fingerprint is "
            f"{loaded.fingerprint[:12]}, and the run's is {record.identity.base[:12]}. "
            "Name the model that the run trains on."
        )
    return loaded
