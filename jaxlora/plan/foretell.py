"""Foretells the microbatches of a run in which no job ends early."""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from jaxlora.scheduler import Schedule
from jaxlora.scheduler.lanes import Tick
from jaxlora.scheduler.stream import Position
from jaxlora.train.plan.job_slots import JobPosition, assign_slots
from jaxlora.train.plan.prepared_job import PreparedJob
from jaxlora.train.plan.run_plan import RunPlan, first_positions
from jaxlora.train.plan.stream_plan import StreamPlan


def foretell(plan: RunPlan, jobs: Sequence[PreparedJob]) -> Schedule:
    """Returns the microbatches of a run, which name their jobs by number.

    Args:
        plan: The plan of the run.
        jobs: Its jobs.
    """
    with StreamPlan(plan.rules, lambda job, step: jobs[job].lengths(step)) as stream:
        ticks = list(_Course(plan, jobs, stream).ticks())
    microbatches = tuple(microbatch for tick in ticks for microbatch in tick)
    return Schedule(microbatches=microbatches, limits=plan.config.limits)


class _Course:
    """The course of a run: which job has which slot, and when."""

    def __init__(self, plan: RunPlan, jobs: Sequence[PreparedJob], stream: StreamPlan):
        self._plan, self._jobs, self._stream = plan, jobs, stream
        self._left = {p.job: p for p in first_positions(jobs)}  # that have not ended
        self._in_slot: dict[int, int] = {}  # job by slot
        self._done: Counter[int] = Counter()  # samples of the last batch, by slot
        # Ticks that are taken after a tick before the trainer knows of its steps: W
        # until they are reported, and W that are in flight and prepared by then.
        self._lag = 2 * (
            plan.lanes.pipeline.in_flight or plan.lanes.pipeline.num_stages
        )

    def ticks(self) -> Iterator[Tick]:
        """Yields the ticks, whose samples name their job by its number."""
        ending: deque[tuple[int, int]] = deque()  # tick at which a slot is left
        self._fill_slots()
        number = 0
        while True:
            taken = self._stream.take()
            if taken is None:
                if not ending:
                    return
                number = ending[0][0]
            else:
                yield self._renamed(taken.tick)
                ending += [(number + self._lag, s) for s in self._completed(taken.tick)]
            ended = []
            while ending and ending[0][0] <= number:
                ended.append(ending.popleft()[1])
            if ended:
                self._leave(ended)
            number += taken is not None

    def _completed(self, tick: Tick) -> list[int]:
        """Returns the slots whose jobs have no samples after a tick."""
        last = {
            slot: self._jobs[job].num_steps - 1 for slot, job in self._in_slot.items()
        }
        touched = Counter(
            s.owner for m in tick for s in m if s.batch == last.get(s.owner)
        )
        self._done.update(touched)
        return [
            slot
            for slot in sorted(touched)
            if self._done[slot]
            == len(self._jobs[self._in_slot[slot]].lengths(last[slot]))
        ]

    def _leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._left[self._in_slot.pop(slot)], self._done[slot]
            self._stream.drop(slot)
        self._fill_slots()

    def _fill_slots(self) -> None:
        positions: list[JobPosition] = assign_slots(
            list(self._left.values()),
            self._plan.num_slots,
            preempts=self._plan.config.preempt,
            lanes=self._plan.lanes,
        )
        for position in positions:
            slot = position.slot
            if slot is None or slot in self._in_slot:
                continue
            self._left[position.job], self._in_slot[slot] = position, position.job
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
