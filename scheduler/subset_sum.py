"""Exact subset sum, by bit sets: bit w of an integer says that w can be reached."""

from collections.abc import Iterator, Sequence


def best_subsets(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    """Indices of items that weigh as much as possible but at most `room`.

    First the heaviest sum, then the next ones; one subset a sum, and no empty one.
    Prefers early items, so sort them with the heaviest first: small ones are worth more
    later.

    Args:
        weights: Positive weights.
        room: Most that a subset may weigh.
    """
    if room <= 0:
        return
    mask = (1 << (room + 1)) - 1
    reach = [1]
    for weight in weights:
        reach.append((reach[-1] | reach[-1] << weight) & mask)
        if reach[-1] >> room:  # full: no item can better that
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
        if not reach[i] >> total & 1:  # not reached without item i
            chosen.append(i)
            total -= weights[i]
    return chosen
