"""Local search: neighbours in a plan give and take samples until they cost the same."""

import heapq

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.frontier import Item
from jaxlora.scheduler.types import Limits, Pipeline

# Slots to either side that a slot trades with, and trades weighed for each pair.
REACH = 6
TRADES_WEIGHED = 2
# Differences that are smaller, relatively, are left alone.
TOLERANCE = 2e-3


class Search:
    """Microbatches in consecutive slots, while samples move between them.

    What is made small is the sum over time of the dearest microbatch in the pipeline.
    A sample or a pair of samples moves when that makes it less, and when the schedule
    keeps all rules.
    """

    def __init__(
        self,
        slots: list[list[Item]],
        earliest: dict[int, int],
        limits: Limits,
        pipeline: Pipeline,
        cost: CostModel,
        *,
        before: list[list[Item]],
        after: list[list[Item]],
    ):
        """
        Args:
            slots: Items of each microbatch.
            earliest: Of each job, the slot from which its first batch here may run; may
                be negative.
            limits: Capacity and block size.
            pipeline: Says how far apart batches must be.
            cost: What microbatches cost.
            before: Fixed microbatches before the slots, which share the pipeline with
                them; `after` likewise.
            after: Fixed microbatches after the slots.
        """
        self.limits, self.cost, self.distance = limits, cost, pipeline.distance
        both = [s.forward + s.backward for s in cost.stages]
        one = [b(limits.capacity, 0) for b in both]
        self.both = both[0] * (1 / one[0]) if one[0] else both[0]
        least = min(one) or 1.0
        self.dear_stages = [(s, w / least) for s, w in enumerate(one) if w > least]
        self.slots = [list(s) for s in slots]
        self.earliest = earliest
        self.places: dict[int, dict[int, dict[int, int]]] = {}
        for i, slot in enumerate(slots):
            for _, _, s in slot:
                places = self.places.setdefault(s.job, {}).setdefault(s.batch, {})
                places[i] = places.get(i, 0) + 1
        # Costs of all microbatches, and of the dearest at each time; number k is on
        # stage s at time k + s.
        self.num_stages = num = cost.num_stages
        self.shift = num - 1 + len(before)
        every = [*before, *slots, *after]
        priced = [self._price(slot, _tokens(slot)) for slot in every]
        self.costs = [0.0] * (num - 1) + priced + [0.0] * (num - 1)
        self.dearest = [0.0] * (num - 1)
        self.dearest += map(self._dearest, range(num - 1, len(self.costs)))

    def run(self, max_trades: int) -> list[list[Item]]:
        """The slots after at most so many tried trades; each list of items is new."""
        left = max_trades
        better = True
        while better and left > 0:
            better = False
            for i in range(len(self.slots)):
                if left <= 0:
                    break
                if self._relief(i) <= TOLERANCE * self._cost(i):
                    continue
                for j in self._neighbours(i):
                    for give, take in self._trades(i, j):
                        left -= 1
                        if self._try(i, j, give, take):
                            better = True
                            break
        return self.slots

    def last_before(self, job: int, batch: int) -> int | None:
        """Last slot of the job's batches before `batch`; None if none is here."""
        places = self.places.get(job, {})
        earlier = [number for number in places if number < batch]
        return max(places[max(earlier)]) if earlier else None

    def _neighbours(self, i: int) -> list[int]:
        near = range(max(0, i - REACH), min(len(self.slots), i + REACH + 1))
        return sorted((j for j in near if j != i), key=self._cost)

    def _cost(self, i: int) -> float:
        return self.costs[self.shift + i]

    def _price(self, slot: list[Item], tokens: dict[int, int]) -> float:
        if not slot:
            return 0.0
        padded = sum(map(self.limits.padded, tokens.values()))
        squares = sum(n * n for _, n, _ in slot)
        return self.both(self.cost.charged(padded), squares)

    def _dearest(self, time: int) -> float:
        costs = self.costs
        dearest = max(costs[time - self.num_stages + 1 : time + 1])
        for stage, weight in self.dear_stages:
            dearest = max(dearest, weight * costs[time - stage])
        return dearest

    def _relief(self, i: int) -> float:
        """What it would save if slot i cost nothing."""
        k = self.shift + i
        times = range(k, k + self.num_stages)
        cost, self.costs[k] = self.costs[k], 0.0
        saved = sum(self.dearest[t] - self._dearest(t) for t in times)
        self.costs[k] = cost
        return saved

    def _trades(self, i: int, j: int) -> list[tuple[Item, Item | None]]:
        """What slot i might give and take so that both cost about the same."""
        surplus = self._cost(i) - self._cost(j)
        if surplus <= TOLERANCE * self._cost(i) or not self.both.per_token:
            return []
        want = surplus / 2 / self.both.per_token
        gives, takes = self.slots[i], [None, *self.slots[j]]
        works = [0, *(item[0] for item in self.slots[j])]
        misses = [
            (abs(give[0] - work - want), n, k)
            for n, give in enumerate(gives)
            for k, work in enumerate(works)
        ]
        least = heapq.nsmallest(TRADES_WEIGHED, misses)
        return [(gives[n], takes[k]) for _, n, k in least]

    def _try(self, i: int, j: int, give: Item, take: Item | None) -> bool:
        """Trades if that keeps the rules and costs less."""
        if give[0] <= (take[0] if take else 0):
            return False
        new_i = [x for x in self.slots[i] if x is not give]
        if not new_i and not take:
            return False  # no new no-ops
        new_j = [x for x in self.slots[j] if x is not take]
        if take:
            new_i.append(take)
        new_j.append(give)
        tokens_i, tokens_j = _tokens(new_i), _tokens(new_j)
        if not (self._holds(tokens_i) and self._holds(tokens_j)):
            return False
        cost_i, cost_j = self._price(new_i, tokens_i), self._price(new_j, tokens_j)
        if not self._gains(i, j, cost_i, cost_j):
            return False
        self._move(give, i, j)
        if take:
            self._move(take, j, i)
        if not (self._apart(give) and (not take or self._apart(take))):
            self._move(give, j, i)
            if take:
                self._move(take, i, j)
            return False
        self.slots[i], self.slots[j] = new_i, new_j
        self._set_costs(i, j, cost_i, cost_j)
        return True

    def _holds(self, tokens: dict[int, int]) -> bool:
        return sum(map(self.limits.padded, tokens.values())) <= self.limits.capacity

    def _times(self, i: int, j: int) -> set[int]:
        """When slot i or j is in the pipeline."""
        a, b, num = self.shift + i, self.shift + j, self.num_stages
        return {*range(a, a + num), *range(b, b + num)}

    def _gains(self, i: int, j: int, cost_i: float, cost_j: float) -> bool:
        costs, a, b = self.costs, self.shift + i, self.shift + j
        old = costs[a], costs[b]
        costs[a], costs[b] = cost_i, cost_j
        gain = sum(self.dearest[t] - self._dearest(t) for t in self._times(i, j))
        costs[a], costs[b] = old
        return gain > 1e-9 * old[0]

    def _set_costs(self, i: int, j: int, cost_i: float, cost_j: float) -> None:
        self.costs[self.shift + i], self.costs[self.shift + j] = cost_i, cost_j
        for t in self._times(i, j):
            self.dearest[t] = self._dearest(t)

    def _move(self, item: Item, old: int, new: int) -> None:
        places = self.places[item[2].job][item[2].batch]
        places[old] -= 1
        if not places[old]:
            del places[old]
        places[new] = places.get(new, 0) + 1

    def _apart(self, item: Item) -> bool:
        """Whether an item's batch keeps its distance from the job's other batches."""
        batches = self.places[item[2].job]
        numbers = sorted(batches)
        k = numbers.index(item[2].batch)
        own = batches[numbers[k]]
        least = self.earliest[item[2].job]
        if k:
            least = max(batches[numbers[k - 1]]) + self.distance
        if min(own) < least:
            return False
        if k + 1 == len(numbers):
            return True
        return min(batches[numbers[k + 1]]) >= max(own) + self.distance


def _tokens(items: list[Item]) -> dict[int, int]:
    out: dict[int, int] = {}
    for _, n, sample in items:
        out[sample.job] = out.get(sample.job, 0) + n
    return out
