"""Tokens, with the log-probabilities that a teacher gave them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Example
from jaxlora.data.formats.format import Format, Reading, field
from jaxlora.data.records.files import Record
from jaxlora.errors import DataError
from jaxlora.objectives.distill import MOST_TOP
from jaxlora.objectives.sample import TokenizedSample, TopLogprobs

# The fields of records for distillation, as Axolotl names them in what it prepares.
IDS, TOP_IDS, TOP_LOGPROBS = "input_ids", "target_token_ids", "target_logprobs"
LABELS = "labels"  # which may be missing
_IGNORED = -100  # label of a token that is no target
# Settings that say how text becomes tokens.
_OF_TEXT = (
    *("chat", "chat_template", "chat_template_kwargs", "system", "roles", "loss_on"),
)


def fits(record: Record, data: DataConfig) -> bool:
    """Whether a record has the tokens, and what a teacher says of each."""
    return {IDS, TOP_IDS, TOP_LOGPROBS} <= record.keys()


def decide(reading: Reading, first: Record) -> Reading:
    """Names the fields, and refuses settings for texts."""
    for name in _OF_TEXT:
        if reading.data.changes(name):
            raise DataError(
                f"{name} says how text becomes tokens, and these records are tokens "
                f"already. Remove data.{name}."
            )
    return dataclasses.replace(reading, fields=(IDS, TOP_IDS, TOP_LOGPROBS))


def convert(record: Record, reading: Reading) -> Example:
    """Reads the tokens of a record, and what the teacher says of each.

    Row t of the teacher's lists is what it predicts in the place of token t, from those
    before it. A token without such a prediction is no target, and neither is one whose
    label is -100, if there are labels. Tokens that the tokenizer does not have, as
    teachers with padded heads may give, are left out of the lists.
    """
    columns = {name: field(record, name) for name in reading.fields}
    if (labels := record.get(LABELS)) is not None:
        columns[LABELS] = labels
    ids, vocab_size = _read_ids(IDS, columns[IDS]), reading.vocab_size
    if wrong := [one for one in ids if one >= vocab_size]:
        raise DataError(
            f"field {IDS!r} has token {wrong[0]}, and the tokenizer has {vocab_size}. "
            "Use records of a teacher with this tokenizer."
        )
    for name, values in columns.items():
        num = len(values) if isinstance(values, list) else None
        if num != len(ids):
            what = "is no list" if num is None else f"has {num} items"
            raise DataError(
                f"field {name!r} {what}, and there are {len(ids)} tokens in {IDS!r}. "
                "Give one item for each token."
            )
    pairs = zip(columns[TOP_IDS], columns[TOP_LOGPROBS], strict=True)
    tops = [_read_top(t, *pair, vocab_size) for t, pair in enumerate(pairs)]
    is_target = np.array([len(top) > 0 for top in tops], bool)
    is_target[:1] = False
    if (labels := columns.get(LABELS)) is not None:
        is_target &= np.array([label != _IGNORED for label in labels], bool)
    top = _joined(tops, is_target)
    tokens = np.array(ids, np.int32)
    return Example(tokens=TokenizedSample(tokens, is_target, top=top))


def _read_ids(name: str, values: Any) -> list[int]:
    is_list = isinstance(values, list)
    if not is_list or not all(type(one) is int and one >= 0 for one in values):
        raise DataError(f"field {name!r} is {values!r:.80}. Write a list of tokens.")
    return values


def _read_top(t: int, ids: Any, logprobs: Any, vocab_size: int) -> dict[int, float]:
    """Returns the log-probabilities in the place of token t, by token."""
    ids, logprobs = ids or [], logprobs or []
    where = f"of token {t} (from 0)"
    ids = _read_ids(f"{TOP_IDS} {where}", ids)
    numbers = [one for one in logprobs if isinstance(one, int | float)]
    if len(numbers) != len(ids) or len(logprobs) != len(ids):
        raise DataError(
            f"field {TOP_LOGPROBS!r} {where} has {len(numbers)} numbers, and there "
            f"are {len(ids)} tokens in {TOP_IDS!r}. Give one for each."
        )
    if wrong := [one for one in numbers if math.isnan(one) or one > 1e-3]:
        raise DataError(
            f"field {TOP_LOGPROBS!r} {where} has {wrong[0]}, which is no logarithm "
            "of a probability. Give natural logarithms."
        )
    if len(set(ids)) < len(ids):
        raise DataError(f"field {TOP_IDS!r} {where} has a token twice.")
    kept = {
        token: float(one)
        for token, one in zip(ids, numbers, strict=True)
        if one > -math.inf and token < vocab_size
    }
    if len(kept) > MOST_TOP:
        raise DataError(
            f"field {TOP_LOGPROBS!r} {where} has {len(kept)} log-probabilities, "
            f"and at most {MOST_TOP} are read. Keep the most likely ones."
        )
    return kept


def _joined(
    tops: Sequence[dict[int, float]], is_target: Bool[np.ndarray, " T"]
) -> TopLogprobs:
    chosen = [tops[t] for t in np.flatnonzero(is_target).tolist()]
    width = max(map(len, chosen), default=0)
    ids = np.zeros((len(chosen), width), np.int32)
    logprobs = np.full((len(chosen), width), -np.inf, np.float32)
    for row, top in enumerate(chosen):
        ids[row, : len(top)] = list(top.keys())
        logprobs[row, : len(top)] = list(top.values())
    return TopLogprobs(ids, logprobs)


FORMAT = Format(
    kind="distill", fits=fits, convert=convert, decide=decide, gives="distill"
)
