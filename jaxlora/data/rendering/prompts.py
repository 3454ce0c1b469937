"""Reads prompts with their completions from records."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxlora.data.records.read import Record
from jaxlora.data.records.values import check_text
from jaxlora.data.rendering.fields import Field
from jaxlora.data.rendering.kinds import ALPACA
from jaxlora.errors import DataError

# The prompts of Stanford Alpaca, with the line break that its data set and later tools
# have after "Response:".
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides "
    "further context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt, and the completion that is trained on."""

    prompt: str
    completion: str


@runtime_checkable
class PromptReader(Protocol):
    """Reads a prompt and a completion from each record.

    Attributes:
        fields: The fields that it reads.
    """

    fields: list[Field]

    def read(self, records: Sequence[Record]) -> list[PromptCompletion | DataError]:
        """Returns the prompt and the completion of each record, or its error."""
        ...


class FieldPrompts:
    """Reads prompts and completions from two fields, or by templates over fields."""

    def __init__(self, prompt: str, completion: str):
        self.fields = [Field(prompt), Field(completion)]

    def read(self, records: Sequence[Record]) -> list[PromptCompletion | DataError]:
        """Returns the prompt and the completion of each record, or its error."""
        prompt, completion = self.fields
        texts = zip(prompt.read(records), completion.read(records), strict=True)
        return [_pair(*one, completion.source) for one in texts]


class AlpacaPrompts:
    """Makes prompts of the fields `instruction` and `input`, as Alpaca does."""

    def __init__(self, *, chat: bool):
        """Makes a reader.

        Args:
            chat: Whether the prompt becomes a message in a chat. Then it is the
                instruction, followed by the input, if any, in a new line. Otherwise it
                is Alpaca's text.
        """
        self.fields = [Field(name) for name in ALPACA]
        self._chat = chat

    def read(self, records: Sequence[Record]) -> list[PromptCompletion | DataError]:
        """Returns the prompt and the completion of each record, or its error."""
        instruction, _, output = self.fields
        prompts = map(self._prompt, instruction.read(records), records)
        texts = zip(prompts, output.read(records), strict=True)
        return [_pair(*one, output.source) for one in texts]

    def _prompt(self, instruction: str | DataError, record: Record) -> str | DataError:
        if isinstance(instruction, DataError):
            return instruction
        try:
            given = check_text(record.get("input") or "", "field 'input'")
        except DataError as error:
            return error
        if self._chat:
            return f"{instruction}\n{given}" if given else instruction
        template = _WITH_INPUT if given else _WITHOUT_INPUT
        return template.format(instruction=instruction, input=given)


def _pair(
    prompt: str | DataError, completion: str | DataError, source: str
) -> PromptCompletion | DataError:
    if isinstance(prompt, DataError):
        return prompt
    if isinstance(completion, DataError):
        return completion
    if not completion:
        return DataError(
            f"completion {source!r} is empty, so there is nothing to learn. Remove the "
            "record."
        )
    return PromptCompletion(prompt, completion)
