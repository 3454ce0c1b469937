"""The next microbatches of a run, as a checkpoint holds them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from jaxlora.run.saved_fields import STRICT
from jaxlora.scheduler import Sample
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.streams.state import Position, StreamState
from jaxlora.scheduler.windows.planner import Hint

_Count = Annotated[int, Field(ge=0, lt=2**53)]
# By lane, the slot, batch, index and tokens of each sample.
SavedTick = list[list[tuple[_Count, _Count, _Count, _Count]]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedStream:
    """The ticks that a resumed run goes on with, so that it ends in the same bits.

    Attributes:
        rules: Describes the rules of the ticks and the jobs in the slots. The ticks are
            only of use if they are the same.
        repeated: Ticks with samples of batches that are not complete. They run again.
        rows: For each of them, the rows of each of its microbatches.
        dropped: For each of them, the slots whose samples do not run, as their job has
            left.
        planned: Ticks that were planned and have not run.
        tick: Number of the first of them.
        positions: Positions of the jobs before them.
        before: The ticks before them that share the pipeline with them.
        hints: What planning has found, before and after them.
        shapes_from: First tick that may have a shape below the capacity.
        leaving: Slots with rows of a job that has left in ticks in flight, and the tick
            from which each is free.
        at_border: Slots whose jobs are between two of their batches here.
    """

    __pydantic_config__ = STRICT

    rules: str
    repeated: list[SavedTick]
    rows: list[_Count]
    dropped: list[list[_Count]]
    planned: list[SavedTick]
    tick: _Count
    positions: list[Position]
    before: list[SavedTick]
    hints: tuple[Hint, Hint]
    shapes_from: _Count
    leaving: dict[_Count, _Count]
    at_border: list[_Count]

    def __post_init__(self):
        if not len(self.rows) == len(self.dropped) == len(self.repeated):
            raise ValueError("rows or dropped has other ticks than repeated.")

    @staticmethod
    def of(
        rules: str,
        repeated: Sequence[tuple[Tick, int, Collection[int]]],
        state: StreamState,
        planned: Sequence[Tick],
        hint: Hint,
        shapes_from: int,
        leaving: Mapping[int, int],
        at_border: Sequence[int],
    ) -> "SavedStream":
        """Makes the value.

        Args:
            rules: Describes rules and jobs.
            repeated: Ticks that run again, the rows of each microbatch, and the slots
                whose job has left.
            state: State of the stream before the planned ticks.
            planned: The planned ticks.
            hint: What planning them has found.
            shapes_from: See the attribute.
            leaving: See the attribute.
            at_border: See the attribute.
        """
        return SavedStream(
            rules=rules,
            repeated=[_saved(tick) for tick, _, _ in repeated],
            rows=[rows for _, rows, _ in repeated],
            dropped=[sorted(slots) for _, _, slots in repeated],
            planned=[_saved(tick) for tick in planned],
            tick=state.tick,
            positions=list(state.positions),
            before=[_saved(tick) for tick in state.before],
            hints=(state.hint, hint),
            shapes_from=shapes_from,
            leaving=dict(leaving),
            at_border=list(at_border),
        )

    @property
    def repeated_ticks(self) -> list[tuple[Tick, int, set[int]]]:
        """The ticks that run again, their rows, and the slots whose job has left."""
        each = zip(self.repeated, self.rows, self.dropped, strict=True)
        return [(_tick(saved), rows, set(slots)) for saved, rows, slots in each]

    @property
    def planned_ticks(self) -> list[Tick]:
        """The ticks that follow."""
        return [_tick(saved) for saved in self.planned]

    @property
    def state(self) -> StreamState:
        """State of the stream before the planned ticks."""
        return StreamState(
            tick=self.tick,
            positions=tuple(self.positions),
            before=tuple(_tick(saved) for saved in self.before),
            hint=self.hints[0],
        )


def _saved(tick: Tick) -> SavedTick:
    return [[(s.owner, s.batch, s.index, s.num_tokens) for s in m] for m in tick]


def _tick(saved: SavedTick) -> Tick:
    return tuple(
        tuple(
            Sample(owner=owner, batch=batch, index=index, num_tokens=num_tokens)
            for owner, batch, index, num_tokens in microbatch
        )
        for microbatch in saved
    )
