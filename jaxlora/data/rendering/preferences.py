"""Renders records of preferences: pairs of answers, and answers with labels."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from jaxlora.config import DataConfig
from jaxlora.data.records.notes import Notes
from jaxlora.data.records.preference import read_label, split_prompt
from jaxlora.data.records.read import Record
from jaxlora.data.rendering.distillation import GivenTokens, TokensRenderer
from jaxlora.data.rendering.fields import missing_field
from jaxlora.data.rendering.kinds import Reading
from jaxlora.data.rendering.render import Rendered, plain_renderer
from jaxlora.data.templates.chat import Chat
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError

# Fields of a conversation that was split into its last message and those before it.
_PARTS = ("prompt", "completion")


@dataclasses.dataclass(frozen=True, slots=True)
class Valued:
    """A text with the numbers that came with its record.

    Attributes:
        text: The text, or the tokens.
        value: See `TokenizedSample`.
        weight: Factor of the weights of its tokens.
    """

    text: Rendered | GivenTokens
    value: float = 0.0
    weight: float = 1.0


# Texts of records that come with numbers, too.
ValuedRenderer = Callable[
    [Sequence[Record]], Sequence[Valued | Rendered | GivenTokens | DataError]
]


def make_renderer(
    data: DataConfig, reading: Reading, tokenizer: Tokenizer, notes: Notes
) -> ValuedRenderer:
    """Chooses how records become text.

    Args:
        data: The user's settings for the records.
        reading: Which fields are read, and as what.
        tokenizer: Holds the chat template.
        notes: Gets a line for each field that the user probably meant but that is not
            used.

    Returns:
        A function from records to texts, two for each record of a preference: the
        chosen one first. For a record that cannot be used, it returns a DataError
        without the record's number, which the caller knows.

    Raises:
        DataError: Options contradict the kind.
        ModelError: The records are chats, and the tokenizer has no chat template.
    """
    if data.weight is not None and reading.kind in ("preference", "unpaired"):
        raise DataError(
            f"weight={data.weight!r} weighs the losses of tokens, and the records are "
            f"read as {reading}. Remove data.weight."
        )
    if reading.kind == "preference":
        return _PairRenderer(data, reading, tokenizer, notes)
    if reading.kind == "unpaired":
        return _LabelledRenderer(data, reading, tokenizer, notes)
    render: ValuedRenderer = (
        TokensRenderer(data, tokenizer)
        if reading.kind == "distill"
        else plain_renderer(data, reading, tokenizer, notes)
    )
    return render if data.weight is None else _WeightedRenderer(render, data.weight)


class _WeightedRenderer:
    """Renders records, and reads the weight of each."""

    def __init__(self, render: ValuedRenderer, field: str):
        self._render, self._field = render, field

    def __call__(
        self, records: Sequence[Record]
    ) -> list[Valued | Rendered | GivenTokens | DataError]:
        rendered = self._render(records)
        return list(map(self._weighted, rendered, records))

    def _weighted(
        self, text: Valued | Rendered | GivenTokens | DataError, record: Record
    ) -> Valued | DataError:
        if isinstance(text, DataError):
            return text
        assert not isinstance(text, Valued), "these have no weights"
        if self._field not in record:
            return missing_field(self._field, record)
        weight = record[self._field]
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            return DataError(
                f"the weight {self._field!r} is {weight!r:.80}. Write a number above 0."
            )
        return Valued(text, weight=float(weight))


def _unweighted(text: Rendered | DataError) -> Rendered | DataError:
    """Refuses weights other than 0 and 1, by which no preference is weighted."""
    if isinstance(text, Chat) and text.weights:
        return DataError(
            "a message has a weight that is neither 0 nor 1, which only objective "
            "next_token takes into account. Remove the weights."
        )
    return text


class _PairRenderer:
    """Renders the chosen and the rejected answer of each record, in turn."""

    def __init__(
        self, data: DataConfig, reading: Reading, tokenizer: Tokenizer, notes: Notes
    ):
        *prompts, self._chosen, self._rejected = reading.fields
        self._prompt = prompts[0] if prompts else data.prompt
        self._reading, self._margin = reading, data.margin
        self._renderers = [
            plain_renderer(
                data.replace(kind="prompt_completion"),
                Reading(
                    kind="prompt_completion",
                    fields=(self._prompt, answer),
                    has_messages=reading.has_messages,
                    system=reading.system,
                ),
                tokenizer,
                notes,
            )
            for answer in (self._chosen, self._rejected)
        ]

    def __call__(
        self, records: Sequence[Record]
    ) -> list[Valued | Rendered | DataError]:
        read = list(map(self._read, records))
        good = [record for record in read if not isinstance(record, DataError)]
        rendered = [iter(render(good)) for render in self._renderers]
        out = []
        for record in read:
            if isinstance(record, DataError):
                out += [record, record]
                continue
            chosen, rejected = (_unweighted(next(each)) for each in rendered)
            if not isinstance(chosen, DataError) and chosen == rejected:
                chosen = rejected = DataError(
                    "both answers are the same text, so neither is better. Remove the "
                    "record, or use a template that prints how they differ."
                )
            if self._margin is not None and not isinstance(chosen, DataError):
                chosen = Valued(chosen, float(record[self._margin]))
            out += [chosen, rejected]
        return out

    def _read(self, record: Record) -> Record | DataError:
        """Returns a record with a prompt, and with lists where it had one message."""
        if self._margin is not None:
            margin = record.get(self._margin)
            is_number = isinstance(margin, int | float) and math.isfinite(margin)
            if not is_number or isinstance(margin, bool):
                return DataError(
                    f"the margin {self._margin!r} is {margin!r:.80}. Write a number."
                )
        answers = {}
        for field in (self._chosen, self._rejected):
            answer = record.get(field)
            is_message = self._reading.has_messages and isinstance(answer, dict)
            answers[field] = [answer] if is_message else answer
        if self._reading.has_prompt:
            return {**record, **answers} if self._reading.has_messages else record
        for field in answers:
            if field not in record:
                return missing_field(field, record)
        split = split_prompt(*answers.values())
        if isinstance(split, DataError):
            return split
        return {**record, **dict(zip((self._prompt, *answers), split, strict=True))}


class _LabelledRenderer:
    """Renders the answer of each record, and reads its label.

    Of a conversation, the last message is the answer.
    """

    def __init__(
        self, data: DataConfig, reading: Reading, tokenizer: Tokenizer, notes: Notes
    ):
        assert reading.answer is not None, "it is read as records without the label"
        answer, self._label = reading.answer, reading.fields[-1]
        self._messages: str | None = None
        if answer.kind == "messages":
            (self._messages,) = answer.fields
            answer = dataclasses.replace(
                answer, kind="prompt_completion", fields=_PARTS, has_messages=True
            )
        plain = data.replace(kind=answer.kind)
        self._render = plain_renderer(plain, answer, tokenizer, notes)

    def __call__(self, records: Sequence[Record]) -> list[Valued | DataError]:
        read = list(map(self._read, records))
        good = [record for record in read if not isinstance(record, DataError)]
        rendered = iter(self._render([self._without_label(r) for r in good]))
        return [
            record if isinstance(record, DataError) else self._valued(record, rendered)
            for record in read
        ]

    def _valued(
        self, record: Record, rendered: Iterator[Rendered | DataError]
    ) -> Valued | DataError:
        text = _unweighted(next(rendered))
        if isinstance(text, DataError):
            return text
        return Valued(text, float(bool(read_label(record[self._label]))))

    def _without_label(self, record: Record) -> Record:
        return {name: value for name, value in record.items() if name != self._label}

    def _read(self, record: Record) -> Record | DataError:
        """Returns a record with a label, and with a prompt and a completion."""
        label = record.get(self._label)
        if read_label(label) is None:
            if self._label not in record:
                return missing_field(self._label, record)
            return DataError(
                f"the label {self._label!r} is {label!r:.80}. Write true (or 1) for "
                "a good answer and false (or 0) for a bad one."
            )
        if self._messages is None:
            return record
        messages = record.get(self._messages)
        if not isinstance(messages, list) or len(messages) < 2:
            return DataError(
                f"field {self._messages!r} is {messages!r:.80}. Write a list of "
                "messages that ends with the labelled answer."
            )
        prompt, answer = messages[:-1], messages[-1:]
        return {
            **record,
            **dict(zip(_PARTS, (prompt, answer), strict=True)),
        }
