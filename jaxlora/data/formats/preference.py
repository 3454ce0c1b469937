"""A preference: a chosen and a rejected answer to the same prompt."""

import dataclasses
import re
from typing import Any

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import (
    Format,
    Reading,
    field,
    found,
    has,
    holds_messages,
    read_number,
)
from jaxlora.data.formats.messages import SHAREGPT
from jaxlora.data.records.files import Record
from jaxlora.errors import DataError

# The speaker of an answer in a text.
_SPEAKER = (
    r"(?:[#*]+ *)?(?:assistant|answer|response|output|chatbot|bot|ai|gpt|(?-i:A))"
    r" *\**:(?: *\*+)?\n*"
)
# Marks that chat templates print before an answer.
_MARKS = (
    r"\[/INST\]|<\|assistant\|>\n?|<\|im_start\|>assistant\n|<start_of_turn>model\n"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
)
# Where an answer begins, by preference: in a new line, within one, after any names.
_TURNS = (
    re.compile(rf"(?:^|\n){_SPEAKER}|{_MARKS}", re.IGNORECASE),
    re.compile(rf"\s{_SPEAKER}", re.IGNORECASE),
    re.compile(r"(?:^|\n)\w+ *:\n*"),
)


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has both answers."""
    return has(record, data.chosen, data.rejected)


def convert(record: Record, reading: Reading) -> Example:
    """Makes an example of both; without a prompt, it is what both begin with."""
    margin, name = None, reading.data.margin
    if name is not None:
        margin = read_number(record, name, "margin")
    *prompts, chosen, rejected = [field(record, name) for name in reading.fields]
    if reading.has_messages:
        chosen, rejected = map(_as_list, (chosen, rejected))
    if prompts:
        (prompt,) = prompts
    else:
        prompt, chosen, rejected = split_prompt(chosen, rejected)
    tools = record.get("tools")
    return Example(prompt, (chosen, rejected), margin=margin, tools=tools)


def decide(reading: Reading, first: Record) -> Reading:
    """Decides whether there is a prompt, and whether answers are texts or messages.

    An answer may be text, a list of messages, or one message, which follows a list.
    """
    data = reading.data
    if data.loss_on == "all":
        raise DataError(
            f"loss_on={data.loss_on} trains on prompts, which a preference has in "
            "common. Remove data.loss_on."
        )
    for key in ("chosen", "rejected"):
        if not has(first, name := getattr(data, key)):
            raise DataError(
                f"field {name!r} is missing (fields found: {found(first)}). Name the "
                f"field of the {key} answer in data.{key}."
            )
    answer = first.get(data.chosen)
    has_messages = _is_message(answer) or holds_messages(answer)
    prompt = _find_prompt(data, first, has_messages=has_messages)
    names = data.chosen, data.rejected
    return dataclasses.replace(
        reading,
        fields=(prompt, *names) if prompt else names,
        has_messages=has_messages,
        note="" if prompt else "; the prompt is what both begin with",
    )


def _find_prompt(data: DataConfig, first: Record, *, has_messages: bool) -> str:
    """Returns the field of the prompt; "" if both answers begin with it."""
    name, is_message = data.prompt, _is_message(first.get(data.chosen))
    if is_message and not data.changes("prompt") and name not in first:
        # LLaMA-Factory has the conversation before an answer in these.
        others = (other for other in (SHAREGPT, "messages") if other in first)
        name = next(others, name)
    is_given = has(first, name)
    if has_messages:
        # Some sets repeat the prompt as text beside whole conversations.
        is_given = isinstance(first.get(name), list)
    if not is_given and (is_message or data.changes("prompt")):
        what = "a list of messages" if has_messages else "text"
        raise DataError(
            f"the field of the prompt, {name!r}, is missing or not {what} as the "
            f"answers are (fields found: {found(first)}). Name it in data.prompt."
        )
    if data.chat and not is_given:
        raise DataError(
            "chat=true wraps prompt and answers, but the records have no field "
            f"{name!r} (fields found: {found(first)}). Name the prompt in data.prompt, "
            "or remove data.chat."
        )
    return name if is_given else ""


def _as_list(answer: Any) -> Any:
    return [answer] if isinstance(answer, dict) else answer


def _is_message(answer: Any) -> bool:
    return isinstance(answer, dict) and bool(answer.keys() & {"role", "from"})


def split_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Splits two answers that begin with their prompt: what both begin with.

    As in TRL, a space at the end of a text's prompt is part of the answers. If one
    answer begins the other, they are split after the last common turn begins.

    Args:
        chosen: The chosen answer: a text, or a list of messages.
        rejected: The rejected answer.

    Returns:
        The prompt and the rest of both answers.

    Raises:
        DataError: They are no such answers.
    """
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    if not is_text and not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise DataError(
            f"the chosen answer is {chosen!r:.80} and the rejected one "
            f"{rejected!r:.80}. Write two texts, or two lists of messages."
        )
    pairs = zip(chosen, rejected, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if length is None:
        length = min(len(chosen), len(rejected))
        if len(chosen) == len(rejected):
            raise DataError("both answers are the same. Remove the record.")
        shorter = min(chosen, rejected, key=len)
        length = _last_turn(shorter) if isinstance(shorter, str) else length - 1
    if is_text and chosen[:length].endswith(" "):
        length -= 1
    if not length:
        raise DataError(
            "the answers do not begin with the same prompt and the same speaker, and "
            "the record has no field for the prompt. Name it in data.prompt."
        )
    return chosen[:length], chosen[length:], rejected[length:]


def _last_turn(text: str) -> int:
    """Returns where the text of the last turn begins, after its speaker; 0: nowhere."""
    turns_of = (list(turns.finditer(text)) for turns in _TURNS)
    return next((turns[-1].end() for turns in turns_of if turns), 0)


FORMAT = Format(
    kind="preference",
    fits=fits,
    convert=convert,
    decide=decide,
    settings=("prompt", "chosen", "rejected", "margin"),
    gives="preference",
)
