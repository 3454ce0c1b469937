"""Events as a run sends them, made without training."""

import pathlib
from dataclasses import fields

from jaxlora import LoraJob
from jaxlora.run.events import (
    EvalEvent,
    JobEndEvent,
    JobInfo,
    JobStartEvent,
    RunStartEvent,
    SampleEvent,
    StepEvent,
    WindowEvent,
)
from jaxlora.run.job_progress import JobProgress
from jaxlora.train.report.summary import JobResult

NUM_STEPS = 10


def info(name: str, rank: int = 4, progress: JobProgress | None = None) -> JobInfo:
    job = LoraJob(name=name, data={"path": "none.jsonl"}, rank=rank, learning_rate=1e-3)
    return JobInfo(
        name=name,
        settings=job,
        rank=rank,
        num_modules=2,
        num_steps=NUM_STEPS,
        batch_tokens=100.0,
        progress=progress or JobProgress(),
    )


def result(
    name: str, progress: JobProgress, folder: pathlib.Path | None = None
) -> JobResult:
    found = info(name, progress=progress)
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return JobResult(**values, folder=folder)


def run_start(*infos: JobInfo, num_slots: int = 2) -> RunStartEvent:
    return RunStartEvent(
        round=0,
        jobs=infos,
        output_dir=pathlib.Path("run"),
        num_slots=num_slots,
        is_resumed=False,
    )


def job_start(name: str, slot: int = 0) -> JobStartEvent:
    progress = JobProgress(status="running", slot=slot)
    return JobStartEvent(
        round=1, job=name, progress=progress, num_steps=NUM_STEPS, slot=slot
    )


def step(name: str, number: int, loss: float = 2.0) -> StepEvent:
    progress = JobProgress(
        status="running",
        slot=0,
        step=number,
        num_tokens=100 * number,
        first_loss=3.0,
        last_loss=loss,
    )
    return StepEvent(
        round=number,
        job=name,
        progress=progress,
        num_steps=NUM_STEPS,
        loss=loss,
        grad_norm=0.5,
        learning_rate=1e-3,
        num_tokens=100,
        num_target_tokens=50,
    )


def evaluation(name: str, number: int, loss: float = 2.5) -> EvalEvent:
    progress = JobProgress(
        status="running",
        slot=0,
        step=number,
        last_eval=loss,
        last_eval_step=number,
        best_eval=loss,
        best_step=number,
    )
    return EvalEvent(
        round=number,
        job=name,
        progress=progress,
        num_steps=NUM_STEPS,
        eval_loss=loss,
        is_best=True,
    )


def sample(name: str, number: int, text: str) -> SampleEvent:
    return SampleEvent(
        round=number,
        job=name,
        progress=JobProgress(status="running", slot=0, step=number),
        num_steps=NUM_STEPS,
        number=0,
        prompt="p",
        text=text,
        finish_reason="length",
    )


def job_end(name: str, number: int, status: str = "finished") -> JobEndEvent:
    return JobEndEvent(
        round=number,
        job=name,
        progress=JobProgress(status=status, reason="a reason", step=number),
        num_steps=NUM_STEPS,
        status=status,
        reason="a reason",
    )


def window(number: int) -> WindowEvent:
    return WindowEvent(
        round=number,
        num_rounds=1,
        num_tokens=100,
        seconds=0.5,
        tokens_per_second=200.0,
        num_microbatches=1,
        fill=0.9,
        planned_ahead=False,
        planning_seconds=0.0,
        pipeline={},
    )
