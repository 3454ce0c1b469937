"""Solves subset sum exactly with bit sets: bit w of an integer is 1 if sum w exists."""

from collections.abc import Iterator, Sequence


def best_subsets(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yields subsets of items whose total weight is at most `room`, the heaviest first.

    It yields one nonempty subset, as indices, for each total weight. Among equal totals
    it prefers early items. Callers sort the items by descending weight, because small
    items are easier to place later.

    Args:
        weights: Positive weights of the items.
        room: Maximum total weight of a subset.
    """
    if room <= 0:
        return
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for weight in weights:
        reach.append((reach[-1] | reach[-1] << weight) & mask)
        if reach[-1] >> room:  # a subset fills the room, so no item can improve it
            break
    sums = reach[-1]
    while True:
        total = sums.bit_length() - 1
        if total <= 0:
            return
        yield _backtrack(weights, reach, total)
        sums ^= 1 << total


def _backtrack(weights: Sequence[int], reach: list[int], total: int) -> list[int]:
    chosen = []
    for i in range(len(reach) - 2, -1, -1):
        if not total:
            break
        if not reach[i] >> total & 1:  # the total is impossible without item i
            chosen.append(i)
            total -= weights[i]
    return chosen
