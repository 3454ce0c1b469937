"""Lines for the log that a value carries, so that making it logs nothing."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

_MOST_NAMES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line for the log.

    Attributes:
        text: The line, without the job's name.
        is_warning: Whether its reader should act on it.
        job: Name of the job that the line is about; empty: it is about the run.
    """

    text: str
    is_warning: bool = False
    job: str = ""


def log_notes(notes: Iterable[Note]) -> None:
    """Logs each note in one line; what holds for several jobs is one line, too.

    The configurations of a sweep, for example, have the same data.
    """
    jobs: dict[tuple[str, bool], list[str]] = {}
    for note in notes:
        jobs.setdefault((note.text, note.is_warning), []).append(note.job)
    for (text, is_warning), names in jobs.items():
        about = _list_some([name for name in names if name])
        level = logging.WARNING if is_warning else logging.INFO
        logger.log(level, "%s", f"{about}: {text}" if about else text)


def _list_some(names: Sequence[str]) -> str:
    """Lists names, in the order given; of many, the first ones and how many more."""
    if len(names) <= _MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
