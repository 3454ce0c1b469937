"""Requests to a live run, and the answers to them."""

import dataclasses
from typing import Any, Literal

from jaxlora.run.saved_fields import STRICT, JobName

Action = Literal["stop", "pause", "resume", "add", "clone"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequest:
    """A request of the user to a live run.

    Attributes:
        action: What is asked for.
        job: Name of the job.
        reason: Text that says why, for `stop` and `pause`.
        settings: Settings of the job to add, or what a clone of the job changes, with
            its `name`, as JSON values; None for other actions.
    """

    __pydantic_config__ = STRICT

    action: Action
    job: JobName
    reason: str = ""
    settings: dict[str, Any] | None = None

    def __post_init__(self):
        """Checks that the fields belong together; see `Mailbox.read`."""
        if (self.action in ("add", "clone")) != (self.settings is not None):
            raise ValueError(f"the action {self.action} and settings contradict.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of a run to a request.

    Attributes:
        is_accepted: Whether the run does what was asked for.
        text: Says what happens now, or why the request was refused.
    """

    __pydantic_config__ = STRICT

    is_accepted: bool
    text: str
