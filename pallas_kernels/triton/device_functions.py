"""Functions that several kernels call."""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def choose(p, first, second, third):
    """Returns the pointer of projection p."""
    return tl.where(p == 0, first, tl.where(p == 1, second, third))


@triton.jit
@typing.no_type_check
def load_tokens(token, place, rows, T: tl.constexpr):
    """Loads the multipliers and offsets of token rows' masks.

    Args:
        token: Pointer to the words of P projections, [P, T / 64, 2, 64].
        place: Index of the projection among the P.
        rows: Indices of the rows.
        T: Number of token rows.
    """
    at = token + place * (2 * T) + rows // 64 * 128 + rows % 64
    return tl.load(at), tl.load(at + 64)


@triton.jit
@typing.no_type_check
def is_kept(multipliers, offsets, words, threshold):
    """Returns which features of the tokens are kept, [tokens, features].

    It is `dropout.keep_mask`, from its words.

    Args:
        multipliers: One for each token.
        offsets: One for each token.
        words: One for each feature.
        threshold: A feature is dropped if its random word is below.
    """
    return multipliers[:, None] * words[None, :] + offsets[:, None] >= threshold
