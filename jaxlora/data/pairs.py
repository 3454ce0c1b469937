"""Joins the token ids of prompts and completions that were encoded separately."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

_Ids = Int32[np.ndarray, "..."]
_Flags = Bool[np.ndarray, "..."]


def join_pairs(
    parts: Sequence[_Ids], head: _Ids, eos: int | None, *, learns_all: bool
) -> list[tuple[_Ids, _Flags]]:
    """Joins head, prompt, completion and end-of-sequence token of many samples.

    All samples are joined in one array, because separate arrays would be slow.

    Args:
        parts: Token ids of each prompt and completion, in turn.
        head: Token ids before each prompt.
        eos: Token to append to each sample that does not end with it; None for none.
        learns_all: Whether prompts are targets of the loss, too.

    Returns:
        For each sample, its token ids, and whether each of them is a target.
    """
    text = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    lengths = np.array([len(part) for part in parts], int).reshape(-1, 2)
    last = np.append(text, -1)[lengths.sum(axis=1).cumsum() - 1]
    ends_with_eos = lengths.any(axis=1) & (last == eos)
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
