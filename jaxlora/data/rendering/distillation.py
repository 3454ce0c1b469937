"""Reads records of tokens with the log-probabilities that a teacher gave them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from jaxlora.config import DataConfig
from jaxlora.data.records.read import Record
from jaxlora.data.rendering.fields import missing_field
from jaxlora.data.rendering.kinds import IDS, TOP_IDS, TOP_LOGPROBS
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.errors import DataError
from jaxlora.objectives.distill import MOST_TOP
from jaxlora.objectives.sample import TopLogprobs

LABELS = "labels"  # which may be missing
_IGNORED = -100  # label of a token that is no target
# Settings that say how text becomes tokens.
_OF_TEXT = (
    *("chat", "chat_template", "chat_template_kwargs", "system", "roles", "loss_on"),
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GivenTokens:
    """A record that is tokens already.

    Attributes:
        token_ids: The tokens.
        is_target: Whether each token is a target of the loss.
        top: The teacher's most likely tokens in the place of each target.
    """

    token_ids: Int32[np.ndarray, " T"]
    is_target: Bool[np.ndarray, " T"]
    top: TopLogprobs


class TokensRenderer:
    """Reads the tokens of records, and what the teacher says of each.

    Row t of the teacher's lists is what it predicts in the place of token t, from those
    before it. A token without such a prediction is no target, and neither is one whose
    label is -100, if there are labels. Tokens that the tokenizer does not have, as
    teachers with padded heads may give, are left out of the lists.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        for name in _OF_TEXT:
            if getattr(data, name) != DataConfig.model_fields[name].default:
                raise DataError(
                    f"{name} says how text becomes tokens, and these records are "
                    f"tokens already. Remove data.{name}."
                )
        self._vocab_size = tokenizer.vocab_size

    def __call__(self, records: Sequence[Record]) -> list[GivenTokens | DataError]:
        return list(map(self._read, records))

    def _read(self, record: Record) -> GivenTokens | DataError:
        for field in (IDS, TOP_IDS, TOP_LOGPROBS):
            if field not in record:
                return missing_field(field, record)
        try:
            return self._checked(record)
        except DataError as error:
            return error

    def _checked(self, record: Record) -> GivenTokens:
        ids = self._ids(IDS, record[IDS])
        if wrong := [one for one in ids if one >= self._vocab_size]:
            raise DataError(
                f"field {IDS!r} has token {wrong[0]}, and the tokenizer has "
                f"{self._vocab_size}. Use records of a teacher with this tokenizer."
            )
        labels = record.get(LABELS)
        columns = {name: record[name] for name in (TOP_IDS, TOP_LOGPROBS)}
        if labels is not None:
            columns[LABELS] = labels
        for name, values in columns.items():
            num = len(values) if isinstance(values, list) else None
            if num != len(ids):
                what = "is no list" if num is None else f"has {num} items"
                raise DataError(
                    f"field {name!r} {what}, and there are {len(ids)} tokens in "
                    f"{IDS!r}. Give one item for each token."
                )
        tops = [
            self._top(t, *pair)
            for t, pair in enumerate(
                zip(record[TOP_IDS], record[TOP_LOGPROBS], strict=True)
            )
        ]
        is_target = np.array([len(top) > 0 for top in tops], bool)
        is_target[:1] = False
        if labels is not None:
            is_target &= np.array([label != _IGNORED for label in labels], bool)
        tokens = np.array(ids, np.int32)
        return GivenTokens(tokens, is_target, _joined(tops, is_target))

    def _ids(self, field: str, values: Any) -> list[int]:
        is_list = isinstance(values, list)
        if not is_list or not all(type(one) is int and one >= 0 for one in values):
            raise DataError(
                f"field {field!r} is {values!r:.80}. Write a list of tokens."
            )
        return values

    def _top(self, t: int, ids: Any, logprobs: Any) -> dict[int, float]:
        """Returns the log-probabilities in the place of token t, by token."""
        ids, logprobs = ids or [], logprobs or []
        where = f"of token {t} (from 0)"
        ids = self._ids(f"{TOP_IDS} {where}", ids)
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
        found = {
            token: float(one)
            for token, one in zip(ids, numbers, strict=True)
            if one > -math.inf and token < self._vocab_size
        }
        if len(set(ids)) < len(ids):
            raise DataError(f"field {TOP_IDS!r} {where} has a token twice.")
        if len(found) > MOST_TOP:
            raise DataError(
                f"field {TOP_LOGPROBS!r} {where} has {len(found)} log-probabilities, "
                f"and at most {MOST_TOP} are read. Keep the most likely ones."
            )
        return found


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
