"""Loads the base model and the latest adapters of a run, which may be training."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.files.base_name import stated_base
from jaxlora.adapters.files.export_record import read_record
from jaxlora.adapters.files.peft_import import import_peft
from jaxlora.adapters.files.tokenizer_copy import ChatTemplate, template_settings
from jaxlora.common.yaml_file import parse_yaml
from jaxlora.data.templates.known import find_template
from jaxlora.errors import AdapterError, CheckpointError, DataError
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.hf.names import linear_shapes
from jaxlora.run.folder import SETTINGS_FILE, read_run_record
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
        loaded = _load_base(run_dir, exported.folders[0], model)
        adapters, notes = {}, dict(exported.left_out)
        shapes, size = linear_shapes(loaded.config), loaded.config.hidden_size
        for folder in exported.folders:
            # A reward model that was asked for by name is refused.
            adapter = import_peft(folder, shapes, score_size=None if jobs else size)
            if adapter.score is not None:
                notes[folder.name] = "is a reward model, which predicts no text"
                continue
            adapters[folder.name] = adapter
            record = read_record(folder)
            notes[folder.name] = f"weights of step {record.step}" if record else ""
    templates = _templates(run_dir, adapters, notes)
    return RunAdapters(
        model=loaded, adapters=adapters, templates=templates, notes=notes
    )


def _templates(
    run_dir: pathlib.Path, jobs: Iterable[str], notes: dict[str, str]
) -> dict[str, ChatTemplate]:
    """Returns the chat templates of jobs, and notes where one cannot be read.

    A run that an earlier version began names the files of its templates only.
    """
    record, found = read_run_record(run_dir), {}
    if record is None:
        return found
    for name in jobs:
        settings = template_settings(record.identity.jobs[name].get("data", {}))
        for setting in settings[:1]:
            try:
                found[name] = record.chat_templates.get(setting) or (
                    find_template(setting)
                )
            except DataError as error:
                notes[name] += f"; chats have the tokenizer's own template: {error}"
    return found


def _base_source(
    run_dir: pathlib.Path, adapter: pathlib.Path
) -> tuple[str, str | None]:
    """Returns the base that an adapter of a run names, or that its run was given.

    Earlier versions wrote only the last part of a folder's path to an adapter's files.

    Returns:
        The folder or hub id, and its revision.
    """
    source, revision = stated_base(adapter)
    settings = run_dir / SETTINGS_FILE
    if revision is None and settings.is_file():
        try:
            text = settings.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{settings} cannot be read: {error}. Name the base: --model MODEL."
            ) from error
        given = parse_yaml(text, str(settings))
        if isinstance(given, dict) and isinstance(given.get("model"), str):
            return given["model"], None
    if source is None:
        raise AdapterError(
            f"{adapter} does not name its base model. Name it: --model MODEL."
        )
    return source, revision


def _load_base(
    run_dir: pathlib.Path, adapter: pathlib.Path, model: str | pathlib.Path | None
) -> FrozenModel:
    record = read_run_record(run_dir)
    settings: dict[str, Any] = {} if record is None else record.identity.settings
    source, revision = (
        (model, None) if model is not None else _base_source(run_dir, adapter)
    )
    loaded = load_model(
        source,
        revision=revision,
        dtype=settings.get("dtype", "auto"),
        quantize=settings.get("quantize_base"),
        quantize_args=settings.get("quantize_base_args"),
        keep_bf16=settings.get("keep_bf16", ()),
    )
    if record is not None and loaded.fingerprint != record.identity.base:
        raise CheckpointError(
            f"{source} is not the base model of {run_dir}: its fingerprint is "
            f"{loaded.fingerprint[:12]}, and the run's is {record.identity.base[:12]}. "
            "Name the model that the run trains on."
        )
    return loaded
