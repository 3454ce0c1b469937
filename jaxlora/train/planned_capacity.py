"""Chooses the capacity of a planned run as the trainer would, but without weights."""

import pathlib
from collections.abc import Sequence

import jax.numpy as jnp

from jaxlora.adapters.peft_import import import_peft
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenize import TokenizedData
from jaxlora.hf.checkpoint import planned_config
from jaxlora.hf.load import base_dtype
from jaxlora.hf.names import linear_names, linear_path, tensor_specs
from jaxlora.models.config import ModelConfig
from jaxlora.targets import resolve_targets
from jaxlora.train import prepare
from jaxlora.train.capacity import Bounds, Capacity, as_begun, provisional


def planned_capacity(
    config: RunConfig,
    model_folder: pathlib.Path,
    train: Sequence[TokenizedData],
    held_out: Sequence[TokenizedData],
) -> RunConfig:
    """Replaces `microbatch_tokens: auto` by a number.

    If the run has begun, this is the number that it began with. Otherwise it is the
    number that would be chosen on this machine. The training step, once compiled, may
    still change it when the run starts.

    Args:
        config: The run.
        model_folder: Folder with the model's config.json.
        train: Training samples of each job.
        held_out: Held-out samples of the jobs that have any.

    Raises:
        JaxloraError: This machine cannot hold the run, or does not report its memory;
            or `block_tokens` differs from what the run began with.
    """
    config = as_begun(config, pathlib.Path(config.output_dir))
    if config.microbatch_tokens != "auto":
        return config
    model = planned_config(model_folder)
    bounds = Bounds.of(config, train, held_out)
    spec = prepare.spec_of(
        provisional(config, bounds),
        model,
        jnp.dtype(base_dtype(config.dtype)),
        [_ranks(job, model) for job in config.jobs],
        train,
    )
    return Capacity(config, spec, bounds).config


def _ranks(job: LoraJob, model: ModelConfig) -> dict[str, int]:
    """Returns the rank of each module that a job adapts."""
    names = linear_names(model)
    if job.init_from is None:
        modules = resolve_targets(job, names)
        return {name: module.rank for name, module in modules.items()}
    by_path = {spec.path: spec.shape for spec in tensor_specs(model)}
    shapes = {name: by_path[f"{linear_path(name)}.kernel"] for name in names}
    adapter = import_peft(job.init_from, shapes)
    return {name: weights.rank for name, weights in adapter.modules.items()}
