"""Values that a stream and its executor exchange; see `StagedExecutor`."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxlora.adapters.parked_slot import ReadSlot
from jaxlora.plan.stream_plan import StreamTick


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of one optimizer step of one job.

    Attributes:
        loss: Mean over the global batch's target tokens, in nats, before the step.
        grad_norm: Norm of the adapter's gradient, before clipping.
        learning_rate: Learning rate of the step.
        num_tokens: Tokens of the global batch, prompts included.
        num_target_tokens: Tokens whose loss counts.
        is_finite: Whether loss, hidden states and gradient are all finite; if not, the
            adapter was left as it was.
        metrics: Metrics of the job's objective, by name: means over the global batch.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_target_tokens: int
    is_finite: bool
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TickWork:
    """The work of a tick, or of a replica in a tick.

    Attributes:
        num_microbatches: Microbatches that ran.
        num_rows: Rows of them, padding included.
        num_tokens: Tokens in them, without padding.
    """

    num_microbatches: int = 0
    num_rows: int = 0
    num_tokens: int = 0

    def __add__(self, other: "TickWork") -> "TickWork":
        return TickWork(
            num_microbatches=self.num_microbatches + other.num_microbatches,
            num_rows=self.num_rows + other.num_rows,
            num_tokens=self.num_tokens + other.num_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """A tick that `StagedExecutor.run` has run.

    Attributes:
        steps: Results of the optimizer steps that followed it, by slot.
        work: Its work, by the number of the replica; empty if none of its samples had
            to run. Without `RunConfig.replicas`, all of it is that of number 0.
        snapshot: The states that `StagedExecutor.snapshot` has promised; None: not in
            this item.
    """

    steps: Mapping[int, StepOutcome]
    work: Mapping[int, TickWork] = dataclasses.field(default_factory=dict)
    snapshot: ReadSlot | None = None


@runtime_checkable
class TickSource(Protocol):
    """Gives the ticks of a stream, one after the other."""

    def take(self) -> StreamTick | None:
        """Returns the next tick; None if there is none, after which it is not asked."""
        ...
