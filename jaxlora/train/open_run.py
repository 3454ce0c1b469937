"""Opens a run: its settings, base model and data, before anything is compiled."""

import dataclasses
import pathlib

import jax

from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.distributed import agreement, processes
from jaxlora.errors import ModelError
from jaxlora.hf.load import FrozenModel, load_model
from jaxlora.models.forward import Base
from jaxlora.run.folder import (
    as_begun,
    check_writable,
    start_time,
)
from jaxlora.run.lock import check_not_in_use
from jaxlora.trackers.table import check_installed
from jaxlora.train.execute.samples import Sampler
from jaxlora.train.job_state import JobState, start_job
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.check_inputs import check_inputs
from jaxlora.train.plan.planned_model import PlannedModel
from jaxlora.train.plan.prepared_job import DataReader, data_reader, prepare_jobs
from jaxlora.train.plan.quantized_base import with_copies
from jaxlora.train.plan.run_plan import RunPlan, resolve
from jaxlora.train.saved.describe_run import check_settings_resume


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedRun:
    """A run whose model and data are loaded.

    Attributes:
        plan: The plan of the run, with the jobs that joined it earlier.
        model: The frozen base.
        jobs: The jobs.
        reader: Reads the data of jobs.
        started: Time at which the run began, in ISO format.
        joined: Names of the jobs that joined while an earlier process trained.
        sampler: Generates texts at evaluations; None if `samples` asks for none.
    """

    plan: RunPlan
    model: FrozenModel
    jobs: list[JobState]
    reader: DataReader
    started: str
    joined: tuple[str, ...]
    sampler: Sampler | None


def open_run(config: RunConfig, model: FrozenModel | None) -> OpenedRun:
    """Loads the base model and every job's data.

    Args:
        config: The run.
        model: The base model, if it is loaded already.

    Raises:
        JaxloraError: A setting, the model or a job's data cannot be used.
    """
    given = [job.name for job in config.jobs]
    agreement.check_settings(config)
    folder = pathlib.Path(config.output_dir)
    processes.from_first(lambda: check_not_in_use(folder))
    config = as_begun(config)
    processes.from_first(lambda: check_settings_resume(config))
    started = processes.from_first(lambda: start_time(folder))
    # Mistakes in the settings and the data are refused before weights are loaded.
    inputs = check_inputs(
        config,
        model,
        started,
        report_to=lambda: check_installed(config.report_to),
        output_dir=lambda: processes.from_first(lambda: check_writable(folder)),
    )
    reader = data_reader(config, inputs.tokenizer)
    prepared = prepare_jobs(config.jobs, inputs.modules, inputs.model.config, reader)
    log_notes(note for job in prepared for note in job.notes)
    held = 0 if model is None else device_bytes(model.params)
    plan = resolve(config, inputs.model, prepared, this_machine(held))
    log_notes(plan.notes)
    agreement.check_mesh(plan.config)
    model = _as_planned(plan, model or _load(plan))
    jobs = [start_job(job, model) for job in prepared]
    agreement.check_inputs(model.fingerprint, prepared)
    sampler = None
    if config.samples is not None:
        sampler = Sampler(config.samples, model, plan.spec, reader.tokenizer)
    return OpenedRun(
        plan=plan,
        model=model,
        jobs=jobs,
        reader=reader,
        started=started,
        joined=tuple(job.name for job in config.jobs if job.name not in given),
        sampler=sampler,
    )


def _load(plan: RunPlan) -> FrozenModel:
    config = plan.config
    return load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        quantize=config.quantize_base,
        keep_bf16=config.keep_bf16,
        place=lambda *_: plan.place,
    )


def _as_planned(plan: RunPlan, model: FrozenModel) -> FrozenModel:
    """Checks that the base is the planned one, and gives it its copies of weights.

    Raises:
        ModelError: Its files have changed since they were looked at.
    """
    if PlannedModel.of(plan.config, model) != plan.model:
        raise ModelError(
            f"{plan.config.model} has changed while the run was planned. Start again "
            "when its files are complete."
        )
    return with_copies(model, plan.spec.options.base_format)


def device_bytes(params: Base) -> int:
    """Returns the bytes that weights have on the first device."""
    first = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for array in params.values()
        for shard in array.addressable_shards
        if shard.device == first
    )
