"""Lines for the log that a value carries, so that making it logs nothing."""

import dataclasses
import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line for the log.

    Attributes:
        text: The line.
        is_warning: Whether its reader should act on it.
    """

    text: str
    is_warning: bool = False


def log_notes(notes: Iterable[Note]) -> None:
    """Logs each note in one line."""
    for note in notes:
        level = logging.WARNING if note.is_warning else logging.INFO
        logger.log(level, "%s", note.text)
