"""The ways to compute a region, with their predicted costs.

A *candidate* computes some sites and row-wise functions of a region in one call of the
kernels, or leaves one to XLA. A *plan* is a set of candidates that computes each site
and each function once. The best plans are found by an integer program over the
candidates, whose costs are those of the bytes that they move and of their products.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.optimize

from jaxlora.fuse.cost import Cost, Decision, decide, shrink_cost
from jaxlora.fuse.device_rates import KernelRates, describe_device
from jaxlora.fuse.regions.part import Part, Region
from jaxlora.fuse.regions.row_expression import RowExpression
from jaxlora.fuse.site_shape import SiteShape

# Time of a kernel that also computes s, over that of XLA's kernel of the same function:
# 52 for 40 us with a norm and 3 masks, 195 to 206 for 172 with SwiGLU, and 318 for 282
# with its gradient (H200, docs/log/2026-11.md, 2026-11-26).
_SLOWDOWN = 1.15

Element = tuple[str, int]  # ("site" or "rows", number of the site)


_NOTHING = Cost()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Costs of the forward pass and of both passes."""

    forward: Cost = _NOTHING
    both: Cost = _NOTHING

    def __add__(self, other: "PassCosts") -> "PassCosts":
        return PassCosts(
            forward=self.forward + other.forward, both=self.both + other.both
        )

    def __mul__(self, factor: float) -> "PassCosts":
        return PassCosts(forward=self.forward * factor, both=self.both * factor)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One way to compute some sites and row-wise functions.

    Attributes:
        name: Says what it does, with numbers of sites.
        elements: What it computes.
        part: The call of the kernels; None: XLA computes it.
        cost: Its predicted cost.
    """

    name: str
    elements: frozenset[Element]
    part: Part | None
    cost: PassCosts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Candidates that compute each element of a region once.

    Attributes:
        candidates: The candidates.
    """

    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        """Names its calls of the kernels, or `xla` if it has none."""
        return ", ".join(c.name for c in self.candidates if c.part) or "xla"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its calls of the kernels."""
        return tuple(c.part for c in self.candidates if c.part is not None)

    @property
    def cost(self) -> PassCosts:
        """Its predicted cost."""
        return sum((c.cost for c in self.candidates), PassCosts())


def candidates_of(region: Region, device: str | None = None) -> list[Candidate]:
    """Returns all candidates of a region.

    Args:
        region: The region.
        device: JAX's `device_kind`; None: the present device.
    """
    costs = _Costs(region, device)
    return [
        *_of_sites(region, costs),
        *_of_producers(region, costs),
        *_of_gates(region, costs),
    ]


def _of_sites(region: Region, costs: "_Costs") -> Iterator[Candidate]:
    for number, site in enumerate(region.sites):
        made = frozenset({("site", number)})
        name = f"kernels({number})"
        part = Part(site=site)
        yield Candidate(name=name, elements=made, part=part, cost=costs.fused(number))
        yield Candidate(
            name=f"xla({number})", elements=made, part=None, cost=costs.plain(number)
        )
    for number in region.makers:
        rows = frozenset({("rows", number)})
        cost = costs.rows(number)
        yield Candidate(name=f"xla rows({number})", elements=rows, part=None, cost=cost)


def _of_producers(region: Region, costs: "_Costs") -> Iterator[Candidate]:
    for number in sorted(region.producers):
        site, maker = region.sites[number], region.makers[number]
        yield Candidate(
            name=f"producer({number})",
            elements=frozenset({("site", number), ("rows", number)}),
            part=Part(site=site, producer=maker),
            cost=costs.produced(number) + costs.fused(number),
        )


def _of_gates(region: Region, costs: "_Costs") -> Iterator[Candidate]:
    for (before, after), gate in region.gates.items():
        elements = {("site", before), ("site", after), ("rows", after)}
        cost = costs.gated(before, after) + costs.fused(before) + costs.fused(after)
        part = Part(site=region.sites[before], gate=gate)
        name = f"gate({before}, {after})"
        yield Candidate(name=name, elements=frozenset(elements), part=part, cost=cost)
        if before in region.producers:
            yield Candidate(
                name=f"producer and {name}",
                elements=frozenset({*elements, ("rows", before)}),
                part=dataclasses.replace(part, producer=region.makers[before]),
                cost=cost + costs.produced(before),
            )


class _Costs:
    """Predicts the costs of the elements of a region."""

    def __init__(self, region: Region, device: str | None) -> None:
        self.region = region
        self.device = describe_device(device)
        self.decisions: list[Decision] = [decide(s, device) for s in region.sites]
        self.shapes = [SiteShape.of(site) for site in region.sites]

    def plain(self, number: int) -> PassCosts:
        found = self.decisions[number]
        return PassCosts(forward=found.forward_before, both=found.before)

    def fused(self, number: int) -> PassCosts:
        found = self.decisions[number]
        return PassCosts(forward=found.forward_after, both=found.after)

    def rows(self, number: int) -> PassCosts:
        """Cost of a function that XLA computes."""
        forward, backward = self._rows(number)
        return PassCosts(forward=forward, both=forward + backward)

    def produced(self, number: int) -> PassCosts:
        """Cost of a function beside which s is computed, less that of s alone."""
        forward, backward = self._rows(number)
        forward = forward * _SLOWDOWN + self._without_shrink(number)
        return PassCosts(forward=forward, both=forward + backward)

    def gated(self, before: int, after: int) -> PassCosts:
        """Cost of a gate beside which s and ds are computed, less that of s and ds."""
        forward, backward = self._rows(after)
        forward = forward * _SLOWDOWN + self._without_shrink(after)
        shape = self.shapes[before]
        backward = backward * _SLOWDOWN
        for n, rank in zip(shape.out_features, shape.ranks, strict=True):
            backward += shrink_cost(shape, n, self.device, rank) * -1.0
        return PassCosts(forward=forward, both=forward + backward)

    def _without_shrink(self, number: int) -> Cost:
        """Cost of s less that of reading x for it."""
        shape = self.shapes[number]
        ranks = sum(shape.ranks)
        alone = shrink_cost(shape, shape.in_features, self.device, ranks)
        written = Cost(num_bytes=shape.tokens * ranks * shape.itemsize)
        return written + alone * -1.0

    def _rows(self, number: int) -> tuple[Cost, Cost]:
        """Costs of the forward and the backward pass of a function."""
        maker, shape = self.region.makers[number], self.shapes[number]
        return rows_costs(maker.expression, shape, self.device)


def rows_costs(
    function: RowExpression, shape: SiteShape, device: KernelRates
) -> tuple[Cost, Cost]:
    """Predicts the forward and the backward pass of a function as XLA compiles it.

    Both are loops over tiles, which read values of rows and features beside them.
    """
    tile = shape.tokens * shape.in_features * shape.itemsize

    def loop(tiles: int) -> Cost:
        seconds = tiles * tile / device.memory_bytes + device.launch_seconds
        return Cost(num_bytes=tiles * tile, seconds=seconds)

    return loop(function.num_tiles + 1), loop(2 * function.num_tiles + 1)


def best_plans(candidates: Sequence[Candidate], count: int) -> list[Plan]:
    """Returns the plans of a region with the lowest predicted times, the best first.

    Args:
        candidates: The candidates; each element is in one that has no other.
        count: How many plans to return at most.
    """
    elements = sorted(frozenset().union(*(c.elements for c in candidates)))
    if len(elements) == 1:
        ranked = sorted(candidates, key=lambda c: c.cost.both.seconds)
        return [Plan(candidates=(c,)) for c in ranked[:count]]
    covers = np.array([[e in c.elements for c in candidates] for e in elements], float)
    micros = np.array([1e6 * c.cost.both.seconds for c in candidates])
    once = scipy.optimize.LinearConstraint(covers, 1, 1)
    others: list[scipy.optimize.LinearConstraint] = []
    plans = []
    while len(plans) < count:
        found = scipy.optimize.milp(
            micros,
            integrality=np.ones(len(candidates)),
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=[once, *others],
        )
        if found.x is None:
            break
        taken = np.round(found.x)
        plans.append(
            Plan(
                candidates=tuple(c for c, z in zip(candidates, taken, strict=True) if z)
            )
        )
        # Another plan lacks one of these.
        others.append(scipy.optimize.LinearConstraint(taken, 0, taken.sum() - 1))
    return plans
