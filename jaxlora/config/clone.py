"""A job that starts as a copy of another one, with other settings."""

from collections.abc import Mapping
from typing import Any

from jaxlora.config.strict import PositiveInt, StrictModel, Wrong

# Settings that a copy may change: no saved tensor and no position in the data follows
# from them. Dropout masks are hashed from the seed and the step.
CHANGEABLE = frozenset(
    {
        "steps",
        "epochs",
        "learning_rate",
        "lr_schedule",
        "lr_schedule_args",
        "warmup_steps",
        "warmup_ratio",
        "lora_plus_ratio",
        "weight_decay",
        "max_grad_norm",
        "dropout",
        "eval_every",
        "early_stopping",
        "early_stopping_delta",
        "priority",
    }
)
_OWN = frozenset({"name", "clone_of", "continue_from"})


class CloneOf(StrictModel):
    """Where a job starts from: the whole state of another job of the run.

    Attributes:
        job: Name of the other job.
        step: Optimizer steps that it has done then; None: it is decided when the job
            joins the run.
    """

    job: str
    step: PositiveInt | None = None


def fixed_differences(parent: Any, clone: Any) -> list[str]:
    """Returns the settings that differ from the parent's and must not.

    Args:
        parent: Settings of the job that is copied.
        clone: Settings of the copy.
    """
    names = type(clone).model_fields.keys() - CHANGEABLE - _OWN
    return sorted(n for n in names if getattr(parent, n) != getattr(clone, n))


def copies_follow_their_jobs(run: Any, wrong: Wrong) -> None:
    """Adds a problem if a copy names no job whose state it can take."""
    jobs: Mapping[str, Any] = {job.name: job for job in run.jobs}
    for job in run.jobs:
        if (origin := job.clone_of) is None:
            continue
        start = f"job {job.name!r} is a copy of {origin.job!r}"
        parent = jobs.get(origin.job)
        if parent is None or parent is job:
            wrong["jobs"] = f"{start}, which is no other job of this run."
        elif origin.step is None:
            wrong["jobs"] = f"{start}: give clone_of a step, from which it goes on."
        elif found := fixed_differences(parent, job):
            wrong["jobs"] = (
                f"{start}, and {', '.join(found)} cannot differ. A copy may change "
                f"{', '.join(sorted(CHANGEABLE))}."
            )
