"""Recognizes records of preferences, which only some objectives learn from."""

from collections.abc import Mapping
from typing import Any

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
_ONLY = "which no objective learns from"


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
