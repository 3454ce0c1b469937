"""Plans the next window in the background while the current one runs."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.scheduler.check import require_legal
from jaxlora.scheduler.lanes import ONE_LANE, Lanes
from jaxlora.scheduler.types import Sample, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The schedule of a window.

    Attributes:
        schedule: A legal schedule.
        ahead: Whether it was planned ahead, in the background.
        waited_seconds: Time that the caller waited for it.
    """

    schedule: Schedule
    ahead: bool
    waited_seconds: float


class PlanAhead:
    """Plans windows in the background, before they are needed.

    A window is planned for the samples that it is expected to have. If it turns out to
    have other samples, because a job has joined or ended, it is planned again. In both
    cases the schedule depends only on the samples of the window, never on timing.

    The planner is a thread, not a process. Planning a window takes milliseconds, less
    than sending samples to a process and microbatches back. Spawned processes would
    also import the user's training script, which would need a main guard.
    """

    def __init__(
        self, pack: Callable[[Sequence[Sample]], Schedule], lanes: Lanes = ONE_LANE
    ):
        """Starts without a plan.

        Args:
            pack: Makes the schedule of a window; must be deterministic.
            lanes: The lanes, used to check schedules.
        """
        self._pack, self._lanes = pack, lanes
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
        """Returns the schedule of exactly these samples.

        Raises:
            ValueError: A sample is longer than the capacity.
            RuntimeError: The packer's schedule violates a rule.
        """
        start = time.perf_counter()
        samples = tuple(samples)
        future = self._future if samples == self._expected else None
        if future is None:
            self._drop()
        schedule = self._plan(samples) if future is None else future.result()
        self._future = None
        return Planned(
            schedule=schedule,
            ahead=future is not None,
            waited_seconds=time.perf_counter() - start,
        )

    def close(self) -> None:
        """Ends the thread without waiting for a plan in progress."""
        self._drop()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        if self._future is not None:
            self._future.cancel()
        self._future = None

    def _plan(self, samples: tuple[Sample, ...]) -> Schedule:
        schedule = self._pack(samples)
        require_legal(schedule, samples, self._lanes)
        return schedule
