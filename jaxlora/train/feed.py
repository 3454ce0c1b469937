"""Packs the microbatches of a window, each one before its turn."""

from collections import Counter
from collections.abc import Sequence

from jaxlora.data.pack import JobBatch, PackedBatch, pack_microbatch
from jaxlora.scheduler import Limits, Microbatch
from jaxlora.train.executor import Window


class Feed:
    """The microbatches of a window, without the samples of released slots."""

    def __init__(
        self, window: Window, microbatches: Sequence[Microbatch], limits: Limits
    ):
        """Starts before the first microbatch.

        Args:
            window: The window.
            microbatches: Its microbatches, possibly split further.
            limits: Limits of a microbatch.
        """
        self._runs, self._microbatches = window.runs, microbatches
        self._limits = limits
        self._remaining = Counter((s.job, s.batch) for m in microbatches for s in m)
        self._batches: dict[tuple[int, int], JobBatch] = {}  # by slot and step
        self._ready: tuple[int, Microbatch, PackedBatch | None] | None = None
        self._num_taken = 0
        self._released: set[int] = set()

    def _kept(self, number: int) -> Microbatch:
        """Returns a microbatch without the samples of released slots."""
        return tuple(
            s for s in self._microbatches[number] if s.job not in self._released
        )

    def prepare(self, number: int) -> None:
        """Packs a microbatch before its turn; does nothing after the last one."""
        if number < len(self._microbatches):
            kept = self._kept(number)
            self._ready = number, kept, self._pack(number, kept)

    def take(self, number: int) -> tuple[Microbatch, PackedBatch | None]:
        """Returns the samples of a microbatch and its arrays; None if none are left.

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

    def _pack(self, number: int, kept: Microbatch) -> PackedBatch | None:
        if not kept:
            return None
        batches = {}
        mine = {(s.job, s.batch) for s in kept}
        assert len(mine) == len({s.job for s in kept}), "two batches of a job"
        for slot, step in mine:
            if (slot, step) not in self._batches:
                self._batches[slot, step] = self._runs[slot].batch(slot, step)
            batches[slot] = self._batches[slot, step]
        # Rows of released slots become padding, so no other rows move.
        whole = self._microbatches[number]
        return pack_microbatch(whole, batches, self._limits)

    def complete(self, microbatch: Microbatch) -> dict[int, JobBatch]:
        """Returns the global batches that a microbatch completes, by slot.

        Slots that were released since the microbatch was taken are left out.
        """
        out = {}
        for s in microbatch:
            self._remaining[s.job, s.batch] -= 1
            if not self._remaining[s.job, s.batch] and s.job not in self._released:
                out[s.job] = self._batches.pop((s.job, s.batch))
        return out

    def release(self, slot: int) -> int:
        """Leaves out a slot's samples from now on; returns how many there are."""
        self._released.add(slot)
        rest = self._microbatches[self._num_taken :]
        return sum(s.job == slot for microbatch in rest for s in microbatch)
