"""Whether the run in a folder may go on, and as what.

What the folder holds is read once, when the run is opened, and handed down. Nothing is
locked then, so another process may train in the folder before `Trainer.train` takes its
lock. Under the lock, `FoundRun.current` looks whether the files are the ones that were
read, and reads them again if not. From there on until the run ends, only this process
writes and removes checkpoints.
"""

import dataclasses
import datetime
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.common.counted import counted
from jaxlora.common.note import Note
from jaxlora.config import LoraJob, RunConfig
from jaxlora.config.replicas_config import listed
from jaxlora.distributed import processes
from jaxlora.errors import CheckpointError, ConfigError
from jaxlora.plan.job.planned_model import PlannedModel
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.run_plan import RunPlan
from jaxlora.run.folder import CHECKPOINTS, RUN_FILE, read_run_record
from jaxlora.run.identity import RunIdentity, check_same_run
from jaxlora.run.job_progress import JobProgress
from jaxlora.run.saved_run import RunRecord
from jaxlora.train.saved.continue_job import read_continued
from jaxlora.train.saved.read_checkpoint import (
    ReadCheckpoint,
    meta_file,
    newest_checkpoint,
    read_newest,
    unfinished_checkpoints,
)

logger = logging.getLogger(__name__)


def run_identity(
    model: PlannedModel, jobs: Sequence[PreparedJob], base: str = ""
) -> RunIdentity:
    """Returns what must not change when a run is resumed.

    Args:
        model: The planned base model.
        jobs: Jobs of the run.
        base: Fingerprint of the base model; empty if its weights are not known.
    """
    settings: dict[str, Any] = {"dtype": model.dtype.name}
    if (kept := model.base_format) is not None:
        settings |= {"quantize_base": kept.name, "keep_bf16": list(kept.kept)}
        if args := kept.options.result_settings():
            settings["quantize_base_args"] = args
    described = {job.name: job.identity for job in jobs}
    return RunIdentity(base=base, settings=settings, jobs=described)


