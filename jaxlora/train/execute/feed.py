"""Packs the ticks of a stream, each one before its turn."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlora.data.pack import JobBatch
from jaxlora.plan.stream_plan import StreamTick
from jaxlora.scheduler import Sample
from jaxlora.scheduler.lanes import Tick
from jaxlora.train.execute.executor import TickSource
from jaxlora.train.job_state import JobState


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FedTick:
    """A tick for the devices: a tick of the plan, or a part of one.

    Attributes:
        tick: Its microbatches.
        of: The tick of the plan, which knows the slots whose samples do not run.
    """

    tick: Tick
    of: StreamTick

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples that run."""
        if self.of.is_held:
            return ()
        dropped = self.of.dropped
        return tuple(s for m in self.tick for s in m if s.owner not in dropped)


class Feed:
    """The ticks of a stream as arrays, without the samples of jobs that have left."""

    def __init__(
        self,
        source: TickSource,
        jobs: Mapping[int, JobState],
        *,
        split: Callable[[StreamTick], Sequence[Tick]],
        pack: Callable[[FedTick, Mapping[int, JobBatch]], Any],
    ):
        """Takes no tick yet.

        Args:
            source: The ticks.
            jobs: The job in each slot, at any time.
            split: Splits a tick that the devices cannot run at once.
            pack: Makes the arrays of a tick, given the global batch of each slot whose
                samples run, and starts their upload; returns what `take` does.
        """
        self._source, self._jobs = source, jobs
        self._split, self._pack_tick = split, pack
        self._fetched: deque[FedTick] = deque()
        self._num_taken = 0
        # The samples of the next tick for which it was packed, and its arrays.
        self._ready: tuple[tuple[Sample, ...], Any] | None = None
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._remaining: dict[tuple[int, int], int] = {}  # groups to run, likewise
        self._begun: set[tuple[int, int]] = set()  # batches in ticks that were taken

    def has_tick(self, number: int) -> bool:
        """Whether there is a tick of this number, counted from the start."""
        while self._num_taken + len(self._fetched) <= number:
            of = self._source.take()
            if of is None:
                return False
            if of.parts is None:
                of.parts = tuple(self._split(of))
            self._fetched += [FedTick(tick=part, of=of) for part in of.parts]
        return True

    def prepare(self, number: int) -> None:
        """Packs the next tick before its turn; does nothing if there is none."""
        if self.has_tick(number):
            assert number == self._num_taken
            fed = self._fetched[0]
            self._ready = fed.samples, self._pack(fed, fed.samples)

    def take(self) -> tuple[FedTick, Any]:
        """Returns the next tick and its arrays; None if none of its samples run.

        If a job has left since `prepare`, the arrays are packed again. Otherwise they
        would leave gradients in its slot.
        """
        fed, ready = self._fetched.popleft(), self._ready
        self._num_taken += 1
        self._ready = None
        if ready is not None and ready[0] == fed.samples:
            return fed, ready[1]
        return fed, self._pack(fed, fed.samples)

    def _pack(self, fed: FedTick, samples: tuple[Sample, ...]) -> Any:
        if not samples:
            return None
        batches = {}
        mine = {(s.owner, s.batch) for s in samples}
        assert len(mine) == len({s.owner for s in samples}), "two batches of a job"
        for slot, step in mine:
            if (slot, step) not in self._batches:
                batch = self._jobs[slot].batch(slot, step)
                self._batches[slot, step] = batch
                self._remaining[slot, step] = batch.num_groups
            batches[slot] = self._batches[slot, step]
        # Rows of jobs that have left become padding, so no other rows move.
        return self._pack_tick(fed, batches)

    def begin(self, fed: FedTick) -> dict[int, JobBatch]:
        """Returns the samples of the baselines of batches that begin, by slot.

        Args:
            fed: A tick that was taken.
        """
        new = {(s.owner, s.batch) for s in fed.samples} - self._begun
        self._begun |= new
        found = {
            slot: self._jobs[slot].baseline_batch(slot, self._batches[slot, step])
            for slot, step in new
        }
        return {slot: batch for slot, batch in found.items() if batch is not None}

    def complete(self, fed: FedTick) -> dict[int, JobBatch]:
        """Returns the global batches that a tick completes, by slot."""
        out = {}
        for s in fed.samples:
            self._remaining[s.owner, s.batch] -= 1
            if not self._remaining[s.owner, s.batch]:
                del self._remaining[s.owner, s.batch]
                self._begun.discard((s.owner, s.batch))
                out[s.owner] = self._batches.pop((s.owner, s.batch))
        return out

    def forget(self, slot: int) -> None:
        """Forgets the batches of a job that has left its slot."""
        self._begun = {key for key in self._begun if key[0] != slot}
        for kept in (self._batches, self._remaining):
            for key in [key for key in kept if key[0] == slot]:
                del kept[key]
