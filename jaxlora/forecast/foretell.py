"""Foretells the microbatches of a run in which no job ends early."""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from jaxlora.plan.job.job_slots import JobPosition, assign_slots
from jaxlora.plan.job.prepared_job import PreparedJob
from jaxlora.plan.mesh.candidates import first_positions
from jaxlora.plan.run_plan import RunPlan
from jaxlora.plan.stream_plan import StreamPlan
from jaxlora.scheduler import Schedule
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.streams.state import Position


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """The microbatches of a run, which name their jobs by number.

    Attributes:
        schedule: The microbatches.
        num_rows: Rows of those that are not empty, padding included.
    """

    schedule: Schedule
    num_rows: int


def foretell(plan: RunPlan, jobs: Sequence[PreparedJob]) -> Foretold:
    """Returns the microbatches of a run.

    Args:
        plan: The plan of the run.
        jobs: Its jobs.
    """
    with StreamPlan(plan.rules, lambda job, step: jobs[job].lengths(step)) as stream:
        course = list(_Course(plan, jobs, stream).ticks())
    ticks = [tick for tick, _ in course]
    while not any(ticks[-1]):
        ticks.pop()
    if plan.lanes.pipeline.distance == 1:  # a no-op takes no time
        ticks = [tick for tick in ticks if any(tick)]
    microbatches = tuple(microbatch for tick in ticks for microbatch in tick)
    return Foretold(
        schedule=Schedule(microbatches=microbatches, limits=plan.config.limits),
        num_rows=sum(_num_rows(plan, tick, rows) for tick, rows in course),
    )


def _num_rows(plan: RunPlan, tick: Tick, rows: int) -> int:
    """Returns the rows of the microbatches with samples of a tick of this shape."""
    each = [lane.capacity for lane in plan.lanes.unlike] or [rows] * len(tick)
    return sum(n for n, microbatch in zip(each, tick, strict=True) if microbatch)


class _Course:
    """The course of a run: which job has which slot, and when."""

    def __init__(self, plan: RunPlan, jobs: Sequence[PreparedJob], stream: StreamPlan):
        self._plan, self._jobs, self._stream = plan, jobs, stream
        # Those that have not ended.
        self._left = {p.job: p for p in first_positions(jobs)}
        self._in_slot: dict[int, int] = {}  # job by slot
        self._steps: Counter[int] = Counter()  # optimizer steps done, by slot
        self._done: Counter[tuple[int, int]] = Counter()  # samples, by slot and batch
        # Ticks that are taken after a tick before the trainer knows of its steps: W
        # until they are reported, and W that are in flight and prepared by then.
        pipeline = plan.lanes.pipeline
        self._lag = 2 * (pipeline.in_flight or pipeline.num_stages)

    def ticks(self) -> Iterator[tuple[Tick, int]]:
        """Yields the ticks, whose samples name their job by number, and their rows."""
        stepping: deque[tuple[int, int]] = deque()  # the tick of a report, and a slot
        self._fill_slots()
        number = 0
        while (taken := self._stream.take()) is not None:
            yield self._renamed(taken.tick), taken.rows
            stepping += [(number + self._lag, s) for s in self._completed(taken.tick)]
            ended = []
            while stepping and stepping[0][0] <= number:
                slot = stepping.popleft()[1]
                self._stream.note_step(slot)
                self._steps[slot] += 1
                if self._steps[slot] == self._jobs[self._in_slot[slot]].num_steps:
                    ended.append(slot)
            if ended:
                self._leave(ended)
            number += 1

    def _completed(self, tick: Tick) -> list[int]:
        """Returns the slots whose batch is complete with a tick."""
        touched = Counter((s.owner, s.batch) for m in tick for s in m)
        self._done.update(touched)
        complete = []
        for slot, batch in sorted(touched):
            job = self._jobs[self._in_slot[slot]]
            if self._done[slot, batch] == len(job.lengths(batch)):
                del self._done[slot, batch]
                complete.append(slot)
        return complete

    def _leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._left[self._in_slot.pop(slot)], self._steps[slot]
            self._stream.drop(slot)
        self._fill_slots()

    def _fill_slots(self) -> None:
        positions: list[JobPosition] = assign_slots(
            list(self._left.values()),
            self._plan.num_slots,
            preempts=self._plan.config.preempt,
        )
        for position in positions:
            slot = position.slot
            if slot is None or slot in self._in_slot:
                continue
            self._left[position.job], self._in_slot[slot] = position, position.job
            self._steps[slot] = position.step
            self._stream.start(
                Position(
                    job=position.job,
                    owner=slot,
                    batch=position.step,
                    num_batches=position.num_steps,
                    batch_tokens=position.batch_tokens,
                )
            )

    def _renamed(self, tick: Tick) -> Tick:
        """Replaces the slots of samples by the numbers of the jobs in them."""
        jobs = self._in_slot
        return tuple(
            tuple(dataclasses.replace(s, owner=jobs[s.owner]) for s in microbatch)
            for microbatch in tick
        )
