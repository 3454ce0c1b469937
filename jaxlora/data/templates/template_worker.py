"""The child program that renders templates, with limits of time and memory.

`template.py` starts it. The program reads pickled batches of payloads from standard
input, and writes one line of JSON for each payload to standard output, at once. Its
input is pickled, as only this package sends it; its output is JSON, as an untrusted
template may determine what is written. It ends when its input is closed or idle for
long. This module must import nothing heavy.
"""

import datetime
import functools
import io
import json
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2

from jaxlora.data.templates.call_arguments import prepare_messages
from jaxlora.data.templates.inner_values import NotTextError
from jaxlora.data.templates.lost_parts import LostPartError, check_parts
from jaxlora.data.templates.sandbox import ChatTemplate, RecordTemplate
from jaxlora.data.templates.template_task import (
    OUT_OF_MEMORY,
    Payload,
    Task,
    TemplateLimits,
)
from jaxlora.data.templates.turns import (
    NoAnswerError,
    RenderedConversation,
    UnclearTurnError,
)

_KINDS: Mapping[type[Exception], str] = {
    UnclearTurnError: "unclear",
    NoAnswerError: "no answer",
    LostPartError: "lost",
    NotTextError: "not text",
    jinja2.TemplateSyntaxError: "syntax",
}
_PLAIN_MODULES = {"collections", "datetime", "decimal", "pytz", "uuid", "zoneinfo"}


Template = RecordTemplate | ChatTemplate


def main(limits: str) -> None:
    """Answers batches of payloads until the input is closed or idle for long.

    Args:
        limits: The fields of `TemplateLimits`, as JSON.
    """
    code = 0
    try:
        _serve(TemplateLimits(**json.loads(limits)))
    except MemoryError:
        code = OUT_OF_MEMORY
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        pass  # The parent has ended, or no longer reads answers.
    os._exit(code)


def _serve(limits: TemplateLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.by_system:
        resource.setrlimit(resource.RLIMIT_AS, (limits.bytes, limits.bytes))
    # The system itself kills the process when its time is up, even within a long call.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def start_clock() -> None:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)

    @functools.lru_cache(maxsize=64)
    def compiled(source: str, now: datetime.datetime | None) -> Template:
        start_clock()
        if now is None:
            return RecordTemplate(source, start_clock)
        return ChatTemplate(source, now, start_clock)

    _write({})
    while select.select([sys.stdin], [], [], limits.idle_seconds)[0]:
        task, payloads = pickle.load(sys.stdin.buffer)
        for payload in payloads:
            start_clock()
            _write(_answer(task, payload, limits, compiled))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _write(answer: dict[str, Any]) -> None:
    line = json.dumps(answer, ensure_ascii=False)
    sys.stdout.buffer.write(line.encode("utf-8", "surrogatepass") + b"\n")
    sys.stdout.buffer.flush()


def _answer(
    task: Task,
    payload: bytes,
    limits: TemplateLimits,
    compiled: Callable[..., Template],
) -> dict[str, Any]:
    """Answers a pickled `Payload` with what it wants, or with a `Failure`."""
    try:
        template = compiled(task.source, task.now)
        fields = _Unpickler(io.BytesIO(payload)).load()
        answer = _carry_out(template, task.common, Payload(*fields))
    except MemoryError:
        return {"kind": "limit", "why": limits.over_memory}
    # A template is an untrusted program, which may raise any error.
    except Exception as error:
        kind, why = _KINDS.get(type(error), "other"), str(error)
        if kind in ("syntax", "other"):
            why = f"{type(error).__name__}: {why[:2000]}"
        return {"kind": kind, "why": why}
    most = limits.characters
    if len(answer.get("text", "")) > most:
        return {"kind": "limit", "why": f"it prints more than {most} characters"}
    return answer


class _Unpickler(pickle.Unpickler):
    """Unpickles only plain values: JSON values, times, decimals and UUIDs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.split(".")[0] not in _PLAIN_MODULES:
            raise TypeError(
                f"a value is a {module_name}.{global_name}, which is neither text, "
                "number, time, list nor object"
            )
        return super().find_class(module_name, global_name)


def _carry_out(template: Template, common: Mapping, payload: Payload) -> dict[str, Any]:
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
    is_all, trained = payload.wanted == "all", conversation.turns(payload.skip)
    has_turns = not (is_all or template.has_generation)
    num_cut = check_parts(
        template, values, conversation.text, trained, has_turns=has_turns
    )
    spans = (conversation.all_but if is_all else conversation.answers)(payload)
    return {
        "text": conversation.text,
        "spans": spans,
        "num_cut": num_cut,
        "num_thoughtless": conversation.num_thoughtless,
    }
