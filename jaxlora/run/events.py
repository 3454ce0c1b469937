"""Events of a run, as callbacks receive them.

Every event is a frozen dataclass. A callback has one method for each kind of event; see
`jaxlora.run.callback`. Events are sent by the thread that trains, in the order in
which things happen.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jaxlora.run.job_progress import JobProgress, JobStatus

if TYPE_CHECKING:  # `jaxlora status` starts faster without it
    from jaxlora.config import LoraJob

# The fields of an event that metrics.jsonl has elsewhere in its line, or not at all.
_NOT_LOGGED = ("progress", "num_steps", "round", "job")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobInfo(JobStatus):
    """A job when it enters a run.

    Its progress is not at its start if the run was resumed.

    Attributes:
        settings: Settings of the job.
    """

    settings: "LoraJob"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a run.

    Attributes:
        kind: Kind of the event. Callbacks receive it in the method `on_<kind>`.
        is_logged: Whether metrics.jsonl has a line for each event of this kind.
        merged: The fields whose entries are values of that line, by the prefix of their
            names there.
        round: Round that it belongs to. A round is one optimizer step of every
            running job.
    """

    kind: ClassVar[str]
    is_logged: ClassVar[bool] = False
    merged: ClassVar[Mapping[str, str]] = {}

    round: int

    def values(self) -> dict[str, Any]:
        """Returns the JSON values that describe the event in metrics.jsonl."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in self.merged:
                found |= {f"{self.merged[name]}{key}": x for key, x in value.items()}
            elif name not in _NOT_LOGGED and value not in (None, ()):
                found[name] = value
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunStartEvent(Event):
    """The run begins, or continues in this process.

    Attributes:
        jobs: The jobs, in the order in which they were given.
        output_dir: Folder of the run.
        num_slots: Number of jobs that train at the same time.
        is_resumed: Whether the run goes on from a checkpoint.
    """

    kind = "run_start"

    jobs: tuple[JobInfo, ...]
    output_dir: pathlib.Path
    num_slots: int
    is_resumed: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobAddEvent(Event):
    """A job joins the run while it trains; it starts when a slot is free.

    Attributes:
        info: The job.
    """

    kind = "job_add"

    info: JobInfo


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent(Event):
    """Something that happened to one job.

    Attributes:
        job: Name of the job.
        progress: Its status, steps and losses after the event.
        num_steps: Its optimizer steps in all.
    """

    is_logged = True

    job: str
    progress: JobProgress
    num_steps: int

    @property
    def step(self) -> int:
        """Optimizer steps that the job has done."""
        return self.progress.step

    def values(self) -> dict[str, Any]:
        """Returns the JSON values that describe the event in metrics.jsonl."""
        return {"job": self.job, "step": self.step} | Event.values(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobStartEvent(JobEvent):
    """A job gets a slot for the first time.

    Attributes:
        slot: The slot.
    """

    kind = "job_start"

    slot: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobPauseEvent(JobEvent):
    """A job leaves its slot with all its state.

    Attributes:
        reason: Text that says why.
    """

    kind = "job_pause"

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobResumeEvent(JobEvent):
    """A job that was paused continues.

    Attributes:
        slot: The slot, possibly another one than before.
    """

    kind = "job_resume"

    slot: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(JobEvent):
    """A job has done an optimizer step.

    Attributes:
        loss: Mean over the global batch's target tokens before the step, in nats.
        grad_norm: Norm of the adapter's gradient, before clipping.
        learning_rate: Learning rate of the step.
        num_tokens: Tokens of the global batch, prompts included.
        num_target_tokens: Tokens whose loss counts.
        metrics: Metrics of the job's objective, by name.
    """

    kind = "step"
    merged = {"metrics": ""}

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent(JobEvent):
    """A job was evaluated on its held-out samples.

    Attributes:
        eval_loss: Mean over the held-out target tokens, in nats.
        is_best: Whether it is the job's best evaluation so far.
        metric: Value of the sweep's metric of answers; None: there is none.
        metrics: Metrics of the job's objective, by name; and if there are several
            held-out data sets, `loss/NAME` of each.
    """

    kind = "eval"
    merged = {"metrics": "eval_"}

    eval_loss: float
    is_best: bool
    metric: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def losses_by_set(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the loss on each held-out data set, from the metrics of an evaluation."""
    sets = {name: name.removeprefix("loss/") for name in metrics}
    return {sets[n]: loss for n, loss in metrics.items() if sets[n] != n}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleEvent(JobEvent):
    """A job has generated a text at an evaluation; see `RunConfig.samples`.

    Attributes:
        number: Number of the prompt, from 0.
        prompt: The prompt.
        text: The text that was generated for it.
        finish_reason: Why the text ends; see `Generation`.
    """

    kind = "sample"

    number: int
    prompt: str
    text: str
    finish_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobEndEvent(JobEvent):
    """A job has ended; an `ExportEvent` follows, unless it failed or never began.

    Attributes:
        status: `finished`, `stopped`, `stopped early` or `failed`.
        reason: Text that says why.
    """

    kind = "job_end"

    status: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WindowEvent(Event):
    """Some rounds have ended (`RunConfig.window_steps`): a report of their work.

    Attributes:
        num_rounds: Rounds of the window.
        num_tokens: Tokens trained on, without padding.
        seconds: Duration, without evaluations and exports.
        tokens_per_second: Speed of the window.
        num_microbatches: Microbatches that ran.
        fill: Share of their rows that hold tokens.
        planned_ahead: Whether all of them were planned while others ran.
        planning_seconds: Time that training waited for plans.
        pipeline: Estimates for a pipeline of stages, by name; empty without stages.
        predicted_seconds: Predicted duration; None: the device's rates are not known.
        replicas: Work of each replica, by name; empty without `RunConfig.replicas`.
    """

    kind = "window"
    is_logged = True
    merged = {"pipeline": ""}

    num_rounds: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    num_microbatches: int
    fill: float
    planned_ahead: bool
    planning_seconds: float
    pipeline: Mapping[str, Any]
    predicted_seconds: float | None = None
    replicas: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    """A checkpoint is complete and on the disk; training went on meanwhile.

    Attributes:
        folder: Folder of the checkpoint. Its number is the event's round.
    """

    kind = "checkpoint"

    folder: pathlib.Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportEvent(Event):
    """An adapter of a job is complete and on the disk; training went on meanwhile.

    Attributes:
        job: Name of the job.
        step: Optimizer steps done by the weights.
        folder: PEFT folder of the adapter, in which one of more steps is kept.
    """

    kind = "export"

    job: str
    step: int
    folder: pathlib.Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunEndEvent(Event):
    """The run ends in this process, and its last checkpoint is written.

    Attributes:
        is_interrupted: Whether jobs are left that `--resume` can continue.
    """

    kind = "run_end"

    is_interrupted: bool
