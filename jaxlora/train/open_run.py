"""Opens a run: its settings, base model and data, before anything is compiled."""

import dataclasses
import pathlib

from jaxlora.config import RunConfig
from jaxlora.distributed import processes
from jaxlora.hf.load import BaseModel, load_model
from jaxlora.memory.bounds import Bounds
from jaxlora.run.folder import (
    as_begun,
    check_writable,
    start_time,
)
from jaxlora.run.lock import check_not_in_use
from jaxlora.trackers.table import check_installed
from jaxlora.train import agreement
from jaxlora.train.check_inputs import check_inputs
from jaxlora.train.describe_run import check_settings_resume
from jaxlora.train.job_run import JobRun
from jaxlora.train.mesh_plan import PlacedRun, plan_layout, plan_mesh
from jaxlora.train.planned_model import PlannedModel
from jaxlora.train.prepare import start_job
from jaxlora.train.prepared_job import DataReader, data_reader, prepare_jobs
from jaxlora.train.quantized_base import log_base, with_copies
from jaxlora.train.samples import Sampler
from jaxlora.train.settle_run import settle_mesh, settle_run


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedRun:
    """A run whose model and data are loaded.

    Attributes:
        config: The run, with settled values and the jobs that joined it earlier.
        model: The frozen base.
        runs: The jobs.
        placed: The decoder on its devices.
        bounds: Bounds on the capacity of microbatches.
        reader: Reads the data of jobs.
        started: Time at which the run began, in ISO format.
        joined: Names of the jobs that joined while an earlier process trained.
        sampler: Generates texts at evaluations; None if `samples` asks for none.
    """

    config: RunConfig
    model: BaseModel
    runs: list[JobRun]
    placed: PlacedRun
    bounds: Bounds
    reader: DataReader
    started: str
    joined: tuple[str, ...]
    sampler: Sampler | None


def open_run(config: RunConfig, model: BaseModel | None) -> OpenedRun:
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
    planned = inputs.model
    reader = data_reader(config, inputs.tokenizer)
    jobs = prepare_jobs(config.jobs, planned.config, reader)
    chooses_remat = config.remat == "auto"
    config = settle_mesh(config, planned, jobs)
    agreement.check_mesh(config)
    model = model or _load(config)
    runs = [start_job(job, model) for job in jobs]
    agreement.check_inputs(model.fingerprint, runs)
    settled = settle_run(config, PlannedModel.of(config, model), jobs)
    config, spec = settled.config, settled.spec
    model = with_copies(model, spec.options.base_format)
    log_base(spec)
    mesh = plan_mesh(config, model.config)
    sampler = None
    if config.samples is not None:
        sampler = Sampler(config.samples, model, spec, reader.tokenizer)
    return OpenedRun(
        config=config,
        model=model,
        runs=runs,
        placed=plan_layout(config, mesh, spec, model, runs),
        # Without weights, a mesh may have settled it by an estimate.
        bounds=settled.bounds.with_remats() if chooses_remat else settled.bounds,
        reader=reader,
        started=started,
        joined=tuple(job.name for job in config.jobs if job.name not in given),
        sampler=sampler,
    )


def _load(config: RunConfig) -> BaseModel:
    return load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        quantize=config.quantize_base,
        keep_bf16=config.keep_bf16,
        place=lambda found, _: plan_mesh(config, found).place(),
    )
