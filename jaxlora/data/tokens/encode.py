"""Encodes rendered records as token ids, and marks the target tokens."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from jaxlora.config import DataConfig
from jaxlora.data.formats.example import Rendered, Span
from jaxlora.data.tokenizer import Encoded, Tokenizer
from jaxlora.data.tokens.boundary import (
    BoundaryEncoder,
    BoundaryText,
)
from jaxlora.errors import DataError
from jaxlora.objectives.sample import TokenizedSample

_Ids = Int32[np.ndarray, "..."]
_Flags = Bool[np.ndarray, "..."]


class Encoder:
    """Encodes rendered records, many at once, and marks their target tokens.

    A prompt has the same tokens as on its own. The tokens of the completion continue
    them, without the space that a tokenizer may put before the first word of a text
    (`boundary.py`). The same is true of each answer in a chat. A token at the end of a
    span of target characters is a target if it begins within the span.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        """Makes an encoder.

        Args:
            data: Provides the settings `loss_on` and `append_eos`.
            tokenizer: The base model's tokenizer.
        """
        self._data = data
        self._tokenizer = tokenizer
        self._head = np.array(tokenizer.prefix_ids, np.int32)
        self._boundaries = BoundaryEncoder(tokenizer.encode_batch)
        self._marks_start = self._boundaries.marks_start

    def __call__(self, texts: Sequence[Rendered]) -> list[TokenizedSample | DataError]:
        """Encodes each text; the result for one without tokens is its error.

        Raises:
            DataError: `append_eos` is set, and the tokenizer has no end-of-sequence
                token.
        """
        results: list[TokenizedSample | DataError] = [DataError("")] * len(texts)
        separate: dict[int, Rendered] = {}
        joined: dict[int, Rendered] = {}
        for i, text in enumerate(texts):
            if text.tokens is not None:
                results[i] = text.tokens
            elif text.prompt is not None and not self._marks_start:
                separate[i] = text
            else:
                joined[i] = text
        pairs = self._separate(list(separate.values()))
        for i, tokens in zip(separate, pairs, strict=True):
            results[i] = tokens
        bounded = list(map(_with_boundaries, joined.values()))
        encodings = self._boundaries.encode(bounded) if bounded else []
        for (i, text), encoded in zip(joined.items(), encodings, strict=True):
            is_bad = isinstance(encoded, DataError)
            results[i] = encoded if is_bad else self._mark(text, encoded)
        return results

    def _separate(self, pairs: Sequence[Rendered]) -> list[TokenizedSample]:
        """Encodes prompts and completions separately, which needs no spans."""
        texts = [text for pair in pairs for text in (pair.prompt or "", pair.text)]
        parts = self._tokenizer.encode_ids(texts)
        for i, part in enumerate(parts):
            # A completion begins a text only if the prompt is empty.
            if not i % 2 or not len(parts[i - 1]):
                parts[i] = part[self._tokenizer.num_given(part) :]
        joined = join_pairs(
            parts,
            self._head,
            self._eos_id() if texts and self._data.append_eos else None,
            learns_all=self._data.loss_on == "all",
            has_end=[
                self._tokenizer.has_end(prompt + completion)
                for prompt, completion in itertools.batched(texts, 2)
            ],
        )
        return [TokenizedSample(*sample) for sample in joined]

    def _mark(self, text: Rendered, encoded: Encoded) -> TokenizedSample:
        weights = None
        if text.prompt is not None:
            ids, is_target = self._pair(text.prompt, text.text, encoded)
        elif text.target_spans is None:
            ids, is_target = self._plain(text.text, encoded.ids)
        else:
            ids, is_target = encoded.ids, _within(encoded, text.target_spans)
            if text.weights:
                weights = np.ones(len(ids), np.float32)
                pairs = zip(text.target_spans, text.weights, strict=True)
                for span, weight in pairs:
                    weights[_within(encoded, [span])] = weight
        is_target[:1] = False
        return TokenizedSample(ids, is_target, weights=weights)

    def _pair(
        self, prompt: str, completion: str, encoded: Encoded
    ) -> tuple[_Ids, _Flags]:
        # The tokenizer's suffix ids are left out, because the text does not end here.
        head = self._head
        given = self._tokenizer.num_given(encoded.ids)
        text = self._ended(prompt + completion, encoded.ids[given:])
        ids = np.concatenate([head, text])
        is_target = np.ones(len(ids), bool)
        if self._data.loss_on == "all":
            return ids, is_target
        is_learned = encoded.spans[given:, 0] >= len(prompt)
        is_target[: len(head)] = False
        is_target[len(head) : len(head) + len(is_learned)] = is_learned
        return ids, is_target

    def _plain(self, text: str, ids: _Ids) -> tuple[_Ids, _Flags]:
        if not len(ids):
            return ids, np.zeros(0, bool)
        suffix = np.array(self._tokenizer.suffix_ids, np.int32)
        if self._tokenizer.has_end(text):
            suffix = suffix[:0]
        given = self._tokenizer.num_given(ids)
        ids = np.concatenate([self._head, ids[given:], suffix])
        ids = self._ended(text, ids)
        return ids, np.ones(len(ids), bool)

    def _ended(self, text: str, ids: _Ids) -> _Ids:
        """Appends the end-of-sequence token if it is configured and missing.

        A text that was rendered before ends with the end of its last turn, which is
        another token in many models. Its chats go on after that, without more.
        """
        if not self._data.append_eos:
            return ids
        eos = self._eos_id()
        if (len(ids) and ids[-1] == eos) or self._tokenizer.has_end(text):
            return ids
        return np.concatenate([ids, np.array([eos], np.int32)])

    def _eos_id(self) -> int:
        if self._tokenizer.eos_id is None:
            raise DataError(
                f"{self._data.path}: append_eos=true, but the tokenizer has no "
                "end-of-sequence token. Set eos_token in tokenizer_config.json, or "
                "data.append_eos to false."
            )
        return self._tokenizer.eos_id


