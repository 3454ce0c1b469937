"""Finds the characters of a rendered conversation that the model is to learn.

This runs in the process of `template_worker`, because it renders parts of a
conversation to find its turns.

- If the template marks the model's text (`{% generation %}`), the marks are used.
- Otherwise a turn of the assistant begins where the rendering of the messages before
  it, with the generation prompt, ends, as in inference. It ends where the rendering of
  the messages up to it ends, without trailing space.
- A template may print a turn within a conversation differently than at its end
  (reasoning models leave out earlier thoughts). Then the turn is the text that the
  template printed in its iteration over that message, after as much of the generation
  prompt as this text has.
- Templates of reasoning models print an empty thought before an answer without one.
  It belongs to the prompt, as in inference with thinking off, and is not learned.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlora.data.templates.sandbox import ChatTemplate, Trace
from jaxlora.data.templates.template_task import Payload

# Its first character, its end, and the index of its message, if that is known.
MessageSpan = tuple[int, int, int | None]


# Variables of templates that switch thinking off.
_SWITCHES = ("enable_thinking", "thinking")
_OPEN = (
    r"<think(?:ing)?>|<seed:think>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought"
)
_CLOSE = r"</think(?:ing)?>|</seed:think>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>"
_EMPTY_THOUGHT = re.compile(rf"\s*(?P<open>{_OPEN})?\s*(?:{_CLOSE})\s*")
_OPENED = re.compile(rf"(?:{_OPEN})\s*\Z")


class UnclearTurnError(Exception):
    """It is unclear which text a message printed; the error says why."""


class NoAnswerError(Exception):
    """No message is an answer of the assistant; the error lists the roles."""


class RenderedConversation:
    """One conversation as text, with the spans that are to be learned.

    Attributes:
        text: The whole conversation.
        num_thoughtless: Answers that begin after an empty thought, which the generation
            prompt does not have.
    """

    def __init__(self, template: ChatTemplate, values: Mapping[str, Any]):
        """Renders the conversation.

        Args:
            template: The chat template.
            values: Values of its variables, including `messages`.
        """
        self._template = template
        self._values = values
        self._messages: Sequence[dict[str, Any]] = values["messages"]
        self.text = template.render(values)
        self._trace: Trace | None = None
        self._is_traced = False
        self.num_thoughtless = 0

    def answers(self, payload: Payload) -> list[MessageSpan]:
        """Spans of the assistant's answers, except of the messages in `skip`.

        Raises:
            NoAnswerError: There is no answer.
            UnclearTurnError: It is unclear where an answer is.
        """
        if self._template.has_generation:
            return [self._learned(*span) for span in self._generations(payload)]
        if not any(map(self._is_answer, range(len(self._messages)))):
            raise NoAnswerError(
                "no message has the role 'assistant', so there is nothing to learn "
                f"(roles: {', '.join(m['role'] for m in self._messages)})"
            )
        turns = [(*self._turn(i), i) for i in self.turns(payload.skip)]
        return [self._learned(*turn) for turn in turns]

    def turns(self, skip: Sequence[int]) -> list[int]:
        """Indices of the assistant's messages, except of those in `skip`."""
        numbers = range(len(self._messages))
        return [i for i in numbers if self._is_answer(i) and i not in skip]

    def all_but(self, payload: Payload) -> list[MessageSpan]:
        """Spans of everything except the turns of the messages in `skip`.

        Messages in `weighted` have spans of their own.

        Raises:
            UnclearTurnError: It is unclear where a turn is.
        """
        spans: list[MessageSpan] = []
        edge = 0
        for i in sorted({*payload.skip, *payload.weighted}):
            start, end = self._turn(i)
            spans.append((edge, start, None))
            if i not in payload.skip:
                spans.append((start, end, i))
            edge = end
        spans.append((edge, len(self.text), None))
        return [span for span in spans if span[0] < span[1]]

    def _learned(self, start: int, end: int, i: int | None) -> MessageSpan:
        """Returns a span of an answer without an empty thought before it."""
        found = _EMPTY_THOUGHT.match(self.text, start, end)
        if found is None or i is None or found.end() == end:
            return start, end, i
        # A message may have an empty thought of its own, which the model is to write,
        # unless the generation prompt begins it.
        is_begun = not found["open"] and _OPENED.search(self.text[:start][-80:])
        content = self._messages[i].get("content") or ""
        if not is_begun and _EMPTY_THOUGHT.match(content):
            return start, end, i
        self.num_thoughtless += 1
        prompt = self._prompt_without_thoughts()
        if prompt:
            place = self.text.rfind(prompt, max(0, start - len(prompt)), found.end())
            if 0 <= place <= start < place + len(prompt):
                return place + len(prompt), end, i
        return found.end(), end, i

    def _prompt_without_thoughts(self) -> str:
        """Returns the generation prompt with thinking off; "" if that is unknown."""
        switches = [name for name in _SWITCHES if name in self._template.names]
        off = {"tools": None, **dict.fromkeys(switches, False)}
        key = repr(
            [
                item
                for item in self._values.items()
                if item[0] not in ("messages", "tools")
            ]
        )
        prompts = self._template.prompts
        if key not in prompts:
            messages = [{"role": "user", "content": "A"}]
            before, whole = (
                self._render(messages, add_generation_prompt=asks, **off) or ""
                for asks in (False, True)
            )
            is_known = bool(switches) and whole.startswith(before)
            prompts[key] = whole[len(before) :] if is_known else ""
        return prompts[key]

    def _generations(self, payload: Payload) -> list[MessageSpan]:
        trace = self._traced() or self._template.trace(
            self._values, self.text, with_turns=False
        )
        if trace is None:
            raise UnclearTurnError(
                "the chat template changes the text of its {% generation %} blocks "
                "after they are printed, so their place cannot be told"
            )
        if not trace.generations:
            raise UnclearTurnError(
                "the chat template has {% generation %} blocks, but printed none for "
                "these messages, so there is nothing to learn"
            )
        last, tail = len(self._messages) - 1, trace.tail_start or len(self.text) + 1
        found = [
            # Text after the loop ends the last turn, as Phi-3's <|endoftext|> does.
            (start, end, last if index is None and start >= tail else index)
            for start, end, index in trace.generations
        ]
        is_marked = payload.skip or payload.weighted
        if is_marked and any(index is None for _, _, index in found):
            raise UnclearTurnError(
                "some answers are not trained on or have a weight, and it cannot be "
                "told which {% generation %} block of the chat template printed them"
            )
        return [
            (start, end, index)
            for start, end, index in found
            if start < end and index not in payload.skip
        ]

    def _turn(self, i: int) -> tuple[int, int]:
        before = self._render(
            self._messages[:i], add_generation_prompt=self._is_answer(i)
        )
        is_last = i + 1 == len(self._messages)
        through = self.text if is_last else self._render(self._messages[: i + 1])
        start = end = None
        if before is not None and self.text.startswith(before):
            start = len(before)
        if through is not None and self.text.startswith(through):
            end = len(through)
        if start is None or end is None or end <= start:
            start, end = self._traced_turn(i, start)
        stripped = self.text[start:end].rstrip()
        if not stripped:
            raise self._unclear(i, "the template prints nothing for it")
        return start, start + len(stripped)

    def _traced_turn(self, i: int, start: int | None) -> tuple[int, int]:
        """Finds the turn in the trace of the loop.

        Args:
            i: Index of the message.
            start: First character of the turn, if it is known.
        """
        trace = self._traced()
        spans = trace.turns.get(i, ()) if trace else ()
        if len(spans) != 1:
            raise self._unclear(
                i,
                "the template prints it otherwise within the conversation than at its "
                "end, and not in one pass of a loop over the messages",
            )
        ((first, end),) = spans
        end += self._num_closing(i, end)
        if start is None or not first <= start <= end:
            turn = self.text[first:end]
            start = first + (self._num_given(i, turn) if self._is_answer(i) else 0)
        return start, end

    def _is_answer(self, i: int) -> bool:
        return self._messages[i]["role"] == "assistant"

    def _num_given(self, i: int, turn: str) -> int:
        """Counts the first characters of a turn that the generation prompt provides."""
        prompt = self._generation_prompt(i)
        common = _num_common(prompt, turn)
        if common == len(prompt):
            return common
        if not common and i and self._is_answer(i - 1):
            # The template joins consecutive answers into one turn.
            return 0
        head, _ = self._frame(i)
        given = turn[:head].rfind(prompt)
        if given >= 0:
            # The text before the whole conversation is printed with its first turn.
            return given + len(prompt)
        thoughtless = self._prompt_without_thoughts()
        if thoughtless and turn.startswith(thoughtless):
            self.num_thoughtless += 1
            return len(thoughtless)
        if common < head:
            raise self._unclear(
                i,
                f"its turn begins with {turn[:head]!r}, but the generation prompt is "
                f"{prompt!r}{self._other_prompt(i, turn)}",
            )
        return head

    def _other_prompt(self, i: int, turn: str) -> str:
        """Says whether the turn begins with the generation prompt for thinking."""
        key = "enable_thinking"
        if key not in self._template.names or self._values.get(key) is True:
            return ""
        if not turn.startswith(self._generation_prompt(i, **{key: True})):
            return ""
        return f" (data.chat_template_kwargs: {{{key}: true}} makes them agree)"

    def _generation_prompt(self, i: int, **changed: Any) -> str:
        """Returns the generation prompt after the messages before message `i`."""
        # Every template accepts a user's message, but few accept an empty list.
        messages = self._messages[:i] or [{"role": "user", "content": "A"}]
        changed = dict(changed, add_generation_prompt=True)
        values = dict(self._values, messages=messages, **changed)
        text = self._render(messages, **changed)
        trace = None if text is None else self._template.trace(values, text)
        if text is None or trace is None:
            raise self._unclear(i, "the template fails on the messages before it")
        return text[trace.tail_start :]

    def _num_closing(self, i: int, end: int) -> int:
        """Counts the characters after the iteration over message `i` that end its turn.

        The number is positive if the template prints the end of a turn as a separator.
        """
        trace = self._traced()
        assert trace is not None
        closing = self.text[trace.tail_start :].rstrip()
        if not closing or self._frame(i)[1]:
            return 0
        if self.text.startswith(closing, end):
            return len(closing)
        raise self._unclear(i, f"it does not end with {closing!r} as the last turn")

    def _frame(self, i: int) -> tuple[int, int]:
        """Counts the characters of the turn before and after its content."""
        turns = []
        for content in ("A", "B"):
            messages = list(self._messages)
            message = dict(messages[i], content=content)
            # A template may print either calls or text, or calls before text.
            message.pop("tool_calls", None)
            messages[i] = message
            values = dict(self._values, messages=messages)
            text = self._template.render(values)
            trace = self._template.trace(values, text)
            spans = trace.turns.get(i, ()) if trace else ()
            if len(spans) != 1:
                raise self._unclear(i, "the template prints it in several parts")
            turns.append(text[slice(*spans[0])])
        head = _num_common(*turns)
        one, other = (turn[head:][::-1] for turn in turns)
        return head, len(one[: _num_common(one, other)].strip())

    def _traced(self) -> Trace | None:
        if not self._is_traced:
            self._trace = self._template.trace(self._values, self.text)
            self._is_traced = True
        return self._trace

    def _render(self, messages: Sequence[Any], **changed: Any) -> str | None:
        """Renders a part of the conversation; None if the template refuses it."""
        values = dict(self._values, messages=messages, **changed)
        try:
            return self._template.render(values)
        except MemoryError:
            raise
        # A template may raise any error on a conversation that it does not expect.
        except Exception:
            return None

    def _unclear(self, i: int, why: str) -> UnclearTurnError:
        role = self._messages[i]["role"]
        return UnclearTurnError(f"the turn of message {i} ({role}) is unclear: {why}")


def _num_common(one: str, other: str) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in pairs if a != b), shorter)
