"""How kernels take the slots' settings and the mask words of up to three projections.

A kernel has three parameters for each of them, because each projection may have arrays
of its own. Where there are fewer projections, the last one's arrays are given again.
"""

from collections.abc import Sequence

import jax

from jaxlora.pallas_kernels.dropout import MaskWords
from jaxlora.pallas_kernels.settings import KernelSettings

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
    settings: Sequence[KernelSettings], words: Sequence[MaskWords], unused: jax.Array
) -> list[jax.Array]:
    """Returns the thresholds, and the indices and words of tokens and of features.

    A kernel takes three parameters each. Without words it takes `unused` for all.
    """
    if not words:
        return [unused] * 4 * MAX_PROJECTIONS
    return [
        *padded([one.threshold for one in settings]),
        *padded([one.index for one in words]),
        *padded([one.token for one in words]),
        *padded([one.feature for one in words]),
    ]


def mask_constants(words: Sequence[MaskWords]) -> dict[str, int]:
    """Returns whether there are masks, and for how many features there are words."""
    if not words:
        return {"MASKED": False, "F": 0}
    return {"MASKED": True, "F": words[0].feature.shape[2]}
