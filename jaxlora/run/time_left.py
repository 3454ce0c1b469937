"""Estimates the time until all jobs of a run have ended."""

import time
from collections.abc import Mapping


class TimeLeft:
    """An estimate from the windows that this process has run, except the first.

    Programs are compiled in the first window, and all jobs are evaluated before it. At
    the end of a window every global batch is complete, so that the tokens done are
    known exactly; within one, the estimate only counts down.
    """

    def __init__(self):
        self._began: float | None = None  # end of the first window
        self._before: dict[str, float] = {}  # tokens done by then, by job
        self._estimated, self._seconds = 0.0, -1.0

    def note_job(self, name: str, done: float) -> None:
        """Takes up a job that joins with some tokens done in another run."""
        self._before[name] = done

    def note_window(self, done: Mapping[str, float], left: float) -> None:
        """Makes an estimate at the end of a window.

        Args:
            done: Tokens that each job has done, by name.
            left: Tokens that are left to do, of all jobs.
        """
        now = time.perf_counter()
        if self._began is None:
            self._began, self._before = now, dict(done)
            return
        tokens = sum(count - self._before[name] for name, count in done.items())
        if tokens > 0:
            self._estimated, self._seconds = now, (now - self._began) * left / tokens

    def seconds(self) -> float | None:
        """Returns the estimated time left in seconds; None before the second window."""
        if self._seconds < 0:
            return None
        return max(0.0, self._seconds - (time.perf_counter() - self._estimated))
