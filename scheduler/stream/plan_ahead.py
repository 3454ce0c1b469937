"""Plans the next stretch of a stream in the background, while the current one runs."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxlora.scheduler.stream.state import StreamState
from jaxlora.scheduler.stream.stream import Stretch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A stretch that was asked for.

    Attributes:
        stretch: The stretch.
        ahead: Whether it was planned ahead, in the background.
        waited_seconds: Time that the caller waited for it.
    """

    stretch: Stretch
    ahead: bool
    waited_seconds: float


class PlanAhead:
    """Plans stretches in the background, before they are needed.

    A stretch is planned for the state that the stream is expected to have. If it turns
    out to have another one, because a job has joined or left, it is planned again. In
    both cases it depends only on the state, never on timing.

    The planner is a thread, not a process. Planning a stretch takes milliseconds, less
    than sending samples to a process and microbatches back. Spawned processes would
    also import the user's training script, which would need a main guard.
    """

    def __init__(self, plan: Callable[[StreamState], Stretch]):
        """Starts without a plan.

        Args:
            plan: Plans a stretch; must be deterministic.
        """
        self._plan = plan
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="plan-ahead")
        self._expected: StreamState | None = None
        self._future: Future[Stretch] | None = None

    def __enter__(self) -> "PlanAhead":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def prepare(self, state: StreamState) -> None:
        """Starts planning the stretch after a state that is expected."""
        self._drop()
        self._expected = state
        self._future = self._worker.submit(self._plan, state)

    def take(self, state: StreamState) -> Planned:
        """Returns the stretch after exactly this state.

        Raises:
            ValueError: A sample is longer than the capacity.
            RuntimeError: The packer has a bug: a tick breaks a rule.
        """
        start = time.perf_counter()
        future = self._future if state == self._expected else None
        if future is None:
            self._drop()
        stretch = self._plan(state) if future is None else future.result()
        self._future = None
        return Planned(
            stretch=stretch,
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
