"""Opens a run: its settings, data and base model, while its programs are compiled."""

import contextlib
import dataclasses
import importlib
import pathlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxlora.adapters.staged_slots import StagedSlots
from jaxlora.common.background import in_background
from jaxlora.common.note import log_notes
from jaxlora.config import LoraJob, RunConfig
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.device_check import check_device
from jaxlora.distributed import agreement, processes
from jaxlora.errors import ConfigError, ModelError
from jaxlora.hf.load import FrozenModel, Place, load_model
from jaxlora.models.forward import Base
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepare_run import prepare_run
from jaxlora.plan.job.prepared_job import DataReader, PreparedJob, prepare_job
from jaxlora.plan.job.quantized_base import with_derived
from jaxlora.plan.job.slot_spec import check_fits
from jaxlora.plan.memory.capacity import fit
from jaxlora.plan.memory.footprint import StagePrograms
from jaxlora.plan.resolve import check_comparable
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.folder import check_writable
from jaxlora.run.identity import RunIdentity
from jaxlora.run.lock import check_not_in_use
from jaxlora.run.saved_run import RunRecord
from jaxlora.trackers.table import check_installed
from jaxlora.train.cloning import check_copy
from jaxlora.train.compilation_cache import keep_compiled_programs
from jaxlora.train.execute.answers import AnswerMeter
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.run_programs import RunPrograms
from jaxlora.train.execute.samples import Sampler
from jaxlora.train.execute.slot_decoder import SlotDecoder
from jaxlora.train.job_state import JobState
from jaxlora.train.saved.continue_job import continued_step
from jaxlora.train.saved.describe_run import run_identity
from jaxlora.train.saved.resume import BegunRun, FoundRun, as_begun
from jaxlora.train.start_job import start_job


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedRun:
    """A run whose model and data are loaded; its programs may still be compiled.

    Attributes:
        plan: The plan of the run, with the jobs that joined it earlier.
        model: The frozen base.
        layout: The decoder on its devices.
        further_bases: The frozen base on each further replica.
        slots: The slots, which are empty.
        num_compiled: Programs that this process had compiled for the layout before.
        chooses_replicas: Whether the user left its replicas to `auto`.
        jobs: The jobs.
        reader: Reads the data of jobs.
        found: What the folder of the run held when it was opened.
        started: Time at which the run began, in ISO format.
        joined: Names of the jobs that joined while an earlier process trained.
        sampler: Generates texts at evaluations; None if `samples` asks for none.
        meter: Measures answers at evaluations; None without such a metric of a sweep.
        decoder: What both generate with.
    """

    plan: RunPlan
    model: FrozenModel
    layout: Layout
    further_bases: Sequence[Base]
    slots: StagedSlots
    num_compiled: int
    chooses_replicas: bool
    jobs: list[JobState]
    reader: DataReader
    found: FoundRun
    started: str
    joined: tuple[str, ...]
    sampler: Sampler | None
    meter: AnswerMeter | None
    decoder: SlotDecoder

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the run."""
        return pathlib.Path(self.plan.config.output_dir)

    def open_job(self, settings: LoraJob) -> JobState:
        """Reads the data of a job that is to join; it has done nothing.

        Raises:
            JaxloraError: A setting or the data cannot be used, or the job does not fit
                the slots, or the sweep of the run.
        """
        config = self.plan.config
        prepared = prepare_job(settings, self.model.config, self.reader)
        log_notes(prepared.notes)
        check_comparable(config.sweep, [*(job.prepared for job in self.jobs), prepared])
        try:
            check_fits(prepared, self.plan.spec, config.limits.capacity)
        except ConfigError as error:
            if not self.chooses_replicas:
                raise
            raise ConfigError(
                f"{error} Or end the run (Ctrl-C), add the job to its run file and "
                "resume it with --replan (Trainer(config, replan=True)): replicas: "
                "auto then chooses replicas that hold it."
            ) from None
        check_copy(config, self.jobs, settings)
        return start_job(prepared, self.model)

    def identity(self, jobs: Sequence[JobState]) -> RunIdentity:
        """Returns what is compared when a run of these jobs is resumed."""
        prepared = [job.prepared for job in jobs]
        return run_identity(self.plan, self.model.fingerprint, prepared)

    def record(self, jobs: Sequence[JobState], **live: Any) -> RunRecord:
        """Returns the record of the run with these jobs.

        Args:
            jobs: The jobs.
            **live: The fields that do not follow from what was decided about the run.
        """
        config, mesh = self.plan.config, None
        if self.chooses_replicas and not config.replica_shapes:
            mesh = str(config.mesh_sizes)
        return RunRecord(
            started=self.started,
            identity=self.identity(jobs),
            mesh=mesh,
            ended=list(self.plan.ended),
            **live,
        )

    def start_programs(self, plan: RunPlan) -> RunPrograms:
        """Starts to compile all programs of the run, with the settings of a plan.

        Args:
            plan: The run's plan, or one with another capacity or `remat`.
        """
        layout = self.layout.with_remat(plan.spec.options.remat)
        evaluates = any(is_evaluated(job.prepared) for job in self.jobs)
        limits = plan.config.limits
        return RunPrograms.start(layout, limits, evaluates=evaluates)

    def compile(self, plan: RunPlan) -> tuple[StagePrograms, ...]:
        """Compiles the passes of all stages; the other programs beside them."""
        return self.start_programs(plan).compiled_passes()

    def fitted(self) -> "OpenedRun":
        """Returns the run with a plan that fits when compiled, and logs what changed.

        It waits for all programs.

        Raises:
            ConfigError: The device's memory cannot hold the run.
        """
        plan = fit(self.plan, self.compile)
        programs = self.start_programs(plan)
        log_notes([*plan.notes, *plan.replica_notes(programs.compiled_further())])
        programs.finish()
        layout = self.layout.with_remat(plan.spec.options.remat)
        return dataclasses.replace(self, plan=plan, layout=layout)


def open_run(
    config: RunConfig, model: FrozenModel | None, *, replan: bool = False
) -> OpenedRun:
    """Loads the base model and every job's data; the programs are compiled meanwhile.

    Args:
        config: The run.
        model: The base model, if it is loaded already.
        replan: See `Trainer`.

    Raises:
        JaxloraError: A setting, the model or a job's data cannot be used, or a GPU is
            visible and JAX does not use it.
    """
    check_device()
    keep_compiled_programs()
    given = [job.name for job in config.jobs]
    asked, begun = config, _as_begun(config, replan=replan)
    config, folder = begun.config, pathlib.Path(begun.config.output_dir)

    def check_saved(model: PlannedModel, jobs: Sequence[PreparedJob]) -> None:
        processes.from_first(lambda: begun.found.check_prepared(model, jobs))

    base = _Loading(config, model)
    prepared = prepare_run(
        config,
        model,
        begun.started,
        done_steps=continued_step,
        ended=begun.ended,
        chosen=begun.chosen,
        held_bytes=0 if model is None else device_bytes(model.params),
        on_read=check_saved,
        on_accepted=base.start_early,
        report_to=lambda: check_installed(config.report_to),
        output_dir=lambda: processes.from_first(lambda: check_writable(folder)),
    )
    plan = prepared.plan
    agreement.check_mesh(plan.config)
    layout = Layout.of(plan.stages, None if model is None else model.params)
    slots, num_compiled = layout.empty_slots(), layout.num_compilations()

    base.start(plan)
    limits, evaluates = plan.config.limits, any(map(is_evaluated, prepared.jobs))
    with base.first_to_fail():
        RunPrograms.start(layout, limits, evaluates=evaluates)
        if model is None:
            _import_ahead(plan.config)
    model = _as_planned(plan, base.result())
    jobs = [start_job(job, model) for job in prepared.jobs]
    agreement.check_inputs(model.fingerprint, prepared.jobs)
    decoder = SlotDecoder(layout, model.params)
    sampler, meter = _text_makers(plan, decoder, model, prepared.reader.tokenizer)
    return OpenedRun(
        plan=plan,
        model=model,
        layout=layout,
        further_bases=layout.further_bases(model.params),
        slots=slots,
        num_compiled=num_compiled,
        chooses_replicas=asked.replicas == "auto",
        jobs=jobs,
        reader=prepared.reader,
        found=begun.found,
        started=begun.started,
        joined=tuple(job.name for job in config.jobs if job.name not in given),
        sampler=sampler,
        meter=meter,
        decoder=decoder,
    )


def _as_begun(config: RunConfig, *, replan: bool) -> BegunRun:
    """Returns the run as it continues in its folder; reads settings only.

    Raises:
        JaxloraError: Processes differ in their settings, another process uses the
            folder, or the run there cannot become this one.
    """
    agreement.check_settings(config)
    _check_generates_here(config)
    folder = pathlib.Path(config.output_dir)
    processes.from_first(lambda: check_not_in_use(folder))
    begun = as_begun(config, replan=replan)
    log_notes([*config.notes, *begun.notes])
    return begun


def _text_makers(
    plan: RunPlan, decoder: SlotDecoder, model: FrozenModel, tokenizer: Tokenizer
) -> tuple[Sampler | None, AnswerMeter | None]:
    """Returns what generates texts at evaluations, as far as the run asks for any."""
    sampler, meter = None, None
    samples, sweep = plan.config.samples, plan.config.sweep
    if samples is not None:
        sampler = Sampler(samples, model, tokenizer, decoder)
    if sweep is not None and not sweep.metric.is_loss:
        meter = AnswerMeter(sweep.metric, model, tokenizer, decoder)
    return sampler, meter


def _check_generates_here(config: RunConfig) -> None:
    """Refuses generation by several processes, which would have to agree on each token.

    Raises:
        ConfigError: The run has several processes, and samples or a metric of answers.
    """
    if processes.count() == 1:
        return
    cure = "and this run has several. Leave it out, or train in one process."
    if config.samples is not None:
        raise ConfigError(f"samples: texts are generated by one process, {cure}")
    if config.sweep is not None and not config.sweep.metric.is_loss:
        raise ConfigError(f"sweep.metric: answers are generated by one process, {cure}")


def is_evaluated(job: PreparedJob) -> bool:
    """Whether a job has samples to evaluate it, or the base, on."""
    return job.eval_data is not None or job.objective.needs_reference


def _import_ahead(config: RunConfig) -> None:
    """Imports what training needs, while the base is read by other threads.

    The library that writes checkpoints takes half a second, for which the first steps
    would wait. An error is raised where the module is used.
    """
    names = [f"jaxlora.trackers.{name}" for name in config.report_to]
    if config.checkpoint_every:
        names.append("jaxlora.train.saved.orbax_folder")
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


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
            self._future = in_background(lambda: _load(config, place))

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


def _load(config: RunConfig, place: Place | None) -> FrozenModel:
    return load_model(
        config.model,
        dtype=config.dtype,
        revision=config.revision,
        quantize=config.quantize_base,
        quantize_args=config.quantize_base_args,
        keep_bf16=config.keep_bf16,
        place=lambda *_: place,
    )


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
