"""Packs the ticks of a window, each one before its turn."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxlora.data.pack import JobBatch, PackedBatch, pack_tick
from jaxlora.scheduler import Limits, Sample
from jaxlora.scheduler.lanes import Tick
from jaxlora.train.execute.executor import Window


class Feed:
    """The ticks of a window, without the samples of released slots."""

    def __init__(
        self,
        window: Window,
        ticks: Sequence[Tick],
        limits: Limits,
        objectives: Sequence[str],
        upload: Callable[[PackedBatch], Any],
    ):
        """Starts before the first tick.

        Args:
            window: The window.
            ticks: Its microbatches, possibly split further, by tick.
            limits: Limits of a microbatch.
            objectives: Objectives of the run.
            upload: Starts the upload of the arrays of a tick; returns what `take` does.
        """
        self._jobs, self._ticks = window.jobs, ticks
        self._limits, self._upload = limits, upload
        self._objectives = objectives
        self._remaining = Counter(
            (s.owner, s.batch) for tick in ticks for m in tick for s in m
        )
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._ready: tuple[int, tuple[Sample, ...], Any] | None = None
        self._num_taken = 0
        self._released: set[int] = set()

    def _kept(self, number: int) -> tuple[Sample, ...]:
        """Returns the samples of a tick without those of released slots."""
        return tuple(
            s for m in self._ticks[number] for s in m if s.owner not in self._released
        )

    def prepare(self, number: int) -> None:
        """Packs a tick before its turn; does nothing after the last one."""
        if number < len(self._ticks):
            kept = self._kept(number)
            self._ready = number, kept, self._pack(number, kept)

    def take(self, number: int) -> tuple[tuple[Sample, ...], Any]:
        """Returns the samples of a tick and its arrays; None if none are left.

        If a slot in it was released since `prepare`, the arrays are packed again.
        Otherwise they would leave gradients in that slot.
        """
        kept, ready = self._kept(number), self._ready
        if ready is not None and ready[:2] == (number, kept):
            packed = ready[2]
        else:
            packed = self._pack(number, kept)
        self._num_taken = number + 1
        return kept, packed

    def _pack(self, number: int, kept: tuple[Sample, ...]) -> Any:
        if not kept:
            return None
        batches = {}
        mine = {(s.owner, s.batch) for s in kept}
        assert len(mine) == len({s.owner for s in kept}), "two batches of a job"
        for slot, step in mine:
            if (slot, step) not in self._batches:
                self._batches[slot, step] = self._jobs[slot].batch(slot, step)
            batches[slot] = self._batches[slot, step]
        # Rows of released slots become padding, so no other rows move.
        tick = self._ticks[number]
        return self._upload(pack_tick(tick, batches, self._limits, self._objectives))

    def complete(self, samples: Sequence[Sample]) -> dict[int, JobBatch]:
        """Returns the global batches that a tick completes, by slot.

        Slots that were released since the tick was taken are left out.
        """
        out = {}
        for s in samples:
            self._remaining[s.owner, s.batch] -= 1
            if not self._remaining[s.owner, s.batch] and s.owner not in self._released:
                out[s.owner] = self._batches.pop((s.owner, s.batch))
        return out

    def release(self, slot: int) -> int:
        """Leaves out a slot's samples from now on; returns how many there are."""
        self._released.add(slot)
        rest = self._ticks[self._num_taken :]
        return sum(s.owner == slot for tick in rest for m in tick for s in m)
