"""The progress of a job, and what else displays and other processes see of it."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jaxlora.run.saved_fields import STRICT, JobName

Status = Literal[
    "waiting", "running", "paused", "finished", "stopped", "stopped early", "failed"
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """State of a job that a checkpoint keeps, besides the weights.

    Attributes:
        status: Whether the job waits, runs, is paused or has ended, and how it ended.
        reason: Text that says why the job is paused or has ended.
        stopped_by: Rule of the sweep that has ended the job; None if none has.
        slot: Slot of the job while it runs.
        step: Optimizer steps done; the position in the data follows from it.
        num_tokens: Tokens of the samples trained on, prompts included.
        num_target_tokens: Tokens of these whose loss counts.
        first_loss: Training loss of the first step, in nats per target token.
        last_loss: Training loss of the latest step.
        first_eval: Evaluation loss before the first step.
        last_eval: Latest evaluation loss.
        last_eval_sets: Latest loss on each held-out data set, if there are several.
        last_eval_step: Optimizer steps done at `last_eval`.
        best_eval: Lowest evaluation loss; if a sweep has a metric of answers, the
            lowest one at the best value of the metric.
        best_step: Optimizer steps done at `best_eval`.
        last_metric: Latest value of the sweep's metric of answers; None: it has none.
        best_metric: Best value of it.
        evals_without_gain: Evaluations since the last improvement that early stopping
            counted as one.
    """

    status: Status = "waiting"
    reason: str = ""
    stopped_by: str | None = None
    slot: int | None = None
    step: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval: float | None = None
    last_eval: float | None = None
    last_eval_sets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    last_eval_step: int | None = None
    best_eval: float | None = None
    best_step: int | None = None
    last_metric: float | None = None
    best_metric: float | None = None
    evals_without_gain: int = 0

    def exported_step(self, *, keep_best: bool) -> int | None:
        """Returns the optimizer steps of the weights that the job exports at its end.

        Args:
            keep_best: Whether it exports those of the best evaluation.

        Returns:
            The steps; None: it exports none.
        """
        if keep_best:
            return self.best_step
        has_begun = self.step > 0 or self.first_eval is not None
        return self.step if has_begun and self.status != "failed" else None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, for any reason."""
        return self.status not in ("waiting", "running", "paused")

    @property
    def has_state(self) -> bool:
        """Whether the job has begun and not ended; a checkpoint has its state."""
        return self.status in ("running", "paused")

    def shown_status(self, *, is_live: bool) -> str:
        """Returns the status for users: without a process, no job is running.

        Args:
            is_live: Whether a process trains the run.
        """
        is_interrupted = self.status == "running" and not is_live
        return "interrupted" if is_interrupted else self.status


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """State of a job.

    Attributes:
        name: Name of the job.
        rank: Largest LoRA rank of its modules, as the run file has it.
        num_modules: Number of modules that it adapts.
        num_steps: Optimizer steps in all.
        batch_tokens: Mean number of tokens of a global batch.
        progress: Its status, slot, steps and losses.
    """

    __pydantic_config__ = STRICT

    name: JobName
    rank: int
    num_modules: int
    num_steps: int
    batch_tokens: float
    progress: JobProgress

    @property
    def done_tokens(self) -> float:
        """Tokens of the optimizer steps done, by the mean size of a global batch."""
        return self.progress.step * self.batch_tokens

    @property
    def total_tokens(self) -> float:
        """Tokens of all steps; a job that has ended does no further ones."""
        steps = self.progress.step if self.progress.is_over else self.num_steps
        return steps * self.batch_tokens
