"""Renders payloads of a template; runs in the process of `template_worker`.

This module must import nothing heavy.
"""

import dataclasses
import datetime
import functools
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxlora.data.call_arguments import prepare_messages
from jaxlora.data.lost_parts import LostPartError, check_parts
from jaxlora.data.sandbox import ChatTemplate, RecordTemplate
from jaxlora.data.turns import NoAnswerError, RenderedConversation, UnclearTurnError

_PLAIN_MODULES = {"collections", "datetime", "decimal", "pytz", "uuid", "zoneinfo"}


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
    """

    wanted: Literal["names", "text", "answers", "all"]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skip: Sequence[int] = ()

    def pickled(self) -> bytes:
        """Pickles the payload for `TaskRunner`."""
        fields = (self.wanted, self.values, self.skip)
        return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


class TaskRunner:
    """Runs tasks, with a cache of compiled templates."""

    def __init__(self, start_clock: Callable[[], Any], max_characters: int):
        """Makes a runner.

        Args:
            start_clock: Called before a template is compiled or rendered.
            max_characters: Longest text that a template may print.
        """
        self._start_clock = start_clock
        self._max_characters = max_characters
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def run(self, task: Task, payload: bytes) -> dict[str, Any]:
        """Answers a pickled `Payload` with what it wants, or with `error` and `why`."""
        try:
            template = self._compiled(task.source, task.now)
            fields = _Unpickler(io.BytesIO(payload)).load()
            answer = _carry_out(template, task.common, Payload(*fields))
        except UnclearTurnError as error:
            return {"error": "Unclear", "why": str(error)}
        except NoAnswerError as error:
            return {"error": "NoAnswer", "why": str(error)}
        except LostPartError as error:
            return {"error": "LostPart", "why": str(error)}
        # A template is an untrusted program, which may raise any error.
        except Exception as error:
            return {"error": type(error).__name__, "why": str(error)[:2000]}
        if len(answer.get("text", "")) > self._max_characters:
            return {"error": "TooLong", "why": ""}
        return answer

    def _compile(self, source: str, now: datetime.datetime | None):
        self._start_clock()
        if now is None:
            return RecordTemplate(source, self._start_clock)
        return ChatTemplate(source, now, self._start_clock)


class _Unpickler(pickle.Unpickler):
    """Unpickles only plain values: JSON values, times, decimals and UUIDs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.split(".")[0] not in _PLAIN_MODULES:
            raise TypeError(
                f"a value is a {module_name}.{global_name}, which is neither text, "
                "number, time, list nor object"
            )
        return super().find_class(module_name, global_name)


def _carry_out(
    template: RecordTemplate | ChatTemplate, common: Mapping, payload: Payload
) -> dict[str, Any]:
    values = {**common, **payload.values}
    if payload.wanted == "names":
        return {"names": sorted(template.names)}
    if isinstance(template, RecordTemplate):
        return {"text": template.render(values)}
    values["messages"] = prepare_messages(values["messages"])
    if payload.wanted == "text":
        text = template.render(values)
        check_parts(template, values, text)
        return {"text": text}
    conversation = RenderedConversation(template, values)
    text = conversation.text
    if payload.wanted == "all":
        check_parts(template, values, text)
        return {"text": text, "spans": conversation.all_but(payload.skip)}
    turns = () if template.has_generation else conversation.turns(payload.skip)
    check_parts(template, values, text, turns)
    return {"text": text, "spans": conversation.answers(payload.skip)}
