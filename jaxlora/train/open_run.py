"""Opens a run: its settings, data and base model, while its programs are compiled."""

import contextlib
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxlora.adapters.adapter import Adapter
from jaxlora.adapters.fresh import (
    blank_adapter,
    blank_outside,
    fresh_adapter,
    fresh_outside,
    is_drawn_alone,
)
from jaxlora.common.background import in_background
from jaxlora.common.note import log_notes
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.device_check import check_device
from jaxlora.distributed import agreement, processes
from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.load import FrozenModel, Place, load_model
from jaxlora.models.base_format import kernel_of
from jaxlora.models.forward import Base
from jaxlora.models.structure import linear_path
from jaxlora.plan.job.planned_model import PlannedModel, with_derived
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.job.prepared_job import PreparedJob, prepare_job
from jaxlora.plan.job.slot_spec import check_fits
from jaxlora.plan.resolve import check_comparable
from jaxlora.plan.run_plan import RunPlan
from jaxlora.programs.program import expect_new_programs
from jaxlora.run.folder import check_writable
from jaxlora.run.lock import check_not_in_use
from jaxlora.trackers.table import check_installed
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.control import Control
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.run_programs import RunPrograms
from jaxlora.train.execute.texts import AnswerMeter, Sampler, SlotDecoder
from jaxlora.train.job_state import JobState
from jaxlora.train.live_jobs import LiveJobs
from jaxlora.train.run import Run, is_evaluated
from jaxlora.train.saved.continue_job import continued_step
from jaxlora.train.saved.resume import BegunRun, as_begun


def open_run(
    config: RunConfig, model: FrozenModel | None, control: Control, *, replan: bool
) -> Run:
    """Loads the base model and every job's data; the programs are compiled meanwhile.

    Args:
        config: The run.
        model: The base model, if it is loaded already.
        control: Decides about the jobs.
        replan: See `Trainer`.

    Raises:
        JaxloraError: A setting, the model or a job's data cannot be used, or a GPU is
            visible and JAX does not use it.
    """
    check_device()
    keep_compiled_programs()
    expect_new_programs()
    given = [job.name for job in config.jobs]
    asked, begun = config, _as_begun(config, replan=replan)
    config, folder = begun.config, pathlib.Path(begun.config.output_dir)

    def check_saved(model: PlannedModel, jobs: Sequence[PreparedJob]) -> None:
        processes.from_first(lambda: begun.found.check_prepared(model, jobs))

    base = _Loading(config, model)
    plan, read_jobs, reader = prepare_run(
        config,
        continued_step,
        model,
        started=begun.started,
        ended=begun.ended,
        chosen=begun.chosen,
        held_bytes=0 if model is None else device_bytes(model.params),
        on_read=check_saved,
        on_accepted=base.start_early,
        report_to=lambda: check_installed(config.report_to),
        output_dir=lambda: processes.from_first(lambda: check_writable(folder)),
    )
    agreement.check_mesh(plan.config)
    layout = Layout.of(plan.stages, None if model is None else model.params)
    slots, num_compiled = layout.empty_slots(), layout.num_compilations()

    base.start(plan)
    limits, evaluates = plan.config.limits, any(map(is_evaluated, read_jobs))
    with base.first_to_fail():
        RunPrograms.start(layout, limits, evaluates=evaluates)
    if "tensorboard" in plan.config.report_to:
        # The first evaluation would wait for it. Errors are raised where it is used.
        name = "jaxlora.trackers.tensorboard"
        in_background(functools.partial(importlib.import_module, name))
    model = _as_planned(plan, base.result())
    jobs = [start_job(job, model) for job in read_jobs]
    agreement.check_inputs(model.fingerprint, read_jobs)
    sampler, meter = _text_makers(plan, layout, model, reader.tokenizer)
    joined = [job.name for job in config.jobs if job.name not in given]
    run = Run(
        plan=plan,
        model=model,
        layout=layout,
        further_bases=layout.further_bases(model.params),
        slots=slots,
        num_compiled=num_compiled,
        chooses_replicas=asked.replicas == "auto",
        reader=reader,
        found=begun.found,
        started=begun.started,
        sampler=sampler,
        meter=meter,
        control=control,
    )
    run.live = control.live = LiveJobs(jobs, joined, lambda job: open_job(run, job))
    return run


def open_job(run: Run, settings: LoraJob) -> JobState:
    """Reads the data of a job that is to join; it may continue from another run.

    Raises:
        JaxloraError: A setting or the data cannot be used, or the job does not fit the
            slots, or the sweep of the run.
    """
    config = run.plan.config
    prepared = prepare_job(settings, run.model.config, run.reader)
    log_notes(prepared.notes)
    check_comparable(config.sweep, [*(job.prepared for job in run.jobs), prepared])
    try:
        check_fits(prepared, run.plan.spec, config.limits.capacity)
    except ConfigError as error:
        if not run.chooses_replicas:
            raise
        raise ConfigError(
            f"{error} Or end the run (Ctrl-C), add the job to its run file and resume "
            "it with --replan (Trainer(config, replan=True)): replicas: auto then "
            "chooses replicas that hold it."
        ) from None
    if (origin := settings.clone_of) is not None:  # it is refused if it is no copy
        copy = settings.replace(clone_of=origin.replace(step=origin.step or 1))
        config.replace(jobs=(*(job.settings for job in run.jobs), copy))
    job = start_job(prepared, run.model)
    run.continue_jobs([job])
    return job


