"""Tile choices: a table of measured ones, and a rule for everything else."""

import dataclasses
import functools
import json
import math
from importlib import resources

from pallas_kernels.mosaic.outer import TILE_COLUMNS

MAX_SPLITS = 16
_TABLE = "tuning.json"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Choices that change the speed and never the adapter that a row meets.

    Attributes:
        band: Tiles of 128 rows that the wide product visits together.
        splits: Parts into which the rows of each adapter are split for its gradient.
    """

    band: int
    splits: int


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("pallas_kernels.mosaic").joinpath(_TABLE).read_text()
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
    # As many items as fill the multiprocessors evenly.
    return min(range(1, MAX_SPLITS + 1), key=lambda s: (_idle(tiles * s, num_sms), s))


def _idle(items: int, num_sms: int) -> float:
    """Share of the multiprocessors' time that is lost in the last round, in tenths."""
    rounds = math.ceil(items / num_sms)
    return round(10 * (1 - items / (rounds * num_sms)))
