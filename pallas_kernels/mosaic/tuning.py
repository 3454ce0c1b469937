"""Tile choices: a table of measured ones, and a rule for everything else."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from importlib import resources

from jaxlora.pallas_kernels.mosaic.outer import TILE_COLUMNS

MAX_SPLITS = 16
_TABLE = "tuning.json"


# Microseconds of a step of 64, as measured on an H200: of a wide product, of a gradient
# beside one and what a mask adds to it, and of a gradient on all multiprocessors.
_WIDE_STEP, _BESIDE_STEP, _BESIDE_MASK, _OUTER_STEP = 0.67, 0.36, 0.19, 0.7
_MOST_APART = 8


@dataclasses.dataclass(frozen=True)
class Beside:
    """How gradients share a launch with a wide product.

    Attributes:
        apart: Multiprocessors that do gradients only.
        items: How many items of each gradient they do; the others do the rest when
            they are done with the product.
    """

    apart: int
    items: tuple[int, ...]


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("jaxlora.pallas_kernels.mosaic").joinpath(_TABLE).read_text()
    return json.loads(text)


def band_for(device: str, t: int, k: int, n: int) -> int:
    """Tiles of rows visited together by the product of T x K with K x N."""
    measured = _table().get(device, {}).get(f"expand {t} {k} {n}")
    return measured["band"] if measured else 8


def splits_for(device: str, features: int, num_sms: int) -> int:
    """Parts of an adapter's rows, for gradients of `features` x rank.

    Depends on nothing of the batch or the other adapters: the order of a sum must not.
    """
    measured = _table().get(device, {}).get(f"outer {features}")
    if measured:
        return measured["splits"]
    tiles = math.ceil(features / TILE_COLUMNS)
    enough = 0.9 * num_sms  # as many items as keep the multiprocessors busy
    powers = (2**i for i in range(MAX_SPLITS.bit_length()))
    return next((s for s in powers if tiles * s >= enough), MAX_SPLITS)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What a gradient costs.

    Attributes:
        items: How many.
        steps: Steps of 64 rows of an item, about.
        masks: Masks that a step makes.
    """

    items: int
    steps: float
    masks: int


def beside(
    wide_items: int, wide_steps: int, gradients: Sequence[Gradient], num_sms: int
) -> Beside:
    """The sharing that should end first.

    A product's tiles come in rounds, one a multiprocessor, and often as many rounds
    are enough with a few multiprocessors less.

    Args:
        wide_items: Tiles of the product.
        wide_steps: Steps of 64 of each.
        gradients: What to do beside it, the first first.
        num_sms: Multiprocessors.
    """

    options = [
        _shared(wide_items, wide_steps * _WIDE_STEP, gradients, num_sms, apart, whole)
        for apart in range(min(_MOST_APART, num_sms - 1) + 1)
        for whole in itertools.product((False, True), repeat=len(gradients))
    ]
    return min(options, key=lambda option: option[0])[1]


def _shared(
    tiles: int,
    tile_time: float,
    gradients: Sequence[Gradient],
    num_sms: int,
    apart: int,
    whole: tuple[bool, ...],
) -> tuple[float, Beside]:
    """When a sharing ends, and it: of each gradient beside all items, or what fits."""
    main = num_sms - apart
    time = math.ceil(tiles / main) * tile_time
    busy, rest, taken = 0.0, 0.0, []
    for one, all_items in zip(gradients, whole, strict=True):
        each = one.steps * (_BESIDE_STEP + _BESIDE_MASK * one.masks)
        fitting = apart * int(max(time - busy, 0) / each)
        items = one.items if all_items and apart else min(one.items, fitting)
        busy += math.ceil(items / max(apart, 1)) * each
        rest += one.steps * _rounds_time(one.items - items, main)
        taken.append(items)
    return max(time + rest, busy), Beside(apart, tuple(taken))


def _rounds_time(items: int, main: int) -> float:
    """Time for a step of each item, all multiprocessors sharing the device's memory."""
    rounds, last = divmod(items, main)
    busy_last = max(_BESIDE_STEP, _OUTER_STEP * last / main) if last else 0.0
    return rounds * _OUTER_STEP + busy_last
