"""Shows which text of a sample is trained on."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from jaxlora.data.tokenizer import Tokenizer

# A sample in the log is shown up to so many tokens, and each part of it, trained or
# not, up to so many characters.
_MAX_TOKENS = 10_000
_MAX_CHARS = 160


def marked_parts(
    tokenizer: Tokenizer,
    token_ids: Int32[np.ndarray, " T"],
    is_target: Bool[np.ndarray, " T"],
) -> Iterator[tuple[bool, str]]:
    """Yields the text of a sample in parts that are trained on, and that are not.

    Args:
        tokenizer: The tokenizer of the sample.
        token_ids: The tokens.
        is_target: Whether each token is trained on.

    Yields:
        Whether the part is trained on, and its text. The texts together are the text of
        all tokens.
    """
    if not len(token_ids):
        return
    edges = np.flatnonzero(np.diff(is_target, prepend=not is_target[0])).tolist()
    text = ""
    for start, end in zip(edges, [*edges[1:], len(token_ids)], strict=True):
        # A part alone may have other spaces: some decoders drop the first one.
        whole = tokenizer.decode(token_ids[:end])
        yield bool(is_target[start]), whole[len(text) :]
        text = whole


def mark(parts: Sequence[tuple[bool, str]], max_chars: int | None = None) -> str:
    """Joins the parts of a sample, with [[ and ]] around those that are trained on.

    Args:
        parts: The parts.
        max_chars: Length from which a part is shortened in its middle; None: never.
    """
    texts = [(is_trained, _shorten(text, max_chars)) for is_trained, text in parts]
    return "".join(f"[[{text}]]" if is_trained else text for is_trained, text in texts)


def _shorten(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} ... {text[-half:]}"


def describe_sample(
    tokenizer: Tokenizer,
    token_ids: Int32[np.ndarray, " T"],
    is_target: Bool[np.ndarray, " T"],
) -> str:
    """Describes a sample in one line, with [[ ]] around the text that is trained on."""
    shown = token_ids[:_MAX_TOKENS], is_target[:_MAX_TOKENS]
    return repr(mark(list(marked_parts(tokenizer, *shown)), _MAX_CHARS))
