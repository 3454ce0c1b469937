"""The next window's schedule, made in the background while this one runs."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.types import Sample, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A schedule, and how it came about.

    Attributes:
        schedule: It keeps all rules.
        ahead: Whether it was planned ahead, in the background.
        waited_seconds: What taking it took.
    """

    schedule: Schedule
    ahead: bool
    waited_seconds: float


class PlanAhead:
    """Plans windows before they are needed; what comes out never depends on when.

    A window is planned ahead for the samples that it is expected to have. If it then
    has others, because a job has joined or ended, it is planned anew. Either way its
    schedule is `pack` of its samples and of nothing else.

    The planner is a thread, not a process: a window takes milliseconds, while samples
    would have to be sent to a process and microbatches back, and a script that trains
    would have to guard its entry, as spawned processes import it.

    Args:
        pack: Makes the schedule of a window; deterministic.
        distance: The pipeline's, for the check.
    """

    def __init__(
        self, pack: Callable[[Sequence[Sample]], Schedule], *, distance: int = 1
    ):
        self._pack, self._distance = pack, distance
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="plan-ahead")
        self._expected: tuple[Sample, ...] = ()
        self._future: Future[Schedule] | None = None

    def __enter__(self) -> "PlanAhead":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Starts planning a window that is expected to have these samples."""
        self._drop()
        self._expected = tuple(samples)
        self._future = self._worker.submit(self._plan, self._expected)

    def take(self, samples: Sequence[Sample]) -> Planned:
        """The schedule of exactly these samples.

        Raises:
            ValueError: A sample is over the capacity.
            RuntimeError: The packer broke a rule.
        """
        began = time.perf_counter()
        samples = tuple(samples)
        future = self._future if samples == self._expected else None
        if future is None:
            self._drop()
        schedule = self._plan(samples) if future is None else future.result()
        self._future = None
        return Planned(
            schedule=schedule,
            ahead=future is not None,
            waited_seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Ends the thread, without waiting for what it plans."""
        self._drop()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        if self._future is not None:
            self._future.cancel()
        self._future = None

    def _plan(self, samples: tuple[Sample, ...]) -> Schedule:
        schedule = self._pack(samples)
        require_legal(schedule, samples, distance=self._distance)
        return schedule
