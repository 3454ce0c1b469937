"""Kernel arguments: the slots' settings and the masks of up to three projections.

A kernel has three parameters for each of them, because each projection may have arrays
of its own. Where there are fewer projections, the last one's arrays are given again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.given_mask import GivenMask, token_masks
from jaxlora.pallas_kernels.settings import KernelSettings
from jaxlora.pallas_kernels.triton.device_functions import GIVEN, HASHED

MAX_PROJECTIONS = 3


def padded(values: Sequence) -> list:
    """Repeats the last of one to three values until there are three."""
    return [*values, *[values[-1]] * (MAX_PROJECTIONS - len(values))]


def settings_arguments(
    settings: Sequence[KernelSettings], *names: str
) -> list[jax.Array]:
    """Returns the index of each projection's row, and the named rows of settings.

    A kernel takes them as `row_0`, `row_1`, `row_2`, and three parameters per name.
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

    A kernel takes three parameters each. The words of given masks take the place of the
    features', and the bit of each token in them that of the tokens'. Where there is
    nothing to give, a kernel takes `unused`.
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
    """Returns the kind of the masks, and the number of features that they are for."""
    if not masks:
        return {"MASK": 0, "F": 0}
    first = masks[0]
    if isinstance(first, GivenMask):
        return {"MASK": GIVEN.value, "F": first.bits.shape[1]}
    return {"MASK": HASHED.value, "F": first.feature.shape[2]}
