"""Plans a run without training: its microbatches, their fill, and simulated time.

This needs the tokenizer and the jobs' data, but no weights and no GPU.
"""

import dataclasses
import itertools
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
from jaxlora.hf.checkpoint import planned_config
from jaxlora.hf.files import tokenizer_folder
from jaxlora.hf.load import base_dtype
from jaxlora.hf.names import linear_names, linear_path, tensor_specs
from jaxlora.memory.bounds import Bounds
from jaxlora.memory.capacity import settle
from jaxlora.scheduler import (
    Lanes,
    Limits,
    Pipeline,
    Plan,
    Sample,
    Schedule,
    lower_bound,
)
from jaxlora.scheduler.plan import evaluate
from jaxlora.scheduler.ticks import concatenate
from jaxlora.train import prepare
from jaxlora.train.continue_job import continued_step
from jaxlora.train.job_run import batch_lengths, job_order
from jaxlora.train.next_window import (
    JobPosition,
    assign_slots,
    fixed_shape_cost,
    pack_window,
    positions_after,
    window_samples,
)
from jaxlora.train.run_folder import begun_capacity

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Samples that are packed together: one window or, with stages, several.

    Attributes:
        samples: The samples; a job is identified by its number in the run file.
        schedule: Microbatches of the samples.
        fewest: Lower bound on the number of microbatches of any schedule.
        greedy: Microbatches of `packer: greedy`.
    """

    samples: tuple[Sample, ...]
    schedule: Schedule
    fewest: int
    greedy: Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan:
    """The plan of a run in which no job ends early.

    Attributes:
        jobs: Jobs of the run.
        pipeline: Pipeline that the plan is for.
        parts: Parts of the run, in the order in which they run.
        whole: The whole run, checked and simulated.
        greedy: The same samples under `packer: greedy`.
    """

    jobs: tuple[JobData, ...]
    pipeline: Pipeline
    parts: tuple[Part, ...]
    whole: Plan
    greedy: Plan

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return sum(s.num_tokens for part in self.parts for s in part.samples)

    @property
    def busy(self) -> float:
        """Share of the devices' simulated time that is spent on tokens, not padding."""
        devices = self.pipeline.num_stages * self.whole.simulation.makespan
        return self.num_tokens / devices


def plan_run(
    config: RunConfig, *, stages: int = 1, steps: int | None = None
) -> RunPlan:
    """Plans a run. Time is in units of what a device needs for one token.

    With one stage, the plan has the same microbatches as the trainer, as long as no job
    ends early. With more stages, a 1F1B pipeline is simulated. Windows between two
    starts of jobs are then packed together, as the pipeline need not drain there.

    Args:
        config: The run.
        stages: Number of pipeline stages.
        steps: Number of optimizer steps of each job to plan; None: all.

    Raises:
        JaxloraError: The tokenizer or a job's data cannot be used.
    """
    folder = tokenizer_folder(config.model, config.revision)
    jobs = _read_jobs(config, folder, steps)
    config = _settle(config, folder, jobs)
    limits = config.limits
    positions = planned_config(folder).max_positions
    for job in jobs:
        prepare.warn_about_positions(job.job.name, job.data, job.held_out, positions)
        prepare.check_lengths(job.job.name, job.data, job.held_out, limits.capacity)
    pipeline = Pipeline.one_f_one_b(stages)
    spans = _windows(config, jobs) if stages == 1 else _spans(config, jobs)
    parts = tuple(_part(config, span, limits, pipeline) for span in spans)
    return RunPlan(
        jobs=jobs,
        pipeline=pipeline,
        parts=parts,
        whole=_join([p.schedule for p in parts], parts, limits, pipeline),
        greedy=_join([p.greedy for p in parts], parts, limits, pipeline),
    )


def _read_jobs(
    config: RunConfig, folder: pathlib.Path, steps: int | None
) -> tuple[JobData, ...]:
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


# ---- the capacity --------------------------------------------------------------------


