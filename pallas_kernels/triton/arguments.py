"""Settings and masks of up to three projections: arguments, and functions of kernels.

A kernel has three parameters for each of them, because each projection may have arrays
of its own. Where there are fewer projections, the last one's arrays are given again.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.given_mask import GivenMask, token_masks
from jaxlora.pallas_kernels.projection import KernelSettings

MAX_PROJECTIONS = 3
# Values of the kernels' constant MASK: the mask is recomputed from its words, or given
# as bits. 0: there is none.
HASHED, GIVEN = tl.constexpr(1), tl.constexpr(2)


def padded(values: Sequence) -> list:
    """Repeats the last of one to three values until there are three."""
    return [*values, *[values[-1]] * (MAX_PROJECTIONS - len(values))]


def settings_arguments(
    settings: Sequence[KernelSettings], *names: str
) -> list[jax.Array]:
    """Returns the index of each projection's row, and the named rows of settings.

    A kernel takes them as `row_0`, `row_1`, `row_2`, [1] each, and as three parameters
    for each name, such as `factor_0`, the factor of each slot, or `chunks_0`, the
    number of chunks of ranks of each slot, [rows, G].
    """
    return [
        array
        for name in ("index", *names)
        for array in padded([getattr(one, name) for one in settings])
    ]


def mask_arguments(
    settings: Sequence[KernelSettings],
    masks: Sequence[MaskWords | GivenMask],
    unused: jax.Array,
) -> list[jax.Array]:
    """Returns the thresholds, and the indices and words of tokens and of features.

    A kernel takes three parameters each: `threshold_0`, the threshold of each slot,
    [rows, G]; `place_0`, the row of the projection in its words, [1]; `token_0`, the
    words of the tokens, [places, T / 64, 2, 64]; and `feature_0`, those of the
    features, [places, FG, F], of which slot g has row `g % FG`. If masks are given,
    `token_0` is the bit of each token in the two words of a block, [2, 64], and
    `feature_0` the bits, [T / 32, F]. Where there is nothing to give, a kernel takes
    `unused`.
    """
    words = [mask for mask in masks if isinstance(mask, MaskWords)]
    given = [mask.bits for mask in masks if isinstance(mask, GivenMask)]
    if given:
        tokens = [jnp.asarray(token_masks())] * MAX_PROJECTIONS
        return [*[unused] * 2 * MAX_PROJECTIONS, *tokens, *padded(given)]
    if not words:
        return [unused] * 4 * MAX_PROJECTIONS
    return [
        *padded([one.threshold for one in settings]),
        *padded([one.index for one in words]),
        *padded([one.token for one in words]),
        *padded([one.feature for one in words]),
    ]


def mask_constants(masks: Sequence[MaskWords | GivenMask]) -> dict[str, int]:
    """Returns the kind of the masks, and the sizes of the features' words."""
    if not masks:
        return {"MASK": 0, "F": 0, "FG": 1}
    first = masks[0]
    if isinstance(first, GivenMask):
        return {"MASK": GIVEN.value, "F": first.bits.shape[1], "FG": 1}
    _, num_rows, num_features = first.feature.shape
    return {"MASK": HASHED.value, "F": num_features, "FG": num_rows}


# ---- functions that kernels call -----------------------------------------------------


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
