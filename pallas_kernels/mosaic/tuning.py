"""Tile choices: a table of measured ones, and rules for all other sizes and devices."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from importlib import resources

from jaxlora.pallas_kernels.mosaic.outer import TILE_COLUMNS
from jaxlora.pallas_kernels.mosaic.ring import COMPUTE_WGS, ROWS

MAX_SPLITS = 16
MAX_SIDE_SMS = 8
_TABLE = "tuning.json"

# Microseconds of a step of 64, measured on an H200: of an expand tile; of an outer item
# on a side multiprocessor, and what each mask adds to it; and of an outer item when all
# multiprocessors run one. These have a part for every eight steps; each further part
# takes the last time.
_EXPAND_STEP_US, _SIDE_STEP_US, _SIDE_MASK_US, _OUTER_STEP_US = 0.67, 0.36, 0.19, 0.7
_PART_STEPS, _PART_US = 8, 0.35
_MIN_ITEM_PARTS = 8
# Likewise of narrow outer items, of 256 columns: a step and a part on a side
# multiprocessor, and a step when all run one. An expand tile of experts takes some
# steps longer, as it has few.
_NARROW_STEP_US, _NARROW_PART_US, _NARROW_OUTER_STEP_US = 0.42, 1.05, 1.2
EXPERT_TILE_STEPS = 4
EXPERT_SPLITS = 8  # the most parts of a slot's rows, alike for all products of a layer


# Share of expand's time that narrower tiles must save in rounds, as they read x more
# often.
_NARROW_GAIN = 0.15


@functools.cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("jaxlora.pallas_kernels.mosaic").joinpath(_TABLE).read_text()
    return json.loads(text)


def band_for(device: str, t: int, k: int, n: int) -> int:
    """Returns how many tile rows expand visits together for T x K times K x N."""
    measured = _table().get(device, {}).get(f"expand {t} {k} {n}")
    return measured["band"] if measured else 8


def expert_band_for(num_tiles: float, num_experts: int) -> int:
    """Returns how many tile rows expand visits together if each expert has a W.

    A band of more rows than an expert has would read the weights of several at once.
    """
    return min(max(int(num_tiles / num_experts), 1), 8)


def columns_for(t: int, n: int, num_sms: int) -> int:
    """Returns the number of columns of an expand tile for a result of T x N.

    The tiles run in rounds of one per multiprocessor. With 576 columns, three tiles of
    192 are as many as three of 256. The choice changes no bit.
    """

    def time(columns: int) -> int:
        tiles = math.ceil(t / (COMPUTE_WGS * ROWS)) * math.ceil(n / columns)
        return math.ceil(tiles / num_sms) * columns

    best = min((256, 192, 128), key=time)
    return best if time(best) <= (1 - _NARROW_GAIN) * time(256) else 256


def splits_for(device: str, num_features: int, num_sms: int) -> int:
    """Returns the most parts of a slot's rows, for gradients of features x rank.

    It depends neither on the batch nor on the other adapters, because the order of a
    sum must not.
    """
    measured = _table().get(device, {}).get(f"outer {num_features}")
    if measured:
        return measured["splits"]
    num_tiles = math.ceil(num_features / TILE_COLUMNS)
    enough = 0.9 * num_sms  # as many items as keep the multiprocessors busy
    powers = (2**i for i in range(MAX_SPLITS.bit_length()))
    return next((s for s in powers if num_tiles * s >= enough), MAX_SPLITS)


def shares_for(splits: int, num_parts: int) -> int:
    """Returns how many items share the parts of a tile.

    With more of them than a slot has parts, the items of many small slots can be spread
    evenly over the multiprocessors. This changes no bit.
    """
    return splits * max(num_parts // (splits * _MIN_ITEM_PARTS), 1)


@dataclasses.dataclass(frozen=True)
class OuterCost:
    """The size of an outer product that shares a launch with expand.

    Attributes:
        num_items: Number of items.
        steps_per_item: Mean number of steps of 64 rows of an item.
        parts_per_item: Mean number of parts of an item.
        num_masks: Number of masks that a step computes.
        is_narrow: Whether its tiles have few ranks and many columns.
    """

    num_items: int
    steps_per_item: float
    parts_per_item: float
    num_masks: int
    is_narrow: bool = False

    @property
    def parts_us(self) -> float:
        """Microseconds of an item's parts beyond those in the time of a step."""
        if self.is_narrow:
            return self.parts_per_item * _NARROW_PART_US
        return (
            max(self.parts_per_item - self.steps_per_item / _PART_STEPS, 0) * _PART_US
        )

    @property
    def step_us(self) -> float:
        """Microseconds of a step if few multiprocessors run one."""
        if self.is_narrow:
            return _NARROW_STEP_US
        return _SIDE_STEP_US + _SIDE_MASK_US * self.num_masks

    @property
    def side_us(self) -> float:
        """Microseconds of an item on a side multiprocessor."""
        return self.steps_per_item * self.step_us + self.parts_us

    def rounds_us(self, num_items: int, num_sms: int) -> float:
        """Microseconds of some items on multiprocessors that share device memory."""
        if self.is_narrow:  # device memory is the limit
            steps_us = self.steps_per_item * _NARROW_OUTER_STEP_US
            return num_items * steps_us / num_sms
        rounds, last = divmod(num_items, num_sms)
        last_us = max(self.step_us, _OUTER_STEP_US * last / num_sms) if last else 0.0
        steps_us = self.steps_per_item * (rounds * _OUTER_STEP_US + last_us)
        return steps_us + math.ceil(num_items / num_sms) * self.parts_us