def start_job(prepared: PreparedJob, model: FrozenModel) -> JobState:
    """Returns a job that has done nothing, with the adapter that it starts from."""
    if prepared.start is not None:
        return JobState(prepared, prepared.start)
    paths = {name: linear_path(name) for name in prepared.modules}
    params, base_format = model.params, model.base_format
    given = prepared.settings, prepared.modules

    def kernels() -> dict[str, Any]:
        return {
            name: kernel_of(params, f"{path}.kernel", base_format)
            for name, path in paths.items()
        }

    tokens = prepared.tokens

    def draw() -> Adapter:
        outside = fresh_outside(prepared.settings, tokens, model.config, params)
        made = fresh_adapter(*given, kernels(), model.dtype)
        return dataclasses.replace(made, outside=outside)

    blank = blank_adapter(*given, kernels())
    outside = blank_outside(tokens, model.config)
    return JobState(
        prepared,
        dataclasses.replace(blank, outside=outside),
        draw,
        is_drawn_alone=is_drawn_alone(prepared.settings) and not tokens,
    )


def _as_begun(config: RunConfig, *, replan: bool) -> BegunRun:
    """Returns the run as it continues in its folder; reads settings only.

    Raises:
        JaxloraError: Processes differ in their settings, another process uses the
            folder, or the run there cannot become this one.
    """
    agreement.check_settings(config)
    folder = pathlib.Path(config.output_dir)
    processes.from_first(lambda: check_not_in_use(folder))
    begun = as_begun(config, replan=replan)
    log_notes([*config.notes, *begun.notes])
    return begun


def _text_makers(
    plan: RunPlan, layout: Layout, model: FrozenModel, tokenizer: Tokenizer
) -> tuple[Sampler | None, AnswerMeter | None]:
    """Returns what generates texts at evaluations, as far as the run asks for any."""
    sampler, meter = None, None
    samples, sweep = plan.config.samples, plan.config.sweep
    decoder = SlotDecoder(layout, model.params)
    if samples is not None:
        sampler = Sampler(samples, model, tokenizer, decoder)
    if sweep is not None and not sweep.metric.is_loss:
        meter = AnswerMeter(sweep.metric, model, tokenizer, decoder)
    return sampler, meter


class _Loading:
    """The base of a run while it is loaded in a thread, unless it was given.

    On one device, it is loaded beside the estimates of the plan. On several, the plan
    decides where weights go. It begins when nothing is left that could refuse the run,
    as it may take long and cannot be ended.
    """

    def __init__(self, config: RunConfig, given: FrozenModel | None):
        self._config = config
        self._future: Future[FrozenModel] | None = None
        if given is not None:
            self._future = Future()
            self._future.set_result(given)

    def start_early(self) -> None:
        """Begins to load, unless the plan decides where weights go."""
        config = self._config
        is_open = config.mesh == "auto" or config.has_open_replicas
        if is_open or processes.count() > 1:
            return
        first = config.replica_shapes[:1]
        if config.mesh_sizes.num_devices == 1 and all(r.tensor == 1 for r in first):
            self._start(config, None)

    def start(self, plan: RunPlan) -> None:
        """Begins to load, unless it has begun.

        Several processes load at once and not in a thread, as they must do the same in
        the same order.
        """
        self._start(plan.config, plan.place)
        if processes.count() > 1:
            self.result()

    def _start(self, config: RunConfig, place: Place | None) -> None:
        if self._future is None:
            self._future = in_background(
                lambda: load_model(
                    config.model,
                    dtype=config.dtype,
                    revision=config.revision,
                    quantize=config.quantize_base,
                    quantize_args=config.quantize_base_args,
                    keep_bf16=config.keep_bf16,
                    place=lambda *_: place,
                )
            )

    def result(self) -> FrozenModel:
        """Waits for the base."""
        assert self._future is not None
        return self._future.result()

    @contextlib.contextmanager
    def first_to_fail(self) -> Iterator[None]:
        """Raises an error of the base rather than one of the block.

        So the same run always fails in the same way.
        """
        try:
            yield
        except Exception:
            self.result()
            raise


def _as_planned(plan: RunPlan, model: FrozenModel) -> FrozenModel:
    """Checks that the base is the planned one, and gives it the arrays of its format.

    Raises:
        ModelError: Its files have changed since they were looked at.
    """
    if PlannedModel.of(plan.config, model) != plan.model:
        raise ModelError(
            f"{plan.config.model} has changed while the run was planned. Start again "
            "when its files are complete."
        )
    return with_derived(model, plan.spec)


def device_bytes(params: Base) -> int:
    """Returns the bytes that weights have on the first device."""
    first = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for array in params.values()
        for shard in array.addressable_shards
        if shard.device == first
    )
