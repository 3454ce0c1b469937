"""Checks what a run names, reads its data and plans it, before weights are loaded.

The trainer and `jaxlora plan` enter here, so that they refuse the same runs.
"""

import dataclasses
from collections.abc import Callable

from jaxlora.common.note import log_notes
from jaxlora.config import RunConfig
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.hf.load import FrozenModel
from jaxlora.train.plan.auto_mesh.machine import this_machine
from jaxlora.train.plan.check_inputs import check_inputs
from jaxlora.train.plan.prepared_job import PreparedJob, data_reader, prepare_jobs
from jaxlora.train.plan.resolve import resolve
from jaxlora.train.plan.run_plan import RunPlan


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun:
    """A planned run whose weights are not loaded.

    Attributes:
        plan: The plan of the run.
        jobs: Its jobs, whose data are read.
        reader: Reads the data of further jobs.
    """

    plan: RunPlan
    jobs: list[PreparedJob]
    reader: DataReader


def prepare_run(
    config: RunConfig,
    model: FrozenModel | None,
    started: str,
    *,
    held_bytes: int = 0,
    on_accepted: Callable[[], None] = lambda: None,
    **checks: Callable[[], object],
) -> PreparedRun:
    """Prepares a run for this machine, and logs what was read and decided.

    Args:
        config: The run.
        model: The base model, if it is loaded already.
        started: Time at which the run began, in ISO format.
        held_bytes: Memory that the run holds already on the first device.
        on_accepted: See `resolve`.
        **checks: Further checks; see `check_inputs`.

    Raises:
        JaxloraError: A setting, the model or a job's data cannot be used, or the run
            does not fit this machine.
    """
    # Mistakes in the settings and the data are refused before weights are loaded.
    inputs = check_inputs(config, model, started, **checks)
    reader = data_reader(config, inputs.tokenizer)
    jobs = prepare_jobs(config.jobs, inputs.modules, inputs.model.config, reader)
    log_notes(note for job in jobs for note in job.notes)
    plan = resolve(config, inputs.model, jobs, this_machine(held_bytes), on_accepted)
    log_notes(plan.notes)
    return PreparedRun(plan=plan, jobs=jobs, reader=reader)
