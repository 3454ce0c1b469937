"""The next microbatches of a run, as a checkpoint holds them."""

import dataclasses

from jaxlora.run.saved_fields import STRICT
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.streams.state import StreamState
from jaxlora.scheduler.windows.planner import Hint


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedStream:
    """The ticks that a resumed run goes on with, so that it ends in the same bits.

    Attributes:
        rules: Describes the rules of the ticks and the jobs in the slots. The ticks are
            only of use if they are the same.
        repeated: Ticks with samples of batches that are not complete, which run again;
            the rows of each microbatch of a tick; and the slots whose samples do not
            run, as their job has left.
        state: State of the stream before the planned ticks.
        planned: Ticks that were planned and have not run.
        hint: The findings of planning them.
        shapes_from: First tick that may have a shape below the capacity.
        leaving: Slots with rows of a job that has left in ticks in flight, and the tick
            from which each is free.
        at_border: Slots whose jobs are between two of their batches here.
    """

    __pydantic_config__ = STRICT

    rules: str
    repeated: tuple[tuple[Tick, int, frozenset[int]], ...]
    state: StreamState
    planned: tuple[Tick, ...]
    hint: Hint
    shapes_from: int
    leaving: dict[int, int]
    at_border: tuple[int, ...]