def join_pairs(
    parts: Sequence[_Ids],
    head: _Ids,
    eos: int | None,
    *,
    learns_all: bool,
    has_end: Sequence[bool] | bool = False,
) -> list[tuple[_Ids, _Flags]]:
    """Joins head, prompt, completion and end-of-sequence token of many samples.

    All samples are joined in one array, because separate arrays would be slow.

    Args:
        parts: Token ids of each prompt and completion, in turn.
        head: Token ids before each prompt.
        eos: Token to append to each sample that does not end with it; None for none.
        learns_all: Whether prompts are targets of the loss, too.
        has_end: Whether each sample, or every one, needs no such token.

    Returns:
        For each sample, its token ids, and whether each of them is a target.
    """
    text = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    lengths = np.array([len(part) for part in parts], int).reshape(-1, 2)
    last = np.append(text, -1)[lengths.sum(axis=1).cumsum() - 1]
    ends_with_eos = (lengths.any(axis=1) & (last == eos)) | np.array(has_end, bool)
    has_eos = np.full(len(lengths), eos is not None) & ~ends_with_eos
    # The head counts as part of the prompt, and the appended token of the completion.
    lengths += np.stack([np.full(len(lengths), len(head)), has_eos], axis=1)
    offsets = np.concatenate([[0], lengths.sum(axis=1).cumsum()])
    starts, ends = offsets[:-1], offsets[1:]

    token_ids = np.empty(offsets[-1], np.int32)
    is_text = np.ones(len(token_ids), bool)
    head_rows, eos_rows = starts[:, None] + np.arange(len(head)), ends[has_eos] - 1
    token_ids[head_rows], is_text[head_rows] = head, False
    token_ids[eos_rows], is_text[eos_rows] = -1 if eos is None else eos, False
    token_ids[is_text] = text

    is_target = np.repeat(np.tile([learns_all, True], len(lengths)), lengths.ravel())
    is_target[starts[starts < ends]] = False  # no token predicts the first one
    return [
        (token_ids[start:end], is_target[start:end])
        for start, end in itertools.pairwise(offsets.tolist())
    ]


def _with_boundaries(text: Rendered) -> BoundaryText:
    if text.prompt is not None:
        return BoundaryText(text.prompt + text.text, (len(text.prompt),))
    return BoundaryText(text.text, tuple(start for start, _ in text.target_spans or ()))


def _within(encoded: Encoded, spans: Iterable[Span]) -> _Flags:
    """Marks the tokens that begin within a span."""
    is_target = np.zeros(len(encoded.ids), bool)
    first = encoded.spans[:, 0]
    for start, end in spans:
        is_target |= (first >= start) & (first < end)
    return is_target
