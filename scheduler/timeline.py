"""The passes of a pipeline over time, simulated or measured."""

import dataclasses
from typing import Literal

from jaxlora.scheduler.simulate import Simulation

Kind = Literal["F", "B", "step"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedPass:
    """One piece of work of a stage.

    Attributes:
        stage: Number of the stage.
        kind: "F" for a forward pass, "B" for a backward pass, "step" for an optimizer
            step.
        tick: Number of the tick. For an optimizer step, this is the tick that completes
            the batch.
        start, end: Start and end of the work.
    """

    stage: int
    kind: Kind
    tick: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The work of all stages of a pipeline, in any order.

    Attributes:
        passes: The work. On one stage, no two of them overlap.
        num_stages: Number of stages.
    """

    passes: tuple[TimedPass, ...]
    num_stages: int

    def __post_init__(self):
        for p in self.passes:
            if not 0 <= p.stage < self.num_stages or p.end < p.start:
                raise ValueError(
                    f"{p} ends before it starts, or is on none of the "
                    f"{self.num_stages} stages."
                )

    @classmethod
    def simulated(cls, simulation: Simulation) -> "Timeline":
        """Returns the timeline of a simulation, without its no-ops."""
        kinds: tuple[tuple[Kind, list, list], ...] = (
            ("F", simulation.forward_start.tolist(), simulation.forward_end.tolist()),
            ("B", simulation.backward_start.tolist(), simulation.backward_end.tolist()),
        )
        passes = tuple(
            TimedPass(stage=stage, kind=kind, tick=tick, start=left, end=right)
            for kind, starts, ends in kinds
            for stage, of_stage in enumerate(zip(starts, ends, strict=True))
            for tick, (left, right) in enumerate(zip(*of_stage, strict=True))
            if right > left
        )
        return cls(passes=passes, num_stages=len(simulation.forward_start))

    @property
    def start(self) -> float:
        """Start of the first pass; 0 if there is none."""
        return min((p.start for p in self.passes), default=0.0)

    @property
    def makespan(self) -> float:
        """Time from the start of the first pass to the end of the last one."""
        return max((p.end for p in self.passes), default=0.0) - self.start

    @property
    def bubble(self) -> float:
        """Fraction of the time of all stages in which nothing runs."""
        busy = sum(p.end - p.start for p in self.passes)
        total = self.num_stages * self.makespan
        return 1 - busy / total if total else 0.0
