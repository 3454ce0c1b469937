"""Describes the contents of a path: a model, an adapter, a run, or a run file."""

import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from jaxlora.adapters.files.peft_export import CONFIG_FILE, WEIGHTS_FILE
from jaxlora.common.console import literal, show
from jaxlora.common.counted import counted
from jaxlora.config.run_file import RunFile
from jaxlora.errors import ConfigError, JaxloraError
from jaxlora.hf.checkpoint import Checkpoint, open_checkpoint
from jaxlora.hf.files import hub_revision, model_folder, read_json
from jaxlora.hf.tensor_file import TensorFile
from jaxlora.models.structure import linear_names

_SHOWN = 8  # missing tensors that are named


def inspect_path(
    path: str,
    console: Console,
    *,
    revision: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Prints a description of the contents of a path.

    Args:
        path: Model folder or hub id, PEFT folder, `output_dir` of a run, or run file.
        console: Console to print to.
        revision: Branch, tag or commit of a hub id.
        overrides: Settings in place of those of a run file.

    Raises:
        JaxloraError: The path holds none of these, or its contents are damaged.
    """
    place = pathlib.Path(path)
    if place.suffix in (".yaml", ".yml"):
        return _run_file(place, console, overrides)
    if overrides:
        raise ConfigError(
            f"{overrides[0]} is a setting of a run file, and {path} is not a .yaml "
            "file. Leave it out."
        )
    try:
        return _inspect(place, path, console, revision)
    except OSError as error:
        raise JaxloraError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions."
        ) from error


def _inspect(
    place: pathlib.Path, path: str, console: Console, revision: str | None
) -> None:
    if (place / CONFIG_FILE).is_file():
        _adapter(place, console)
    elif (place / "checkpoints").is_dir() or (place / "run.json").is_file():
        _run(place, console)
    elif place.is_file():
        raise JaxloraError(
            f"{path} is neither a run file (.yaml) nor a folder of a model, an adapter "
            "or a run."
        )
    else:
        _model(path, console, revision)


def print_rows(console: Console, title: str, rows: Mapping[str, object]) -> None:
    """Prints a table of two columns below its title."""
    # The title is printed separately, because rich would wrap it at the table's width.
    show(console, title, soft_wrap=True)
    table = Table(show_header=False)
    for key, value in rows.items():
        table.add_row(key, literal(value))
    show(console, table)


def _model(source: str, console: Console, revision: str | None) -> None:
    folder = model_folder(source, revision)
    checkpoint = open_checkpoint(folder)
    config, specs = checkpoint.config, checkpoint.specs()
    quantized = checkpoint.quantized.values()
    parts = (part for spec in specs for part in spec.parts)
    wanted = {part.hf_name for part in parts if part.path not in checkpoint.quantized}
    wanted |= {name for linear in quantized for name in linear.tensor_names}
    missing = sorted(wanted - checkpoint.files.keys())
    more = [f"and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
    count = sum(math.prod(spec.shape) for spec in specs)
    linears = collections.Counter(n.rsplit(".", 1)[-1] for n in linear_names(config))
    settings: dict[str, object] = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if key not in ("family", *config.LAYERWISE)
    }
    for key in config.LAYERWISE:
        counts = collections.Counter(getattr(config, key)).items()
        settings[key] = ", ".join(f"{counted(n, 'layer')}: {x}" for x, n in counts)
    extra = {
        "revision": hub_revision(source, folder, revision) or "none: a folder",
        "parameters": f"{count:,}",
        "weights of linears": _weights(checkpoint),
        "linears for LoRA": ", ".join(f"{name} x {n}" for name, n in linears.items()),
        "tensors missing": ", ".join(missing[:_SHOWN] + more) or "none",
    }
    print_rows(console, f"base model {folder}", settings | extra)


def _weights(checkpoint: Checkpoint) -> str:
    """Describes how the linears of the decoder layers are stored."""
    total, quantized = len(checkpoint.linear_paths), checkpoint.quantized
    if not quantized:
        return "dense"
    return f"{checkpoint.kind}: {len(quantized)} of {counted(total, 'linear')}"


def _adapter(folder: pathlib.Path, console: Console) -> None:
    config = read_json(folder / CONFIG_FILE)
    file = TensorFile(folder / WEIGHTS_FILE)
    count = sum(math.prod(file.shape(name)) for name in file.names())
    shown = (
        "base_model_name_or_path",
        "revision",
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "projection_prng_key",
    )
    rows: dict[str, object] = {key: config[key] for key in shown if key in config}
    rows["target_modules"] = config.get("target_modules")
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            rows[key] = config[key]
    keys = (re.split(r"\.(?:lora|vera_lambda)_", name) for name in file.names())
    modules = {key[0] for key in keys if len(key) > 1}
    rows |= {"modules": len(modules), "parameters": f"{count:,}"}
    print_rows(console, f"PEFT adapter {folder}", rows)


def _run(folder: pathlib.Path, console: Console) -> None:
    from jaxlora.run.folder import CHECKPOINTS, begun_record
    from jaxlora.run.lock import LOCK_FILE, is_in_use, read_owner
    from jaxlora.train.saved.read_checkpoint import newest_checkpoint, read_newest

    is_live = is_in_use(folder)
    if is_live:
        show(console, f"run {folder}: in use by {read_owner(folder / LOCK_FILE)}")
    record = begun_record(folder)
    if newest_checkpoint(folder / CHECKPOINTS) is None:
        jobs = ", ".join(record.identity.jobs)
        show(console, f"run {folder}: no checkpoint yet; jobs: {jobs}")
        return
    found = read_newest(folder / CHECKPOINTS)
    base = record.base_model
    show(console, f"run {folder}: checkpoint after round {found.number}, on {base}")
    table = Table("job", "status", "step", "tokens", "train loss", "eval loss")
    for name, progress in found.run.progress.items():
        keys = ("step", "num_tokens", "last_loss", "last_eval")
        values = (_short(getattr(progress, key)) for key in keys)
        status = progress.shown_status(is_live=is_live)
        table.add_row(*map(literal, (name, status, *values)))
    show(console, table)


def _short(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _run_file(path: pathlib.Path, console: Console, overrides: Sequence[str]) -> None:
    run = RunFile.read(path, overrides).config({})
    shared = json.loads(run.model_dump_json(exclude={"jobs"}))
    print_rows(console, f"run file {path}", shared)
    for job in run.jobs:
        changed = json.loads(job.model_dump_json(exclude_defaults=True))
        print_rows(console, f"job {job.name}", changed)
