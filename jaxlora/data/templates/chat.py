"""A model's chat template, which renders conversations and marks the text to learn."""

import datetime
import functools
import hashlib
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxlora.data.formats.example import Rendered
from jaxlora.data.records.messages import RENAME_CURE, Conversation, Message
from jaxlora.data.templates.template import Answer, Failure, run_task
from jaxlora.data.templates.template_task import Payload, Task
from jaxlora.errors import DataError, ModelError


class ModelChat:
    """The chat template of a tokenizer.

    It is parsed when it is first used, because not every run has chats. It runs in a
    sandbox in a child process with limits (`jaxlora/data/templates/template.py`).

    Attributes:
        now: The time that the template sees.
    """

    def __init__(
        self,
        template: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        *,
        source: str,
        now: datetime.datetime,
        kwargs: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        """Wraps the template of a tokenizer's folder.

        Args:
            template: The template, or several by name.
            special_tokens: Text of each special token, by `bos_token`, `eos_token`, ...
            source: Where the template came from, for errors.
            now: The time that the template sees.
            kwargs: Values of variables that the template has for its users.
        """
        self._template, self._kwargs = template, dict(kwargs)
        self._special_tokens = special_tokens
        self._source = source
        self.now = now

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "ModelChat":
        """Returns the template with values of variables that it has for its users."""
        return ModelChat(
            self._template,
            self._special_tokens,
            source=self._source,
            now=self.now,
            kwargs=kwargs,
        )

    def check_kwargs(self) -> None:
        """Checks that the template uses the variables that it is given.

        Raises:
            DataError: It does not use one of them.
            ModelError: There is no template, or it does not parse.
        """
        for name in self._kwargs:
            if name not in self.variables:
                raise DataError(
                    f"chat_template_kwargs has {name!r}, which "
                    f"{self._name} does not use (it uses "
                    f"{', '.join(sorted(self.variables))}). Correct or remove it, or "
                    "give the chat_template that uses it."
                )

    @property
    def sources(self) -> list[str]:
        """The templates, of which there may be none."""
        if isinstance(self._template, Mapping):
            return list(self._template.values())
        return [] if self._template is None else [self._template]

    @property
    def fingerprint(self) -> str:
        """A hash of the templates and of the special tokens that they see."""
        given: list[Any] = [self._template, sorted(self._special_tokens.items())]
        given += [self._kwargs] if self._kwargs else []
        return hashlib.sha256(json.dumps(given).encode()).hexdigest()

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template, or the one for tools, may use.

        Raises:
            ModelError: There is no template, or it does not parse.
        """
        names = []
        for task in self._tasks:
            (answer,) = run_task(task, [Payload("names")])
            if isinstance(answer, Failure):
                raise self._error(answer)
            names += answer["names"]
        return frozenset(names)

    def mentions(self, key: str) -> bool:
        """Whether the template mentions a key of messages, as a complete word.

        Raises:
            ModelError: There is no template.
        """
        word = re.compile(rf"\b{key}\b")
        return any(word.search(task.source) for task in self._tasks)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        **extras: Any,
    ) -> str:
        """Renders a conversation, as transformers does.

        Args:
            messages: {role, content} messages.
            add_generation_prompt: End with the generation prompt, which precedes an
                assistant's answer.
            **extras: More variables of the template, such as `tools`.

        Raises:
            DataError: The template refuses the messages, fails, exceeds a limit, or
                leaves out a tool, a call or a text other than thoughts.
            ModelError: There is no template, or it does not parse.
        """
        values = {
            **extras,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        task = self._tasks[bool(values.get("tools"))]
        (answer,) = run_task(task, [Payload("text", values)])
        if isinstance(answer, Failure):
            raise self._error(answer)
        return answer["text"]

    def render_all(
        self,
        conversations: Sequence[Conversation],
        loss_on: Literal["completion", "last", "all"],
    ) -> list[Rendered | DataError]:
        """Renders conversations, each with the spans of its target characters.

        Args:
            conversations: The conversations.
            loss_on: Whether to train on the assistant's answers or on everything.
                Messages with the weight 0, and for `last` all answers but the last one,
                are never trained on.

        Returns:
            For each conversation, a chat or the error that occurred.

        Raises:
            ModelError: There is no template, or it does not parse.
        """
        wanted = "all" if loss_on == "all" else "answers"
        chats: list[Rendered | DataError] = [DataError("")] * len(conversations)
        for has_tools, task in enumerate(self._tasks):
            chosen = [
                i for i, c in enumerate(conversations) if bool(c.tools) == has_tools
            ]
            payloads = [_payload(wanted, conversations[i]) for i in chosen]
            for i, answer in zip(chosen, run_task(task, payloads), strict=True):
                chats[i] = self._chat(answer, conversations[i].weights)
        return chats

    def check(self) -> None:
        """Checks that there is a chat template.

        Raises:
            ModelError: There is none.
        """
        self._choose_template("default")

    def _chat(self, answer: Answer, weight_of: Sequence[float]) -> Rendered | DataError:
        if isinstance(answer, Failure):
            error = self._error(answer)
            if isinstance(error, DataError):
                return error
            raise error
        spans = tuple((start, end) for start, end, _ in answer["spans"])
        indices = [index for _, _, index in answer["spans"]]
        found = tuple(1.0 if i is None else weight_of[i] for i in indices)
        weights = found if set(found) - {1.0} else ()
        counts = {name: answer[name] for name in ("num_cut", "num_thoughtless")}
        return Rendered(answer["text"], spans, weights=weights, **counts)

    @property
    def _name(self) -> str:
        """Names the template in errors; the source may be a template itself."""
        is_template = self._source.startswith(("chat_template ", "the chat template "))
        return self._source if is_template else f"the chat template of {self._source}"

    def _error(self, failure: Failure) -> DataError | ModelError:
        if failure.kind == "syntax":
            return ModelError(
                f"{self._source}: the chat template does not parse ({failure.why}). "
                "Fix it, or set another chat_template."
            )
        if failure.kind == "no answer":
            return DataError(
                f"{failure.why}. {RENAME_CURE}, or set data.loss_on to all."
            )
        if failure.kind == "lost":
            return DataError(f"{failure.why}; or remove the record.")
        what = self._name
        if failure.kind == "unclear":
            return DataError(
                f"{failure.why}. Set data.loss_on to all, mark what the assistant "
                f"writes with {{% generation %}} in {what}, or remove the record."
            )
        if failure.kind == "limit":
            return DataError(
                f"{what} exceeds a limit: {failure.why}. Shorten the messages or "
                "simplify the template."
            )
        return DataError(
            f"{what} failed ({failure.why}). Give the messages in the form that it "
            "expects, or fix the template."
        )

    @functools.cached_property
    def _tasks(self) -> tuple[Task, Task]:
        """Tasks for conversations without tools and with tools."""
        common = {"tools": None, "documents": None, **self._special_tokens}
        common |= self._kwargs
        sources = self._choose_template("default"), self._choose_template("tool_use")
        without, with_tools = (Task(source, self.now, common) for source in sources)
        return without, with_tools

    def _choose_template(self, name: str) -> str:
        template = self._template
        if isinstance(template, Mapping):
            if name in template:
                return template[name]
            if "default" not in template:
                raise ModelError(
                    f"{self._source}: has chat templates named {', '.join(template)}, "
                    "but no 'default'. Set chat_template to the one to use."
                )
            template = template["default"]
        if template is None:
            raise ModelError(
                f"{self._source}: the tokenizer has no chat template, which chat "
                "messages need. Set chat_template: a file, chatml, llama3 or the "
                "folder of a model that has one, such as its instruct version. Or "
                "use prompts without chat."
            )
        return template


def _payload(wanted: Literal["answers", "all"], conversation: Conversation) -> Payload:
    values = {
        "messages": list(conversation.messages),
        "add_generation_prompt": False,
        "tools": conversation.tools,
    }
    weights = list(enumerate(conversation.weights))
    skip = [i for i, weight in weights if not weight]
    weighted = [i for i, weight in weights if weight not in (0, 1)]
    return Payload(wanted, values, skip, weighted)
