"""Encodes texts, and long texts only as far as the first needed tokens."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from jaxlora.data.tokenizer import Encoded, Tokenizer

# Texts of at most this many characters are encoded completely, which takes about 200
# bytes of memory per character.
_WHOLE_CHARS = 2**17
_MOST_WHOLE_CHARS = 2**20
# Maximum number of characters in one call of the tokenizer, unless a text is longer.
_BATCH_CHARS = 2**18
_CHARS_PER_TOKEN = 8  # a first guess, doubled until there are enough tokens
_MARGIN_CHARS = 64


class PrefixEncoder:
    """Encodes a prefix of each text that has at least the requested number of tokens.

    The tokens are the same as those of the complete text. A token may depend on the
    characters after it, so a long text is cut at several places, and each of the
    resulting prefixes is encoded. A token is final if all of these encodings agree on
    it. This is sufficient for BPE and unigram models, because within one token of any
    position there is a cut that does not change the encoding. A margin after the last
    token covers the steps before the model: an added token that is divided by the cut,
    and spaces that an added token strips.

    Attributes:
        whole_chars: Texts of at most this many characters are encoded completely.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_tokens: int, *, whole_chars: int | None = None
    ):
        """Makes an encoder.

        Args:
            tokenizer: The tokenizer.
            num_tokens: Number of first tokens that are needed; one more is returned.
            whole_chars: Texts of at most this many characters are encoded completely.
                None selects a default that takes little memory.
        """
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens + 1
        if whole_chars is None:
            # A cut text is encoded about ten times, which costs more for a short text.
            most = min(16 * _CHARS_PER_TOKEN * self._num_tokens, _MOST_WHOLE_CHARS)
            whole_chars = max(_WHOLE_CHARS, most)
        self.whole_chars = whole_chars

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes each text completely, or at least its first `num_tokens` + 1 tokens.

        No special tokens are added.
        """
        return self._encode(texts, self._tokenizer.encode_batch, self._encode_start)

    def encode_ids(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Encodes texts like `encode_batch`, but returns only the ids, and faster."""
        encode_start = lambda text: self._encode_start(text).ids
        return self._encode(texts, self._tokenizer.encode_ids, encode_start)

    def _encode[E](
        self,
        texts: Sequence[str],
        encode_batch: Callable[[Sequence[str]], list[E]],
        encode_long: Callable[[str], E],
    ) -> list[E]:
        out: list[E] = []
        for is_long, group in itertools.groupby(texts, self._is_long):
            if is_long:
                out += map(encode_long, group)
            else:
                for batch in _batches(group):
                    out += encode_batch(batch)
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
        """Whether `text` begins with the tokens `first` at all of the tested cuts."""
        for texts in _batches(text[: len(text) - step] for step in _steps(reach)):
            for other in self._tokenizer.encode_batch(texts):
                for array, wanted in zip(other, first, strict=True):
                    if not np.array_equal(array[: self._num_tokens], wanted):
                        return False
        return True


def _behind_spaces(text: str, at: int) -> int:
    """Returns the index after the first character from `at` on that is not a space."""
    return len(text) - len(text[at:].lstrip()) + 1


def _steps(most: int) -> Iterator[int]:
    """Yields 0, 1, 2, 4, 7, 11, ..., `most`, each less than twice the one before.

    If a text is periodic and its tokens depend on the number of periods, two of these
    cuts leave different numbers of periods.
    """
    step = 0
    while step < most:
        yield step
        step += 1 + step // 2
    yield most


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields `texts` in order, in batches that take little memory."""
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
