"""The jobs of a run as their data describe them, before there are weights.

`jaxlora plan` plans them, and the trainer chooses the mesh for them.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp

from jaxlora.adapters.peft_import import import_peft
from jaxlora.adapters.targets import check_ranks, resolve_targets
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.order import JobOrder
from jaxlora.data.tokenize import TokenizedData
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.base_format import planned_base_format
from jaxlora.hf.checkpoint import planned_config
from jaxlora.hf.files import tokenizer_folder
from jaxlora.hf.load import base_dtype
from jaxlora.hf.names import linear_names, linear_path, tensor_specs
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.capacity import settle
from jaxlora.memory.weight_copies import choose_copies
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.mesh_sizes import ONE_DEVICE
from jaxlora.train import prepare
from jaxlora.train.auto_mesh.choose import Demand, choose_mesh
from jaxlora.train.auto_mesh.machine import this_machine
from jaxlora.train.continue_job import continued_step
from jaxlora.train.job_run import batch_lengths, job_order
from jaxlora.train.next_window import JobPosition
from jaxlora.train.quantized_base import run_format
from jaxlora.train.run_folder import begun_settings

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JobData:
    """One job of a plan: its training samples, and its held-out ones, if any."""

    job: LoraJob
    data: TokenizedData
    held_out: TokenizedData | None
    order: JobOrder
    num_steps: int

    def lengths(self, step: int) -> list[int]:
        """Tokens of each sample of the global batch of an optimizer step."""
        return batch_lengths(self.data, self.order, step)

    @property
    def batch_tokens(self) -> float:
        """Mean number of tokens of a global batch."""
        return self.data.mean_batch_tokens(self.job.batch_size)


def read_jobs(
    config: RunConfig, folder: pathlib.Path, steps: int | None
) -> tuple[JobData, ...]:
    """Reads the data of all jobs.

    Args:
        config: The run.
        folder: Folder of the tokenizer.
        steps: Number of optimizer steps of each job to plan; None: all.

    Raises:
        JaxloraError: The tokenizer or a job's data cannot be used.
    """
    tokenizer = load_tokenizer(folder)
    out = []
    for job in config.jobs:
        data, held_out = prepare.read_data(job, tokenizer)
        order = job_order(job, data)
        num_steps = min(order.num_steps, steps or order.num_steps)
        out.append(
            JobData(
                job=job,
                data=data,
                held_out=held_out,
                order=order,
                num_steps=num_steps,
            )
        )
    return tuple(out)


def first_positions(jobs: Sequence[JobData]) -> list[JobPosition]:
    """Returns the positions at the start of the run of the jobs that have steps."""
    positions = [
        JobPosition(
            job=i,
            priority=j.job.priority,
            slot=None,
            step=continued_step(j.job),
            num_steps=j.num_steps,
            batch_tokens=j.batch_tokens,
        )
        for i, j in enumerate(jobs)
    ]
    return [p for p in positions if p.step < p.num_steps]


# ---- the mesh and the capacity -------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A base model without weights.

    Attributes:
        config: Architecture of the model.
        base_format: How its linears are quantized; None: they are not.
    """

    config: ModelConfig
    base_format: BaseFormat | None

    def spec(self, dtype: jnp.dtype) -> DecoderSpec:
        """Returns the decoder without slots."""
        options = DecoderOptions(
            dtype=dtype, base_format=self.base_format, max_segment_tokens=1
        )
        return DecoderSpec(config=self.config, options=options)


def planned_model(config: RunConfig, folder: pathlib.Path) -> PlannedModel:
    """Returns the base model of a run; its weights need not exist.

    Raises:
        JaxloraError: config.json is damaged or of an unsupported kind, or settings of
            the base do not fit the model.
    """
    model = planned_config(folder)
    asked, kept = config.quantize_base, config.keep_bf16
    stored = planned_base_format(folder, model, asked, kept)
    return PlannedModel(config=model, base_format=run_format(config, model, stored))


def settle_mesh(config: RunConfig) -> RunConfig:
    """Replaces the settings that are `auto` and that the places of weights depend on.

    These are `mesh: auto` and, on a mesh with stages, `remat: auto`. This reads the
    tokenizer and the jobs' data, but no weights.

    Raises:
        JaxloraError: The tokenizer or a job's data cannot be used, or no mesh of this
            machine has enough memory.
    """
    if config.mesh != "auto" and not _has_open_stages(config):
        return config
    folder = tokenizer_folder(config.model, config.revision)
    jobs = read_jobs(config, folder, steps=None)
    model = planned_model(config, folder)
    config = _with_mesh(config, model, jobs)
    if _has_open_stages(config):
        remat = _settled(config, model, jobs).remat
        config = config.replace(remat=remat)
    return config


def _has_open_stages(config: RunConfig) -> bool:
    """Tells whether the layers of the stages depend on a `remat` that is `auto`."""
    is_open = config.remat == "auto" and config.mesh != "auto"
    return is_open and config.mesh_sizes.stage > 1


def _with_mesh(
    config: RunConfig, model: PlannedModel, jobs: Sequence[JobData]
) -> RunConfig:
    """Replaces `mesh: auto`, and `remat: auto` with it."""
    if config.mesh != "auto":
        return config
    demand = Demand(
        positions=first_positions(jobs),
        lengths=lambda job, step: jobs[job].lengths(step),
        bounds=lambda config: _bounds(config, jobs),
    )
    bounds = _bounds(config.replace(mesh=ONE_DEVICE), jobs)
    spec = _spec(config, model, jobs, bounds.max_tokens)
    choice = choose_mesh(config, spec, demand, this_machine())
    logger.info("%s", choice.reason)
    return config.replace(mesh=str(choice.sizes), remat=choice.remat)


def settle_plan(
    config: RunConfig, model: PlannedModel, jobs: Sequence[JobData]
) -> RunConfig:
    """Replaces `mesh`, `microbatch_tokens` and `remat` where they are `auto`.

    If the run has begun, the last two become what it began with. Otherwise they become
    what the trainer would choose on this machine before it compiles the training step.
    """
    config = _with_mesh(config.replace(**begun_settings(config)), model, jobs)
    if "auto" not in (config.microbatch_tokens, config.remat):
        return config
    return _settled(config, model, jobs)


def _settled(
    config: RunConfig, model: PlannedModel, jobs: Sequence[JobData]
) -> RunConfig:
    bounds = _bounds(config, jobs)
    spec = _spec(config, model, jobs, bounds.max_tokens)
    return settle(config, choose_copies(config, spec, bounds), bounds)


def _bounds(config: RunConfig, jobs: Sequence[JobData]) -> Bounds:
    held_out = [job.held_out for job in jobs if job.held_out is not None]
    return Bounds.of(config, [j.data for j in jobs], held_out)


def _spec(
    config: RunConfig, model: PlannedModel, jobs: Sequence[JobData], max_tokens: int
) -> DecoderSpec:
    dtype = jnp.dtype(base_dtype(config.dtype))
    ranks = [_ranks(job.job, model.config) for job in jobs]
    data = [job.data for job in jobs]
    return prepare.spec_of(
        config, model.config, dtype, model.base_format, ranks, data, max_tokens
    )


def _ranks(job: LoraJob, model: ModelConfig) -> dict[str, int]:
    """Returns the rank of each module that a job adapts."""
    names = linear_names(model)
    by_path = {spec.path: spec.shape for spec in tensor_specs(model)}
    shapes = {name: by_path[f"{linear_path(name)}.kernel"] for name in names}
    if job.init_from is None:
        modules = resolve_targets(job, names)
        check_ranks(job, modules, shapes)
        return {name: module.rank for name, module in modules.items()}
    adapter = import_peft(job.init_from, shapes)
    return {name: weights.rank for name, weights in adapter.modules.items()}
