"""PEFT folders from a checkpoint, without the base model."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlora.adapter import Adapter, LoraWeights
from jaxlora.errors import CheckpointError
from jaxlora.hf.names import linear_path
from jaxlora.hf.peft_export import export_peft
from jaxlora.models.stacks import by_path
from jaxlora.train.checkpoint import Checkpoints
from jaxlora.train.slots import adapter_from_rows


def export_checkpoint(
    run_dir: pathlib.Path, out: pathlib.Path, jobs: Sequence[str] | None = None
) -> list[pathlib.Path]:
    """Writes the adapters that were training at a run's newest checkpoint.

    Jobs that had ended are in the run's `adapters` folder already.

    Args:
        run_dir: `output_dir` of the run, finished or not.
        out: Folder for one PEFT folder a job.
        jobs: Only these; None: all that were training.

    Raises:
        CheckpointError: There is no checkpoint, or a job was not training in it.
    """
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{run_dir} holds no checkpoints, so it is no run.")
    checkpoints = Checkpoints(folder, keep=None)
    try:
        number, run = checkpoints.read()
        params = checkpoints.read_params(number)
    finally:
        checkpoints.close()
    slots = {name: p["slot"] for name, p in run.progress.items()}
    training = [name for name, slot in slots.items() if slot is not None]
    for name in jobs or ():
        if name not in training:
            raise CheckpointError(
                f"job {name!r} was not training at checkpoint {number} of {run_dir}; "
                f"these were: {', '.join(training) or 'none'}. Jobs that had ended are "
                f"in {run_dir / 'adapters'}."
            )
    folders = []
    for name in jobs or training:
        own = {stack: table[slots[name]] for stack, table in params.items()}
        rows = by_path(own, axis=0)
        adapter = adapter_from_rows(rows, _like(run.adapters[name], rows))
        folders.append(
            export_peft(
                adapter,
                out / name,
                base_model=run.base_model,
                revision=run.base_revision,
                linear_names=run.linear_names,
            )
        )
    return folders


def _like(saved: dict[str, Any], rows: Mapping[str, np.ndarray]) -> Adapter:
    """An empty adapter of a saved job's modules and ranks."""
    modules = {}
    for name, (rank, lora_alpha) in saved["modules"].items():
        path = linear_path(name)
        modules[name] = LoraWeights(
            a=rows[f"{path}.lora_a"][:, :rank],
            b=rows[f"{path}.lora_b"][:rank],
            rank=rank,
            lora_alpha=lora_alpha,
        )
    return Adapter(
        modules=modules, use_rslora=saved["use_rslora"], dropout=saved["dropout"]
    )
