"""A run that is planned as the trainer plans it, for tests that drive its parts."""

from collections.abc import Sequence

from jaxlora import FrozenModel, RunConfig
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.plan.job.chosen_modules import choose_modules
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_jobs
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.resolve import resolve
from jaxlora.plan.run_plan import RunPlan
from jaxlora.train.job_state import JobState
from jaxlora.train.open_run import start_job


def plan_jobs(
    config: RunConfig, model: FrozenModel, jobs: Sequence[PreparedJob]
) -> RunPlan:
    """Plans a run of jobs that are prepared."""
    return resolve(config, PlannedModel.of(config, model), jobs, this_machine())


def plan_and_jobs(
    config: RunConfig, model: FrozenModel
) -> tuple[RunPlan, list[JobState]]:
    """Plans a run, and starts its jobs."""
    reader = DataReader(load_tokenizer(model.folder))
    chosen = [choose_modules(job, model.config) for job in config.jobs]
    jobs = prepare_jobs(config.jobs, chosen, model.config, reader)
    return plan_jobs(config, model, jobs), [start_job(job, model) for job in jobs]
