"""Draws the first weights of jobs in threads, before their turn to start."""

from collections.abc import Sequence
from concurrent.futures import Future

from jaxlora.adapters.staged_slots import Padded, StagedSlots
from jaxlora.common.background import in_background
from jaxlora.train.job_state import JobState

# Bounds on the weights that wait for their slots: the number of their jobs, and their
# bytes on the host. The weights of one job are always allowed.
_MOST_JOBS, _MOST_BYTES = 8, 1 << 30


class DrawAhead:
    """The first weights of the jobs that start next, padded for the slots.

    They are the same as if a job drew them when it starts, because the streams of its
    random numbers are its own.
    """

    def __init__(self, slots: StagedSlots):
        """Draws nothing yet; the weights are for these slots."""
        self._slots = slots
        self._drawn: dict[str, Future[Padded]] = {}

    def begin(self, jobs: Sequence[JobState]) -> None:
        """Begins to draw the weights of some jobs, in this order, while there is room.

        Weights that programs make are not drawn ahead, because programs on several
        devices must start in the same order on all. Weights of other jobs are dropped.

        Args:
            jobs: The jobs that start next, from their first weights.
        """
        # Each has its own tensors, and the rows into which they are padded.
        room = max(1, _MOST_BYTES // max(1, 2 * self._slots.row_bytes))
        before, self._drawn = self._drawn, {}
        for job in jobs[: min(room, _MOST_JOBS)]:
            if job.is_drawn_alone:
                self._drawn[job.name] = before.get(job.name) or self._draw(job)

    def take(self, job: JobState) -> Padded:
        """Returns the first weights of a job that starts now."""
        if job.name in self._drawn:
            return self._drawn.pop(job.name).result()
        return self._slots.pad(job.start)

    def _draw(self, job: JobState) -> Future[Padded]:
        return in_background(lambda: self._slots.pad(job.start))
