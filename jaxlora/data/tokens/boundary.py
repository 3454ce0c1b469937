"""Encodes texts with boundaries, at which the model takes over from a prompt.

At inference, the text before a boundary is encoded on its own, and the model continues
from its tokens. Training must show the same tokens before the boundary, followed by
tokens that continue them. A text may have several boundaries. The rule for each is:

- If no token of the complete text crosses the boundary, the ids of the complete text
  are used.
- If a token crosses the boundary, and the tokens before it are those of the prompt on
  its own, the model has to produce that token, so it counts as after the boundary.
  (Some normalizers drop the space at the end of a prompt.)
- Otherwise the text is split at the boundary. The prompt is encoded on its own. The
  rest is encoded as the continuation of another text, without the space that a
  tokenizer may put before the first word of a text.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxlora.data.tokenizer import Encoded
from jaxlora.errors import DataError

# Texts that a continuation is appended to. They differ in kind, so that for any given
# continuation at least one of them does not merge with it.
_ANCHORS = ("\n", "a", "0", ".", "é", "中", ")")
_PROBES = ("a", " a", "A", "1", "\n", "(", "é", "中")


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryText:
    """A text, and the positions at which the model takes over.

    Attributes:
        text: The complete text.
        boundaries: Index of the first character of each part that the model writes, in
            ascending order.
    """

    text: str
    boundaries: tuple[int, ...]


class BoundaryEncoder:
    """Encodes texts with boundaries by the rule in the module's docstring.

    Attributes:
        marks_start: Whether the tokenizer encodes the start of a text differently.
            Otherwise a prompt and its completion can be encoded separately.
    """

    def __init__(self, encode_batch: Callable[[Sequence[str]], list[Encoded]]):
        """Tests how the tokenizer treats the start of a text.

        Args:
            encode_batch: `Tokenizer.encode_batch`, or a function with its meaning.
        """
        self._encode_batch = encode_batch
        self.marks_start = self._does_mark_start()

    def encode(self, texts: Sequence[BoundaryText]) -> list[Encoded | DataError]:
        """Token ids and spans of each text, without special tokens around it.

        A token that counts as after a boundary although it begins before it has a span
        that begins at the boundary.
        """
        encoded = self._encode_batch([text.text for text in texts])
        return list(map(self._settle, texts, encoded))

    def _settle(self, text: BoundaryText, encoded: Encoded) -> Encoded | DataError:
        """Applies the rule to the tokens of `encoded` that cross a boundary."""
        cuts, spans = [], encoded.spans
        for boundary in text.boundaries:
            if _is_boundary(encoded, boundary):
                continue
            (prompt,) = self._encode_batch([text.text[:boundary]])
            num_prompt = len(prompt.ids)
            if np.array_equal(encoded.ids[:num_prompt], prompt.ids):
                spans = spans.copy()
                after = spans[num_prompt:]
                after[:] = np.maximum(after, boundary)
            else:
                cuts.append(boundary)
        if not cuts:
            return Encoded(encoded.ids, spans)
        (_, first), *others = _cut(text.text, cuts)
        pieces = [(0, self._encode_batch([first])[0])]
        for at, part in others:
            continued = self._continue(part)
            if continued is None:
                return DataError(
                    f"the tokenizer merges {part!r:.80} with any text before it, so "
                    "it cannot be told where its tokens begin. Move spaces from the "
                    "end of the prompt to the start of the completion."
                )
            pieces.append((at, continued))
        return _join(pieces)

    def _continue(self, text: str) -> Encoded | None:
        """Tokens of `text` as the continuation of another; None if there are none."""
        if not self.marks_start:
            return self._encode_batch([text])[0]
        for anchor in _ANCHORS:
            (whole,) = self._encode_batch([anchor + text])
            if _is_boundary(whole, len(anchor)):
                is_after = whole.spans[:, 0] >= len(anchor)
                return Encoded(whole.ids[is_after], whole.spans[is_after] - len(anchor))
        return None

    def _does_mark_start(self) -> bool:
        """Whether the same characters are other tokens at the start of a text."""
        for anchor, probe in itertools.product(_ANCHORS, _PROBES):
            whole, alone = self._encode_batch([anchor + probe, probe])
            if not _is_boundary(whole, len(anchor)):
                continue
            after = whole.ids[whole.spans[:, 0] >= len(anchor)]
            if not np.array_equal(after, alone.ids):
                return True
        return False


def _is_boundary(encoded: Encoded, boundary: int) -> bool:
    """Whether no token crosses the boundary."""
    first, last = encoded.spans[:, 0], encoded.spans[:, 1]
    return not bool(((first < boundary) & (boundary < last)).any())


def _cut(text: str, boundaries: Sequence[int]) -> list[tuple[int, str]]:
    """Returns the parts of `text` between boundaries, each with its start index."""
    places = [0, *boundaries, len(text)]
    return [(start, text[start:end]) for start, end in itertools.pairwise(places)]


def _join(pieces: Sequence[tuple[int, Encoded]]) -> Encoded:
    """Joins the encodings of parts, each given with its start index."""
    if len(pieces) == 1:
        return pieces[0][1]
    return Encoded(
        np.concatenate([piece.ids for _, piece in pieces]),
        np.concatenate([piece.spans + np.int32(at) for at, piece in pieces]),
    )
