"""Measures what a run spends its time on, for a line of the log at its end."""

import collections
import contextlib
import time
from collections.abc import Iterator

_OTHER = "other"


class Stopwatch:
    """Divides the time of the thread that trains among the things that it does.

    A block within another one counts for itself only, so the seconds add up to the time
    since the object was made.
    """

    def __init__(self):
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._open, self._since = [_OTHER], time.perf_counter()

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Counts the time of the block."""
        self._note()
        self._open.append(what)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    def _note(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Returns the seconds so far by what they were spent on, the most first."""
        self._note()
        return dict(sorted(self._seconds.items(), key=lambda one: -one[1]))

    def __str__(self) -> str:
        shown = (one for one in self.seconds().items() if one[1] >= 0.05)
        return ", ".join(f"{what} {spent:.1f}" for what, spent in shown)