def _settle(
    config: RunConfig, folder: pathlib.Path, jobs: Sequence[JobData]
) -> RunConfig:
    """Replaces `microbatch_tokens: auto` by a number.

    If the run has begun, this is the number that it began with. Otherwise it is what
    the trainer would choose on this machine before it compiles the training step.
    """
    begun_with = begun_capacity(config)
    if config.microbatch_tokens != "auto":
        return config
    if begun_with is not None:
        return config.replace(microbatch_tokens=begun_with)
    train = [job.data for job in jobs]
    held_out = [job.held_out for job in jobs if job.held_out is not None]
    model, bounds = planned_config(folder), Bounds.of(config, train, held_out)
    spec = prepare.spec_of(
        config,
        model,
        jnp.dtype(base_dtype(config.dtype)),
        [_ranks(job.job, model) for job in jobs],
        train,
        bounds.max_tokens,
    )
    return settle(config, spec, bounds)


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


# ---- which samples are packed together -----------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Span:
    """Samples by slot, the job in each slot, and whether a job has just started."""

    samples: tuple[Sample, ...]
    job_of_slot: dict[int, int]
    starts: bool


def _windows(config: RunConfig, jobs: Sequence[JobData]) -> list[_Span]:
    """The windows of a run in which no job ends early."""
    num_slots = config.max_concurrent_jobs or len(jobs)
    positions = [
        JobPosition(
            job=i,
            priority=j.job.priority,
            slot=None,
            step=continued_step(j.job),
            num_steps=j.num_steps,
        )
        for i, j in enumerate(jobs)
    ]
    positions = [p for p in positions if p.step < p.num_steps]
    out = []
    while positions:
        waiting = {p.job for p in positions if p.slot is None}
        positions = assign_slots(positions, num_slots, preempts=config.preempt)
        running = {p.slot: p.job for p in positions if p.slot is not None}
        samples = window_samples(
            positions, config.window_steps, lambda job, step: jobs[job].lengths(step)
        )
        starts = bool(waiting & set(running.values()))
        out.append(_Span(samples=samples, job_of_slot=running, starts=starts))
        positions = positions_after(positions, config.window_steps)
    return out


def _spans(config: RunConfig, jobs: Sequence[JobData]) -> list[_Span]:
    """Windows joined from one start of jobs to the next."""
    spans: list[_Span] = []
    for window in _windows(config, jobs):
        if window.starts:
            spans.append(window)
        else:
            samples = spans[-1].samples + window.samples
            spans[-1] = dataclasses.replace(spans[-1], samples=samples)
    return spans


def _part(config: RunConfig, span: _Span, limits: Limits, pipeline: Pipeline) -> Part:
    cost = fixed_shape_cost(limits.capacity, pipeline.num_stages)
    lanes = Lanes(pipeline=pipeline)
    schedule = pack_window(span.samples, limits, config.packer, lanes)
    return Part(
        samples=_by_job(span.samples, span),
        schedule=_renamed(schedule, span),
        fewest=lower_bound(span.samples, limits, pipeline, cost).microbatches,
        greedy=_renamed(pack_window(span.samples, limits, "greedy", lanes), span),
    )


def _by_job(samples: Sequence[Sample], span: _Span) -> tuple[Sample, ...]:
    """Replaces the slots of samples by the numbers of the jobs in them."""
    return tuple(dataclasses.replace(s, job=span.job_of_slot[s.job]) for s in samples)


def _renamed(schedule: Schedule, span: _Span) -> Schedule:
    microbatches = tuple(_by_job(m, span) for m in schedule.microbatches)
    return dataclasses.replace(schedule, microbatches=microbatches)


def _join(
    schedules: Sequence[Schedule],
    parts: Sequence[Part],
    limits: Limits,
    pipeline: Pipeline,
) -> Plan:
    """Evaluates schedules that run one after the other without a pause."""
    lanes = Lanes(pipeline=pipeline)
    return evaluate(
        concatenate(schedules, lanes, limits),
        list(itertools.chain.from_iterable(part.samples for part in parts)),
        lanes,
        fixed_shape_cost(limits.capacity, pipeline.num_stages),
    )
