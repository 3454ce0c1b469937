"""Texts as tokens, long ones no further than their first tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxlora.data.tokenizer import Encoded, Tokenizer

# A text of at most so many characters is encoded whole. The library takes about 200
# bytes for a character while it does so.
_WHOLE_CHARS = 2**17
_MOST_WHOLE_CHARS = 2**20
# Characters that are encoded at once, in one text or in many.
_BATCH_CHARS = 2**18
_CHARS_PER_TOKEN = 8  # a first guess; it is doubled until there are enough tokens
_MARGIN_CHARS = 64


class StartEncoder:
    """Encodes the starts of texts: as many tokens as are asked for, or all.

    The tokens are those of the whole text. A tokenizer may decide on a token by what
    follows it, so a text that is cut is encoded with several ends: a token counts once
    none of them changes it. Both BPE and unigram models encode a text like one of its
    cuts at a distance of at most one token from any place. What no model sees is
    settled by a margin behind the last token: an added token that the cut divides, and
    spaces that an added token takes to itself.

    Attributes:
        whole_chars: Texts of at most so many characters are encoded whole.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_tokens: int, *, whole_chars: int | None = None
    ):
        """Takes a tokenizer.

        Args:
            tokenizer: The tokenizer.
            num_tokens: Tokens of a text that matter; one more is given.
            whole_chars: Texts of so many characters are encoded whole; None: as many
                as take little memory.
        """
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens + 1
        if whole_chars is None:
            # A cut text is encoded some ten times, which is no gain for a short one.
            most = min(16 * _CHARS_PER_TOKEN * self._num_tokens, _MOST_WHOLE_CHARS)
            whole_chars = max(_WHOLE_CHARS, most)
        self.whole_chars = whole_chars

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts: whole, or at least `num_tokens` + 1 tokens of each.

        No special tokens are put around them.
        """
        out: list[Encoded] = []
        for is_long, group in itertools.groupby(texts, self._is_long):
            if is_long:
                out += map(self._encode_start, group)
            else:
                for batch in _batches(group):
                    out += self._tokenizer.encode_batch(batch)
        return out

    def _is_long(self, text: str) -> bool:
        return len(text) > self.whole_chars

    def _encode_start(self, text: str) -> Encoded:
        reach = self._tokenizer.longest_token
        num_chars = _CHARS_PER_TOKEN * self._num_tokens + _MARGIN_CHARS + 2 * reach
        while num_chars < len(text):
            cut = text[:num_chars]
            (encoded,) = self._tokenizer.encode_batch([cut])
            if len(encoded.ids) >= self._num_tokens:
                first = Encoded(*(array[: self._num_tokens] for array in encoded))
                end = _behind_spaces(cut, int(first.spans.max()))
                end += _MARGIN_CHARS + 2 * reach
                if end <= len(cut) and self._is_settled(first, cut[:end], reach):
                    return first
            num_chars *= 2
        (encoded,) = self._tokenizer.encode_batch([text])
        return encoded

    def _is_settled(self, first: Encoded, text: str, reach: int) -> bool:
        """Whether `text` begins with the tokens `first` wherever it is cut."""
        for texts in _batches(text[: len(text) - step] for step in _steps(reach)):
            for other in self._tokenizer.encode_batch(texts):
                for array, wanted in zip(other, first, strict=True):
                    if not np.array_equal(array[: self._num_tokens], wanted):
                        return False
        return True


def _behind_spaces(text: str, at: int) -> int:
    """Index behind the first character from `at` on that is no space."""
    return len(text) - len(text[at:].lstrip()) + 1


def _steps(most: int) -> Iterator[int]:
    """0, 1, 2, 4, 7, 11, ..., `most`, each less than twice as far as the one before.

    Where a text repeats itself, and its tokens depend on how often it does, two of
    these cuts leave another number of repetitions.
    """
    step = 0
    while step < most:
        yield step
        step += 1 + step // 2
    yield most


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """`texts` in order, so many at a time that they take little memory."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and num_chars + len(text) > _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch
