"""Log lines about a data set, which are kept with its tokens.

Jobs that share the tokens of a data set get each line once, and so does a run that
takes the tokens from the cache.
"""

import collections
import logging
import threading
from collections.abc import Iterable

from jaxlora.common.counted import counted

_log = logging.getLogger(__name__)

# The level of a line, as in `logging`, and its text without the path of the data.
Note = tuple[int, str]


class Notes:
    """Logs lines about one data set, and keeps them.

    Its methods may be called from several threads.

    Attributes:
        lines: The lines so far.
    """

    def __init__(self, path: str):
        self._path = path
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.lines: list[Note] = []

    def add(self, text: str, level: int = logging.WARNING) -> None:
        """Logs one line, with the path of the data before it."""
        self.lines.append((level, text))
        log_notes(self._path, [(level, text)])

    def add_once(self, text: str) -> None:
        """Logs a warning, unless the same one was logged before."""
        with self._lock:
            if (logging.WARNING, text) not in self.lines:
                self.add(text)

    def count(self, thing: str, what: str) -> None:
        """Counts one more `thing` for which `what` holds, a clause."""
        with self._lock:
            self._counts[thing, what] += 1

    def add_counts(self) -> None:
        """Logs a line for each clause that was counted."""
        for (thing, what), num in self._counts.items():
            self.add(f"{counted(num, thing)}: {what}.")


def log_notes(path: str, lines: Iterable[Note]) -> None:
    """Logs lines about the data set at `path`."""
    for level, text in lines:
        _log.log(level, "%s: %s", path, text)
