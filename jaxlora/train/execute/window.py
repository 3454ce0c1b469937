"""Counts the work of a window, and reports it."""

from typing import Any

from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.run.events import WindowEvent
from jaxlora.scheduler import Schedule
from jaxlora.train.execute.executor import Outcomes
from jaxlora.train.execute.feed import TickWork


class Window:
    """The work of some rounds.

    Attributes:
        num_rounds: Rounds that have ended.
        end: Time at which its last results came, where the next window begins: the work
            that follows may be done on the device before the window is reported.
    """

    def __init__(self, begin: float):
        """Begins a window; its times are those of `JobLifecycle.clock`."""
        self.num_rounds = 0
        self._begin = self.end = begin
        self._by_replica: dict[int, TickWork] = {}

    def add(self, outcomes: Outcomes, now: float) -> None:
        """Counts an item of the executor."""
        self.end = now
        for number, work in outcomes.work.items():
            self._by_replica[number] = self._by_replica.get(number, TickWork()) + work

    @property
    def work(self) -> TickWork:
        """The work of all replicas."""
        return sum(self._by_replica.values(), TickWork())

    @property
    def seconds(self) -> float:
        """Time of training."""
        return self.end - self._begin

    def event(
        self, number: int, plan: RunPlan, ticks: StreamPlan, num_changes: int
    ) -> WindowEvent:
        """Returns the figures of the window.

        Args:
            number: Rounds done in the run.
            plan: The plan of the run.
            ticks: Its microbatches; `forget_figures` follows.
            num_changes: How many jobs have started in slots, or left them.
        """
        seconds, work = self.seconds, self.work
        recent = Schedule(
            microbatches=tuple(m for tick in ticks.recent for m in tick),
            limits=plan.config.limits,
        )
        predicted = plan.seconds(recent, is_part=True, num_changes=num_changes)
        return WindowEvent(
            round=number,
            num_rounds=self.num_rounds,
            num_tokens=work.num_tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(work.num_tokens / seconds, 1),
            num_microbatches=work.num_microbatches,
            fill=_fill(work),
            planned_ahead=ticks.num_ahead == ticks.num_stretches,
            planning_seconds=round(ticks.waited_seconds, 4),
            pipeline=plan.pipeline_figures(recent),
            predicted_seconds=predicted,
            replicas=self._replicas(plan),
        )

    def _replicas(self, plan: RunPlan) -> tuple[dict[str, Any], ...]:
        """Returns the work of each replica; nothing if replicas are alike."""
        return tuple(
            {
                "replica": number + 1,
                "microbatch_tokens": replica.capacity,
                "num_microbatches": work.num_microbatches,
                "num_tokens": work.num_tokens,
                "fill": _fill(work),
            }
            for number, replica in enumerate(plan.lanes.replicas)
            for work in [self._by_replica.get(number, TickWork())]
        )


def _fill(work: TickWork) -> float:
    """Returns the share of the rows that hold tokens."""
    return round(work.num_tokens / max(1, work.num_rows), 4)