@dataclasses.dataclass(frozen=True)
class SidePlan:
    """A plan for outer products that share a launch with expand.

    Attributes:
        num_side_sms: Number of multiprocessors that run outer products only.
        num_side_items: Number of items of each outer product that they run. The other
            multiprocessors run the rest after expand.
    """

    num_side_sms: int
    num_side_items: tuple[int, ...]


def best_plan(
    num_tiles: int,
    steps_per_tile: float,
    outers: Sequence[OuterCost],
    num_sms: int,
    max_side_sms: int = MAX_SIDE_SMS,
) -> tuple[float, SidePlan]:
    """Returns the plan with the least estimated time, after its microseconds.

    The tiles of expand come in rounds of one per multiprocessor. Often the number of
    rounds stays the same with a few multiprocessors less.

    Args:
        num_tiles: Number of tiles of expand.
        steps_per_tile: Number of steps of 64 of each tile of 256 columns; narrower
            tiles have fewer.
        outers: The outer products, in the order in which they run.
        num_sms: Number of multiprocessors.
        max_side_sms: The most side multiprocessors.
    """
    tile_us = steps_per_tile * _EXPAND_STEP_US
    options = [
        _timed_plan(num_tiles, tile_us, outers, num_sms, num_side_sms, take_all)
        for num_side_sms in range(min(max_side_sms, num_sms - 1) + 1)
        for take_all in itertools.product((False, True), repeat=len(outers))
    ]
    return min(options, key=lambda option: option[0])


def _timed_plan(
    num_tiles: int,
    tile_us: float,
    outers: Sequence[OuterCost],
    num_sms: int,
    num_side_sms: int,
    take_all: tuple[bool, ...],
) -> tuple[float, SidePlan]:
    """Returns a plan and its estimated time in microseconds.

    The side multiprocessors run all items of an outer product where `take_all` says so,
    and otherwise as many as fit into the time of expand.
    """
    num_main_sms = num_sms - num_side_sms
    expand_us = math.ceil(num_tiles / num_main_sms) * tile_us
    side_us, rest_us, taken = 0.0, 0.0, []
    for outer, takes_all in zip(outers, take_all, strict=True):
        fitting = num_side_sms * int(max(expand_us - side_us, 0) / outer.side_us)
        all_items = takes_all and num_side_sms
        num_items = outer.num_items if all_items else min(outer.num_items, fitting)
        side_us += math.ceil(num_items / max(num_side_sms, 1)) * outer.side_us
        num_left = outer.num_items - num_items
        rest_us += outer.rounds_us(num_left, num_main_sms)
        taken.append(num_items)
    return max(expand_us + rest_us, side_us), SidePlan(num_side_sms, tuple(taken))