def resolved_config(plan: RunPlan) -> dict[str, Any]:
    """Returns the settings of a run but its jobs, with values in the place of `auto`.

    Args:
        plan: The plan of the run.
    """
    config, spec = plan.config, plan.spec
    assert spec.slots is not None
    return config.model_dump(mode="json", exclude={"jobs"}) | {
        "dtype": plan.model.dtype.name,
        "implementation": spec.options.implementation,
        "attention": spec.options.attention,
        "max_concurrent_jobs": spec.slots.num_slots,
        "slot_rank": spec.slots.rank,
        "slot_dropout": spec.slots.use_dropout,
        "microbatch_shapes": list(plan.shapes.tokens),
        "replicas": listed(config.replica_shapes) or None,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """The contents of a run's folder, read and validated; tensors are not read.

    Only the first process reads it; the others have an empty one.

    Attributes:
        folder: The folder, which need not exist.
        record: Record of the run; None: none has begun.
        checkpoint: Its newest checkpoint; None: there is none.
        seen: Tells the files that were read from others of the same names.
    """

    folder: pathlib.Path
    record: RunRecord | None = None
    checkpoint: ReadCheckpoint | None = None
    seen: tuple[Any, ...] = ()

    @staticmethod
    def read(folder: pathlib.Path) -> "FoundRun":
        """Reads the record and the metadata of the newest checkpoint.

        Raises:
            CheckpointError: A file is damaged, or something else has the name of a
                checkpoint.
        """
        # Before they are read: what changes meanwhile is read again by `current`.
        seen, checkpoint = _seen(folder), None
        if (record := read_run_record(folder)) is None:
            return FoundRun(folder=folder, seen=seen)
        unfinished_checkpoints(checkpoints := folder / CHECKPOINTS)
        if newest_checkpoint(checkpoints) is not None:
            checkpoint = read_newest(checkpoints)
        return FoundRun(folder=folder, record=record, checkpoint=checkpoint, seen=seen)

    def current(self) -> "FoundRun":
        """Returns what the folder holds now; reads it again only if it has changed.

        Raises:
            CheckpointError: See `read`.
        """
        return self if self.seen == _seen(self.folder) else FoundRun.read(self.folder)

    @property
    def progress(self) -> Mapping[str, JobProgress]:
        """Progress of each job at the checkpoint, by name."""
        return {} if self.checkpoint is None else self.checkpoint.run.progress

    def check(
        self,
        now: RunIdentity,
        jobs: Sequence[PreparedJob] = (),
        *,
        drop_state: bool | None = None,
    ) -> None:
        """Refuses a run that cannot become the one that was found, if one was.

        It is called when the settings are known, when the data are read, and under the
        lock, when the base is: each time as early as what it needs is known.

        Args:
            now: Identity of the run, as far as it is known.
            jobs: Its jobs, if their data are read.
            drop_state: Whether jobs may end at once, as they have done more steps than
                are wanted now, or as early stopping has less patience; None: it is not
                known yet.

        Raises:
            CheckpointError: The identities differ too much, a job that has finished has
                more steps now, or jobs would end at once and `drop_state` is false.
        """
        if self.record is not None:
            then = self.record.identity
            if self.checkpoint is not None:  # a job that it lacks begins anew
                then = then.limited_to(self.progress)
            check_same_run(now, then, self.folder / RUN_FILE)
        _check_jobs(self.progress, jobs, drop_state)

    def check_prepared(
        self,
        model: PlannedModel,
        jobs: Sequence[PreparedJob],
        *,
        drop_state: bool | None = None,
    ) -> None:
        """Refuses states that the run, or a job of it, cannot continue from.

        It comes after the data are read, and before the base is. All that would refuse
        the run but the fingerprint of the base is known then.

        Args:
            model: Its base model.
            jobs: Its jobs.
            drop_state: See `check`.

        Raises:
            CheckpointError: See `check` and `continue_job`.
        """
        if self.record is not None:
            self.check(run_identity(model, jobs), jobs, drop_state=drop_state)
            return
        for job in jobs:
            if job.settings.continue_from is not None:
                identity = run_identity(model, [job])
                read_continued(job.settings, job.num_steps, identity)

    def check_settings(self, config: RunConfig) -> None:
        """Refuses a run by its settings, before any data are read.

        Args:
            config: The run, with the jobs that have joined it.

        Raises:
            CheckpointError: See `check`.
        """
        if self.record is None:
            return
        then = self.record.identity
        # Values that are not known yet count as unchanged.
        jobs = {job.name: job.model_dump(mode="json") for job in config.jobs}
        jobs = {name: then.jobs.get(name, {}) | job for name, job in jobs.items()}
        self.check(RunIdentity(base="", settings=then.settings, jobs=jobs))


def _seen(folder: pathlib.Path) -> tuple[Any, ...]:
    """Tells the files of a run from others of the same names; opens none of them."""
    number = newest_checkpoint(folder / CHECKPOINTS)
    meta = meta_file(folder / CHECKPOINTS / str(number))
    return number, _stamp(folder / RUN_FILE), _stamp(meta)


def _stamp(path: pathlib.Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BegunRun:
    """A run as `--resume` continues it.

    Attributes:
        config: The run, with the settings that it began with and the jobs that joined
            while it trained.
        found: What `output_dir` holds.
        started: Time at which it began, or now, in ISO format. Chat templates may print
            the date, so a resumed run uses that of its start.
        notes: Lines for the log about the settings and the jobs.
        ended: Jobs that have ended and that its replicas need not hold.
        chosen: Settings that are `auto` and stay as they were chosen.
    """

    config: RunConfig
    found: FoundRun
    started: str
    notes: tuple[Note, ...]
    ended: tuple[str, ...]
    chosen: tuple[str, ...]


def as_begun(config: RunConfig, *, replan: bool = False) -> BegunRun:
    """Returns a run as `--resume` continues it, or unchanged if it has not begun.

    All processes of a run get what the first one reads.

    Args:
        config: The run.
        replan: Whether what is `auto` stays so, to be chosen anew; only the number of
            slots is that with which the run began.

    Raises:
        CheckpointError: A file of the run is damaged or contradicts the settings.
    """
    found = FoundRun(folder=pathlib.Path(config.output_dir))

    def read() -> tuple[str, dict, list[dict[str, Any]]]:
        nonlocal found
        found = FoundRun.read(found.folder)
        if (record := found.record) is None:
            return datetime.datetime.now().isoformat(), {}, []
        begun = _begun_settings(config, record)
        if replan:
            begun = {k: v for k, v in begun.items() if k == "max_concurrent_jobs"}
        names = {job.name for job in config.jobs}  # others have joined later
        added = [record.jobs[name] for name in record.added if name not in names]
        return record.started, begun, added

    started, begun, added = processes.from_first(read)
    joined = [LoraJob.model_validate(job) for job in added]
    chosen = [name for name in begun if getattr(config, name) == "auto"]
    notes = [
        Note(f"{name}: auto: {begun[name]}, as when the run began")
        for name in chosen
        if begun[name]
    ]
    if (mesh := begun.get("mesh")) is not None:
        notes.append(Note(f"replicas: auto: mesh {mesh}, as in the run so far"))
    joining = "joined while the run trained; it is in the run"
    notes += [Note(joining, job=job.name) for job in joined]
    try:
        config = config.replace(**begun, jobs=(*config.jobs, *joined))
    except ConfigError as error:
        values = ", ".join(f"{name}: {value}" for name, value in begun.items())
        raise CheckpointError(
            f"the run in {config.output_dir} began with {values or 'other settings'}, "
            f"and cannot go on with these settings: {error}\nGive the settings that it "
            "began with, or choose another output_dir."
        ) from error

    def check() -> list[str]:
        found.check_settings(config)
        return _jobs_not_held(found, config, replan=replan)

    return BegunRun(
        config=config,
        found=found,
        started=started,
        notes=tuple(notes),
        ended=tuple(processes.from_first(check)),
        chosen=tuple(name for name in chosen if name != "padding_share"),
    )


def _jobs_not_held(found: FoundRun, config: RunConfig, *, replan: bool) -> list[str]:
    """Returns the jobs of a run that have ended, and that its replicas need not hold.

    They are those that had ended when the replicas were chosen. If they are chosen
    anew, all that have ended are, unless a search may suggest others like them.
    """
    over = [name for name, one in found.progress.items() if one.is_over]
    may_follow = config.sweep is not None and config.sweep.search is not None
    # If all have ended, there is nothing to choose replicas for.
    if replan and not may_follow and len(over) < len(config.jobs):
        return over
    ended = [] if found.record is None else found.record.ended
    return [name for name in ended if name in over]


def _begun_settings(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Returns what the settings that are `auto` became when they were chosen.

    These are `microbatch_tokens`, `remat`, `padding_share` and `replicas`, or the mesh
    that `replicas: auto` has chosen, and the number and rank of the slots if jobs have
    joined since.
    """
    then, begun, replicas = record.config, {}, config.replicas
    if config.has_open_replicas and then["replicas"]:
        begun["replicas"] = then["replicas"]
    elif replicas == "auto":
        begun |= {"replicas": None, "mesh": then["mesh"]}
        replicas = None
    if config.microbatch_tokens == "auto" and replicas is None:
        begun["microbatch_tokens"] = then["microbatch_tokens"]
    if config.remat == "auto":
        begun["remat"] = then["remat"]
    if config.padding_share == "auto" and "stage=" in str(then.get("mesh")):
        # Runs of versions without it packed as if padding were tokens.
        begun["padding_share"] = then.get("padding_share", 1.0)
    if record.added:
        # The slots were made for the jobs that the run began with.
        for name in ("max_concurrent_jobs", "slot_rank"):
            if getattr(config, name) is None:
                begun[name] = then[name]
    return begun


def _check_jobs(
    progress: Mapping[str, JobProgress],
    jobs: Sequence[PreparedJob],
    drop_state: bool | None,
) -> None:
    """Refuses jobs that cannot go on, or that end at once; see `FoundRun.check`."""
    cut = {}
    for job in jobs:
        done, wanted = progress.get(job.name, JobProgress()), job.num_steps
        if done.status == "finished" and wanted > done.step:
            raise CheckpointError(
                f"job {job.name!r} has finished its {counted(done.step, 'step')}, and "
                f"{wanted} are wanted now. Its optimizer state was dropped when it "
                "finished, so it cannot go on: set steps back, and add another job "
                "with init_from on its adapter."
            )
        if not done.is_over and (reason := _cut_reason(job, done)):
            cut[job.name] = reason
    if not cut or drop_state is None:
        return
    reasons = "".join(f"\n- job {name!r} {reason}" for name, reason in cut.items())
    lost = (
        "end at once, and their optimizer states are dropped, so they cannot go on in "
        "this run"
    )
    if drop_state:
        logger.warning("these jobs %s:%s", lost, reasons)
        return
    raise CheckpointError(
        f"these jobs would {lost.replace('are', 'be')} later:{reasons}\nSet these "
        "settings back; or end the jobs where they are, and keep only their adapters, "
        "with drop_state=True (--drop-state)."
    )


def _cut_reason(job: PreparedJob, done: JobProgress) -> str | None:
    """Returns why a resumed job would end at once; None if it would not."""
    if done.step > job.num_steps:
        wanted = f"the number wanted now is {job.num_steps}"
        return f"has done {counted(done.step, 'step')}, and {wanted}"
    patience, count = job.settings.early_stopping, done.evals_without_gain
    if patience and count >= patience:
        had = f"has had {counted(count, 'evaluation')} without a gain"
        return f"{had}, and early_stopping is {patience} now"
    return None
