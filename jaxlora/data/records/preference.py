"""Records of preferences: recognizes them, and splits answers that hold the prompt."""

import re
from collections.abc import Mapping
from typing import Any

from jaxlora.errors import DataError

# Parts of the names of the two answers of a pair: TRL, LLaMA-Factory and Axolotl;
# OpenAI; others.
_PAIRS = (
    ("chosen", "rejected"),
    ("preferred", "non_preferred"),
    ("preferred", "dispreferred"),
    ("accepted", "rejected"),
)
# Whether an answer is a good one, as KTO has it: TRL, LLaMA-Factory.
_LABELS = ("label", "kto_tag")
_WORDS = {"true": True, "false": False}
_ANSWERS = ("completion", "messages", "conversations", "output")
_PAIRS_CURE = (
    "which objective: next_token does not learn from. Set the job's objective to one "
    "that does, such as simpo; `jaxlora data show` has --kind preference"
)
_LABEL_CURE = (
    "which objective: next_token does not learn from. Set the job's objective to kto; "
    "`jaxlora data show` has --kind unpaired"
)
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
_ONLY = "which no objective learns from"

# A field that holds a text, or a list of messages.
Answer = str | list[Any]


def split_prompt(chosen: Any, rejected: Any) -> tuple[Answer, ...] | DataError:
    """Splits two answers that begin with their prompt: what both begin with.

    As in TRL, a space at the end of a text's prompt is part of the answers. If one
    answer begins the other, they are split after the last common turn begins.

    Args:
        chosen: The chosen answer: a text, or a list of messages.
        rejected: The rejected answer.

    Returns:
        The prompt and the rest of both answers, or what is wrong.
    """
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    if not is_text and not (isinstance(chosen, list) and isinstance(rejected, list)):
        return DataError(
            f"the chosen answer is {chosen!r:.80} and the rejected one "
            f"{rejected!r:.80}. Write two texts, or two lists of messages."
        )
    pairs = zip(chosen, rejected, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if length is None:
        length = min(len(chosen), len(rejected))
        if len(chosen) == len(rejected):
            return DataError("both answers are the same. Remove the record.")
        shorter = min(chosen, rejected, key=len)
        length = _last_turn(shorter) if isinstance(shorter, str) else length - 1
    if is_text and chosen[:length].endswith(" "):
        length -= 1
    if not length:
        return DataError(
            "the answers do not begin with the same prompt and the same speaker, and "
            "the record has no field for the prompt. Name it in data.prompt."
        )
    return chosen[:length], chosen[length:], rejected[length:]


def _last_turn(text: str) -> int:
    """Returns where the text of the last turn begins, after its speaker; 0: nowhere."""
    found = (list(turns.finditer(text)) for turns in _TURNS)
    return next((turns[-1].end() for turns in found if turns), 0)


def describe_preference(record: Mapping[str, Any]) -> str | None:
    """Says that a record holds a preference and what to do; None if it holds none.

    Args:
        record: The record.
    """
    for good, bad in _PAIRS:
        worse = [name for name in record if bad in str(name).lower()]
        better = [n for n in record if good in str(n).lower() and n not in worse]
        if better and worse:
            return (
                f"this is a preference record ({better[0]!r} and {worse[0]!r}, as for "
                f"DPO), {_PAIRS_CURE}. {_cure(record, better[0])}"
            )
    if any(name in record for name in _ANSWERS):
        for name in _LABELS:
            label = record.get(name)  # a number may be a class
            if isinstance(label, bool | str) and str(label).lower() in _WORDS:
                return (
                    f"this is a preference record ({name!r} says whether the answer is "
                    f"a good one, as for KTO), {_LABEL_CURE}. Or keep the good answers "
                    f"and remove {name!r}, or set data.kind to train on all of them."
                )
    for names in (("completions", "labels"), ("output",)):
        if all(isinstance(record.get(name), list) for name in names):
            return (
                f"this is a preference record ({names[0]!r} holds several answers or "
                f"steps to compare), {_ONLY}. Keep one answer in each record."
            )
    return None


def find_number_label(record: Mapping[str, Any]) -> str | None:
    """Returns the field that may be a label of an answer as 1 or 0, or None.

    It may also be a class, so that records with such a field have no kind of their own.
    """
    if not any(name in record for name in _ANSWERS):
        return None
    labels = (n for n in _LABELS if read_label(record.get(n)) is not None)
    return next(labels, None)


def read_label(value: Any) -> bool | None:
    """Returns whether a labelled answer is a good one; None if it is no label.

    Labels are true and false, or 1 and 0. A .csv file has them as texts.
    """
    if isinstance(value, str):
        return (_WORDS | {"1": True, "0": False}).get(value.lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _cure(record: Mapping[str, Any], better: str) -> str:
    """Says how to train on the better answers alone."""
    answer, prompt = record[better], record.get("prompt")
    if isinstance(answer, list) and not isinstance(prompt, list):
        return f"To train on the better answers, set data.messages to {better!r}."
    if isinstance(answer, str) and len(record) == 2:  # each answer has its prompt
        return f"To train on the better texts, set data.text to {better!r}."
    if isinstance(answer, list | str):
        also = "" if "prompt" in record else ", and data.prompt to the prompt's field"
        return (
            f"To train on the better answers, set data.completion to {better!r}{also}."
        )
    return "To train on the better answers, put them into the conversations."
