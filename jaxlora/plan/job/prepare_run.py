"""Checks what a run names, reads its data and plans it, before weights are loaded.

The trainer and `jaxlora plan` enter here, so that they refuse the same runs.
"""

import dataclasses
import datetime
from collections.abc import Callable, Collection, Sequence

from jaxlora.adapters.optimizers.table import find_optimizer
from jaxlora.common.note import log_notes
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.data.formats.table import formats_of
from jaxlora.data.rendering.fields import TEMPLATES, check_template
from jaxlora.data.templates.known import find_template
from jaxlora.data.tokenizer import Tokenizer, load_tokenizer
from jaxlora.data.tokens.tokenize import DataReader
from jaxlora.errors import ConfigError
from jaxlora.generate.prompt import sample_prompts
from jaxlora.hf.files import tokenizer_folder
from jaxlora.hf.load import FrozenModel
from jaxlora.plan.job.chosen_modules import (
    ChosenModules,
    check_objective,
    choose_modules,
)
from jaxlora.plan.job.found_inputs import data_sets, missing_inputs
from jaxlora.plan.job.planned_model import PlannedModel, planned_model
from jaxlora.plan.job.prepared_job import (
    PreparedJob,
    data_reader,
    prepare_jobs,
)
from jaxlora.plan.mesh.machine import this_machine
from jaxlora.plan.resolve import resolve
from jaxlora.plan.run_plan import RunPlan
from jaxlora.problems import Path, Problems


def _check_inputs(
    config: RunConfig,
    model: FrozenModel | None,
    started: str,
    **checks: Callable[[], object],
) -> tuple[PlannedModel, Tokenizer, list[ChosenModules]]:
    """Checks files, model, tokenizer, targets and templates; reads no data.

    Args:
        config: The run.
        model: The base model, if it is loaded already.
        started: Time at which the run began, in ISO format.
        **checks: Further checks, by the setting that they are about.

    Returns:
        The base model, its tokenizer, and the modules that each job adapts.

    Raises:
        JaxloraError: Something is missing or does not fit. If there are several
            problems, the message lists them all.
    """
    problems = Problems(RunConfig.model_fields)
    for setting, check in checks.items():
        with problems.at(setting):
            check()
    values = {"jobs": config.jobs} | ({"model": config.model} if model is None else {})
    for path, error in missing_inputs(values):
        problems.add(path, error)
    base = None
    if not problems.has("model"):
        with problems.at("model"):
            base = _open(config, model, started)
    modules = _check_jobs(config, base, problems)
    problems.raise_all()
    assert base is not None, "without a problem, the model is open"
    return *base, modules


def _open(
    config: RunConfig, model: FrozenModel | None, started: str
) -> tuple[PlannedModel, Tokenizer]:
    if model is None:
        folder = tokenizer_folder(config.model, config.revision)
        planned = planned_model(config, folder)
    else:
        folder, planned = model.folder, PlannedModel.of(config, model)
    now = datetime.datetime.fromisoformat(started)
    tokenizer = load_tokenizer(folder, now=now)
    tokenizer.check_fits(planned.config.vocab_size)
    return planned, tokenizer


def _check_jobs(
    config: RunConfig, base: tuple[PlannedModel, Tokenizer] | None, problems: Problems
) -> list[ChosenModules]:
    """Checks templates; if the model is open, also returns the modules of the jobs."""
    modules = []
    model, tokenizer = (None, None) if base is None else (base[0].config, base[1])
    for path, data in data_sets(config.jobs):
        _check_data(data, tokenizer, path, problems)
    for number, job in enumerate(config.jobs):
        with problems.at("jobs", number, "objective"):
            check_objective(job)
        with problems.at("jobs", number, "optimizer"):
            find_optimizer(job)
        has_problem = any(
            problems.has("jobs", number, key) for key in ("init_from", "objective")
        )
        if model and tokenizer and not has_problem:
            key = "target_modules" if job.init_from is None else "init_from"
            with problems.at("jobs", number, key):
                modules.append(choose_modules(job, model, tokenizer.token_id))
    if model is not None and tokenizer is not None and config.samples is not None:
        with problems.at("samples", "prompts"):
            sample_prompts(config.samples, model, tokenizer)
    return modules


def _check_data(
    data: DataConfig, tokenizer: Tokenizer | None, path: Path, problems: Problems
) -> None:
    with problems.at(*path, "kind"):
        formats_of(data.kind)
    for key in TEMPLATES:
        with problems.at(*path, key):
            check_template(getattr(data, key) or "")
    if data.chat_template is not None:
        with problems.at(*path, "chat_template"):
            find_template(data.chat_template)
    elif tokenizer is not None and data.chat:
        with problems.at(*path, "chat"):
            tokenizer.chat.check()


def prepare_run(
    config: RunConfig,
    done_steps: Callable[[LoraJob], int],
    model: FrozenModel | None = None,
    *,
    started: str | None = None,
    ended: Collection[str] = (),
    chosen: Collection[str] = (),
    held_bytes: int = 0,
    on_read: Callable[[PlannedModel, Sequence[PreparedJob]], None] = lambda *_: None,
    on_accepted: Callable[[], None] = lambda: None,
    **checks: Callable[[], object],
) -> tuple[RunPlan, list[PreparedJob], DataReader]:
    """Prepares a run for this machine, and logs what was read and decided.

    Args:
        config: The run.
        done_steps: Returns the optimizer steps that a job with `continue_from` has
            done in the other run.
        model: The base model, if it is loaded already.
        started: Time at which the run began, in ISO format; None: it begins now.
        ended: Jobs that have ended and need not be held; see `resolve`.
        chosen: Settings that stay as they were chosen; see `BegunRun`.
        held_bytes: Memory that the run holds already on the first device.
        on_read: Is called when the data are read, and may refuse the run.
        on_accepted: See `resolve`.
        **checks: Further checks, by the setting that they are about.

    Returns:
        The plan, the jobs with their data, and what reads the data of further jobs.

    Raises:
        JaxloraError: A setting, the model or a job's data cannot be used, or the run
            does not fit this machine.
    """
    # Mistakes in the settings and the data are refused before weights are loaded.
    started = started or datetime.datetime.now().isoformat()
    planned, tokenizer, modules = _check_inputs(config, model, started, **checks)
    reader = data_reader(config, tokenizer)
    jobs = [
        dataclasses.replace(job, first_step=done_steps(job.settings))
        for job in prepare_jobs(config.jobs, modules, planned.config, reader)
    ]
    log_notes(note for job in jobs for note in job.notes)
    on_read(planned, jobs)
    machine = this_machine(held_bytes)
    try:
        plan = resolve(config, planned, jobs, machine, on_accepted, ended)
    except ConfigError as error:
        if chosen:
            names = " and ".join(chosen)
            error.args = (
                f"{error} Or have {names} chosen anew, which the run keeps as when it "
                "began: resume it with --replan (Trainer(config, replan=True)).",
            )
        raise
    log_notes(plan.notes)
    return plan, jobs, reader
