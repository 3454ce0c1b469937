"""Local search: nearby microbatches exchange samples until they take equally long."""

import heapq

from jaxlora.scheduler.cost import CostModel
from jaxlora.scheduler.types import Limits, Pipeline
from jaxlora.scheduler.windows.cursor import Item

# A slot trades with this many slots on either side.
_REACH = 6
_TRADES_PER_PAIR = 2
# Relative differences in cost that are too small for a trade.
_TOLERANCE = 2e-3


class LocalSearch:
    """Improves the microbatches of consecutive slots by moving and swapping samples.

    The objective is the sum over all cycles of the cost of the slowest microbatch in
    the pipeline (`slowest_per_cycle`). A sample moves, or two samples swap places,
    only if that lowers the objective and keeps the schedule legal.

    Attributes:
        slots: Items of each microbatch.
        costs: Cost of each microbatch, as a fraction of a full one's time on the
            fastest stage. Microbatch k is on stage s in cycle k + s. S - 1 zeros
            precede and follow the microbatches.
        slowest: Cost of the slowest microbatch in each cycle.
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
        """Computes the costs of the given microbatches.

        Args:
            slots: Items of each microbatch.
            earliest: For each job, the slot from which its first batch in `slots` may
                run. It may be negative.
            limits: Capacity and block size.
            pipeline: Provides the distance between the batches of a job.
            cost: Costs of microbatches.
            before: Fixed microbatches before the slots that share the pipeline with
                them.
            after: Fixed microbatches after the slots that share the pipeline with them.
        """
        self.limits, self.cost, self.distance = limits, cost, pipeline.distance
        steps = [s.forward + s.backward for s in cost.stages]
        full = [step(limits.capacity, 0) for step in steps]
        self.step = steps[0] * (1 / full[0]) if full[0] else steps[0]
        fastest = min(full) or 1.0
        self.slow_stages = [(s, t / fastest) for s, t in enumerate(full) if t > fastest]
        self.slots = [list(s) for s in slots]
        self.earliest = earliest
        # Number of items by job, batch and slot.
        self.places: dict[int, dict[int, dict[int, int]]] = {}
        for i, slot in enumerate(slots):
            for _, _, s in slot:
                places = self.places.setdefault(s.owner, {}).setdefault(s.batch, {})
                places[i] = places.get(i, 0) + 1
        self.num_stages = num = cost.num_stages
        self.offset = num - 1 + len(before)
        items = [*before, *slots, *after]
        costs = [self._compute_cost(slot, _tokens_by_job(slot)) for slot in items]
        self.costs = [0.0] * (num - 1) + costs + [0.0] * (num - 1)
        self.slowest = [0.0] * (num - 1)
        self.slowest += map(self._compute_slowest, range(num - 1, len(self.costs)))

    def run(self, max_trades: int) -> list[list[Item]]:
        """Searches, and returns the items of each slot.

        Args:
            max_trades: Maximum number of trades to try.
        """
        num_left = max_trades
        has_improved = True
        while has_improved and num_left > 0:
            has_improved = False
            for i in range(len(self.slots)):
                if num_left <= 0:
                    break
                if self._max_saving(i) <= _TOLERANCE * self._cost(i):
                    continue
                for j in self._neighbors(i):
                    for give, take in self._trades(i, j):
                        num_left -= 1
                        if self._try(i, j, give, take):
                            has_improved = True
                            break
        return self.slots

    def _neighbors(self, i: int) -> list[int]:
        near = range(max(0, i - _REACH), min(len(self.slots), i + _REACH + 1))
        return sorted((j for j in near if j != i), key=self._cost)

    def _cost(self, i: int) -> float:
        return self.costs[self.offset + i]

    def _compute_cost(self, slot: list[Item], tokens: dict[int, int]) -> float:
        if not slot:
            return 0.0
        padded = sum(map(self.limits.padded, tokens.values()))
        squares = sum(n * n for _, n, _ in slot)
        return self.step(self.cost.bucket_tokens(padded), squares)

    def _compute_slowest(self, cycle: int) -> float:
        costs = self.costs
        slowest = max(costs[cycle - self.num_stages + 1 : cycle + 1])
        for stage, weight in self.slow_stages:
            slowest = max(slowest, weight * costs[cycle - stage])
        return slowest

    def _max_saving(self, i: int) -> float:
        """Returns how much the objective would fall if slot i cost nothing."""
        k = self.offset + i
        cycles = range(k, k + self.num_stages)
        cost, self.costs[k] = self.costs[k], 0.0
        saving = sum(self.slowest[t] - self._compute_slowest(t) for t in cycles)
        self.costs[k] = cost
        return saving

    def _trades(self, i: int, j: int) -> list[tuple[Item, Item | None]]:
        """Returns trades after which slots i and j would cost about the same.

        Each trade is an item that slot i gives, and one that it takes in return or
        None.
        """
        surplus = self._cost(i) - self._cost(j)
        if surplus <= _TOLERANCE * self._cost(i) or not self.step.per_token:
            return []
        target = surplus / 2 / self.step.per_token
        gives, takes = self.slots[i], [None, *self.slots[j]]
        works = [0, *(item[0] for item in self.slots[j])]
        errors = [
            (abs(give[0] - work - target), n, k)
            for n, give in enumerate(gives)
            for k, work in enumerate(works)
        ]
        best = heapq.nsmallest(_TRADES_PER_PAIR, errors)
        return [(gives[n], takes[k]) for _, n, k in best]

    def _try(self, i: int, j: int, give: Item, take: Item | None) -> bool:
        """Trades if that lowers the objective and keeps the schedule legal."""
        if give[0] <= (take[0] if take else 0):
            return False
        new_i = [x for x in self.slots[i] if x is not give]
        if not new_i and not take:
            return False  # the slot would become a no-op
        new_j = [x for x in self.slots[j] if x is not take]
        if take:
            new_i.append(take)
        new_j.append(give)
        if max(len(new_i), len(new_j)) > self.limits.most_samples:
            return False
        tokens_i, tokens_j = _tokens_by_job(new_i), _tokens_by_job(new_j)
        if not (self._fits(tokens_i) and self._fits(tokens_j)):
            return False
        cost_i = self._compute_cost(new_i, tokens_i)
        cost_j = self._compute_cost(new_j, tokens_j)
        if not self._is_better(i, j, cost_i, cost_j):
            return False
        self._move(give, i, j)
        if take:
            self._move(take, j, i)
        is_legal = self._keeps_distance(give) and (
            not take or self._keeps_distance(take)
        )
        if not is_legal:
            self._move(give, j, i)
            if take:
                self._move(take, i, j)
            return False
        self.slots[i], self.slots[j] = new_i, new_j
        self._set_costs(i, j, cost_i, cost_j)
        return True

    def _fits(self, tokens: dict[int, int]) -> bool:
        return sum(map(self.limits.padded, tokens.values())) <= self.limits.capacity

    def _cycles(self, i: int, j: int) -> set[int]:
        """Returns the cycles in which slot i or slot j is in the pipeline."""
        a, b, num = self.offset + i, self.offset + j, self.num_stages
        return {*range(a, a + num), *range(b, b + num)}

    def _is_better(self, i: int, j: int, cost_i: float, cost_j: float) -> bool:
        costs, a, b = self.costs, self.offset + i, self.offset + j
        old = costs[a], costs[b]
        costs[a], costs[b] = cost_i, cost_j
        cycles = self._cycles(i, j)
        saving = sum(self.slowest[t] - self._compute_slowest(t) for t in cycles)
        costs[a], costs[b] = old
        return saving > 1e-9 * old[0]

    def _set_costs(self, i: int, j: int, cost_i: float, cost_j: float) -> None:
        self.costs[self.offset + i], self.costs[self.offset + j] = cost_i, cost_j
        for t in self._cycles(i, j):
            self.slowest[t] = self._compute_slowest(t)

    def _move(self, item: Item, old: int, new: int) -> None:
        places = self.places[item[2].owner][item[2].batch]
        places[old] -= 1
        if not places[old]:
            del places[old]
        places[new] = places.get(new, 0) + 1

    def _keeps_distance(self, item: Item) -> bool:
        """Whether the item's batch keeps its distance from the job's other batches."""
        batches = self.places[item[2].owner]
        numbers = sorted(batches)
        k = numbers.index(item[2].batch)
        slots = batches[numbers[k]]
        earliest = self.earliest[item[2].owner]
        if k:
            earliest = max(batches[numbers[k - 1]]) + self.distance
        if min(slots) < earliest:
            return False
        if k + 1 == len(numbers):
            return True
        return min(batches[numbers[k + 1]]) >= max(slots) + self.distance


def _tokens_by_job(items: list[Item]) -> dict[int, int]:
    out: dict[int, int] = {}
    for _, n, sample in items:
        out[sample.owner] = out.get(sample.owner, 0) + n
    return out
