"""Requests to the process that renders templates, and its limits.

This is apart from `template_worker`, so that only that process imports Jinja.
"""

import dataclasses
import datetime
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

# Exit code of a child that has run out of memory.
OUT_OF_MEMORY = 3


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of a process that renders templates.

    Attributes:
        seconds: Processor time of one rendering.
        bytes: Memory of the process.
        characters: Length of a rendered text.
        idle_seconds: How long the process lives without work.
        by_system: Whether the system limits the memory. Where it cannot, the parent
            measures it several times per second.
    """

    seconds: float = 2.0
    bytes: int = 2**30
    characters: int = 2**26
    idle_seconds: float = 30.0
    by_system: bool = sys.platform == "linux"

    @property
    def over_memory(self) -> str:
        """Says that a rendering exceeds the memory."""
        return f"it takes more than {self.bytes // 2**20} MiB of memory"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One template, for many payloads.

    Attributes:
        source: The template.
        now: The time that a chat template sees; None for a template over fields.
        common: Variables that all payloads share.
    """

    source: str
    now: datetime.datetime | None = None
    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """A request to a template.

    Attributes:
        wanted: The result: `names`, the variables that the template may use; `text`,
            the rendered text; `answers`, the text with the spans of the assistant's
            answers; `all`, the text with the spans of everything.
        values: Values of the template's variables.
        skip: Indices of messages that no span may cover, in ascending order.
        weighted: Indices of messages whose spans must be told from others.
    """

    wanted: Literal["names", "text", "answers", "all"]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skip: Sequence[int] = ()
    weighted: Sequence[int] = ()

    def pickled(self) -> bytes:
        """Pickles the payload, for `_answer`."""
        fields = (self.wanted, self.values, self.skip, self.weighted)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
