"""Shapes of batches, which come from a small set, as each is compiled."""

import dataclasses

# XLA runs products of a matrix and a single row badly on a GPU: it would first convert
# the whole head of a model to float32, for example.
_LEAST_ROWS = 2
# Smallest prompt and cache that programs are compiled for, in tokens.
_LEAST_PROMPT, _LEAST_CACHE = 16, 64
# Most rows of tokens that one call of `prefill` runs, which bounds its memory.
_MAX_PREFILL_ROWS = 2048
# A chat grows with every answer. These sizes keep its programs the same.
_CHAT_PART, _CHAT_CACHE = 64, 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The shape of a batch.

    Attributes:
        num_rows: Number of sequences.
        part_tokens: Tokens of each prompt that one call of `prefill` runs.
        prompt_tokens: Tokens of each prompt with its padding; a multiple of
            `part_tokens`.
        cache_tokens: Tokens of each sequence that the cache holds.
    """

    num_rows: int
    part_tokens: int
    prompt_tokens: int
    cache_tokens: int


def batch_shape(num_prompts: int, longest: int, max_new_tokens: int) -> BatchShape:
    """Returns the smallest shape for some prompts.

    The number of sequences is a power of two, at least 2. So is the length of the
    prompts, unless they are so long that they run in several parts.

    Args:
        num_prompts: Number of prompts.
        longest: Tokens of the longest prompt.
        max_new_tokens: Most tokens to generate for one of them.
    """
    num_rows = max(1 << (num_prompts - 1).bit_length(), _LEAST_ROWS)
    part = max(_MAX_PREFILL_ROWS // num_rows, _LEAST_PROMPT)
    part = min(part, max(1 << (longest - 1).bit_length(), _LEAST_PROMPT))
    return _shape(num_rows, part, longest, max_new_tokens)


def chat_shape(longest: int, max_new_tokens: int, max_positions: int) -> BatchShape:
    """Returns a shape for one prompt that the next prompts of a chat can share.

    Args:
        longest: Tokens of the prompt.
        max_new_tokens: Most tokens to generate.
        max_positions: Most tokens that the model has positions for.
    """
    least = min(_CHAT_CACHE, max_positions)
    return _shape(_LEAST_ROWS, _CHAT_PART, longest, max_new_tokens, least)


def _shape(
    num_rows: int, part: int, longest: int, max_new_tokens: int, least_cache: int = 0
) -> BatchShape:
    prompt_tokens = -(-longest // part) * part
    return BatchShape(
        num_rows=num_rows,
        part_tokens=part,
        prompt_tokens=prompt_tokens,
        cache_tokens=_cache_tokens(max(prompt_tokens + max_new_tokens, least_cache)),
    )


def _cache_tokens(num_tokens: int) -> int:
    """Returns the size of the cache: 64, 96, 128, 192, 256, 384 and so on."""
    size = _LEAST_CACHE
    while size < num_tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size
