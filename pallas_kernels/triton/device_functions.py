"""Functions that several kernels call."""

import typing

import triton
import triton.language as tl

# Values of the kernels' constant MASK: the mask is recomputed from its words, or given
# as bits. 0: there is none.
HASHED, GIVEN = tl.constexpr(1), tl.constexpr(2)


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


@triton.jit
@typing.no_type_check
def has_bit(first_bits, second_bits, bits, block, columns, K: tl.constexpr):
    """Returns which features of a block's tokens are kept, [tokens, features].

    It is `given_mask.unpack_mask`.

    Args:
        first_bits: The bit of each token in the first word of a feature; 0 if it is in
            the second word.
        second_bits: The same for the second word.
        bits: Pointer to the bits, [T / 32, K].
        block: Index of the tokens' block of 64.
        columns: Indices of the features; those from K on are dropped.
        K: Number of features.
    """
    at, inside = bits + block.to(tl.int64) * (2 * K) + columns, columns < K
    first = tl.load(at, mask=inside, other=0)[None, :]
    second = tl.load(at + K, mask=inside, other=0)[None, :]
    return (first & first_bits[:, None]) | (second & second_bits[:, None]) != 0
