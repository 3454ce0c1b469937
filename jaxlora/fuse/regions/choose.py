"""Chooses how each region is computed: by the prediction, or by measured times.

Under `auto`, kernels of norms and gates are taken only if they were faster when they
were measured, here or for the package: their predicted times are not near enough to
XLA's to decide.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlora.fuse.predict.cost import decide, format_time
from jaxlora.fuse.predict.site_shape import SiteShape
from jaxlora.fuse.regions import kept
from jaxlora.fuse.regions.candidates import Candidate, Plan, best_plans, candidates_of
from jaxlora.fuse.regions.measure import Request, Stopwatch, Times
from jaxlora.fuse.regions.part import Part, Region, is_transposed
from jaxlora.fuse.site import Site
from jaxlora.pallas_kernels import BACKENDS

NUM_MEASURED = 2  # plans of a region that are timed beside XLA's
_TIE = 0.02  # of measured times; the better prediction then wins

# Makes the program of a region with some parts in the kernels.
Program = Callable[[Region, Sequence[Part]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """How a region is computed, and why.

    Attributes:
        region: The region.
        candidates: The ways to compute parts of it.
        plan: How it is computed.
        seconds: Measured times of both passes, by the name of the plan; empty: nothing
            was measured.
        reason: Why, as a clause without a full stop.
    """

    region: Region
    candidates: tuple[Candidate, ...]
    plan: Plan
    seconds: dict[str, float]
    reason: str

    @property
    def plain(self) -> Plan:
        """How XLA alone computes the region, or what of it is not in kept calls."""
        computed = frozenset().union(*(c.elements for c in self.plan.candidates))
        alone = (c for c in self.candidates if c.part is None)
        return Plan(candidates=tuple(c for c in alone if c.elements <= computed))

    @property
    def declined(self) -> tuple[Site, ...]:
        """The sites that are left to XLA."""
        alone = (c for c in self.plan.candidates if c.part is None)
        numbers = (n for c in alone for kind, n in c.elements if kind == "site")
        return tuple(self.region.sites[number] for number in numbers)

    def apart(self) -> "Choice":
        """Returns the choice without row-wise functions in calls of the kernels."""
        sites = {id(site) for part in self.plan.parts for site in part.sites}

        def is_kept(candidate: Candidate) -> bool:
            if candidate.part is not None and candidate.part.makers:
                return False
            ((kind, number),) = candidate.elements
            is_fused = id(self.region.sites[number]) in sites
            return kind == "rows" or is_fused == (candidate.part is not None)

        kept = tuple(c for c in self.candidates if is_kept(c))
        return dataclasses.replace(self, plan=Plan(candidates=kept))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A choice, by the names of candidates, for all regions that are alike."""

    plan: tuple[str, ...]
    seconds: dict[str, float]
    unmeasured: str | None


class Chooser:
    """Chooses plans, once for all regions with the same normal form."""

    def __init__(
        self, implementation: str, program: Program, stopwatch: Stopwatch | None
    ) -> None:
        """Starts without choices.

        Args:
            implementation: Name of a back end, which then runs every linear that it
                can run, or `auto`.
            program: Makes the programs that are timed.
            stopwatch: Measures times; None: those that the package has for the device
                are used, and else the prediction decides.
        """
        self._is_auto = implementation == "auto"
        self._program = program
        self._stopwatch = stopwatch
        self._known: dict[str, _Found] = {}
        # A back end that is named runs every linear that it can run.
        device = jax.devices()[0].device_kind
        self._shipped = kept.shipped(device) if self._is_auto else {}

    def choose(self, regions: Sequence[Region]) -> list[Choice]:
        """Chooses how to compute each of some regions."""
        every = [(r, normal_form(r), candidates_of(r)) for r in regions]
        new: dict[str, tuple[Region, list[Candidate]]] = {}
        for region, key, candidates in every:
            if key not in self._known:
                new.setdefault(key, (region, candidates))
        self._find(new)
        return [
            self._choice(region, candidates, self._known[key])
            for region, key, candidates in every
        ]

    def _choice(
        self, region: Region, candidates: Sequence[Candidate], found: _Found
    ) -> Choice:
        by_name = {c.name: c for c in candidates}
        plan = Plan(candidates=tuple(by_name[name] for name in found.plan))
        return Choice(
            region=region,
            candidates=tuple(candidates),
            plan=plan,
            seconds=found.seconds,
            reason=_reason(region, plan, _plain(candidates), found),
        )

    def _find(self, new: dict[str, tuple[Region, list[Candidate]]]) -> None:
        """Finds the plans of regions, by the digests of their normal forms."""
        usable = {
            key: [c for c in candidates if self._may_use(region, c)]
            for key, (region, candidates) in new.items()
        }
        timed = {
            key: self._timed(usable[key], _plain(candidates))
            for key, (_, candidates) in new.items()
            if self._stopwatch is not None or key in self._shipped
        }
        times = self._times({key: region for key, (region, _) in new.items()}, timed)
        for key, some in usable.items():
            seconds, unmeasured = times.get(key, ({}, None))
            plans = _by_time(timed.get(key, []), seconds) or [self._predicted(some)]
            names = tuple(c.name for c in plans[0].candidates)
            self._known[key] = _Found(
                plan=names, seconds=seconds, unmeasured=unmeasured
            )

    def _times(
        self, regions: dict[str, Region], timed: dict[str, list[Plan]]
    ) -> dict[str, Times]:
        if self._stopwatch is None:
            names = {key: [plan.name for plan in timed[key]] for key in timed}
            return {key: (self._shipped[key].of(names[key]), None) for key in timed}
        requests = [
            Request(
                region=regions[key],
                key=key,
                plans=plans,
                program=functools.partial(self._program_of, regions[key]),
            )
            for key, plans in timed.items()
        ]
        return dict(zip(timed, self._stopwatch.times(requests), strict=True))

    def _program_of(self, region: Region, plan: Plan) -> Any:
        return self._program(region, plan.parts)

    def _predicted(self, usable: Sequence[Candidate]) -> Plan:
        """Returns the plan to take if nothing is measured."""
        may_predict = lambda c: c.part is None or not c.part.makers
        known = [c for c in usable if not self._is_auto or may_predict(c)]
        return best_plans(known, 1)[0]

    def _timed(self, usable: Sequence[Candidate], plain: Plan) -> list[Plan]:
        """Returns the plans to time: the best, what is taken unmeasured, and XLA's."""
        plans = best_plans(usable, NUM_MEASURED)
        if not self._is_auto:
            return plans
        names = {plan.name for plan in plans}
        first = [] if plain.name in names else [plain]
        predicted = self._predicted(usable)
        last = [] if predicted.name in {*names, plain.name} else [predicted]
        return [*first, *plans, *last]

    def _may_use(self, region: Region, candidate: Candidate) -> bool:
        """Tells whether a candidate is one of the user's choices.

        Without measuring, a back end in plain JAX, which takes as long as the original,
        runs what it can run.
        """
        ((kind, number), *_) = sorted(candidate.elements)
        if candidate.part is not None or kind == "rows":
            return True
        is_plain = BACKENDS[region.sites[number].implementation].is_plain
        return self._is_auto and (self._stopwatch is not None or not is_plain)


def _plain(candidates: Sequence[Candidate]) -> Plan:
    return Plan(candidates=tuple(c for c in candidates if c.part is None))


def _by_time(plans: Sequence[Plan], seconds: dict[str, float]) -> list[Plan]:
    """Returns the plan to take first, by measured times.

    Of plans that take the same time, the one with the best prediction is taken, unless
    XLA's is faster.
    """
    timed = [plan for plan in plans if plan.name in seconds]
    if not timed:
        return []
    least = min(seconds[plan.name] for plan in timed)
    alone = seconds.get("xla", float("inf"))
    close = [p for p in timed if seconds[p.name] <= least * (1 + _TIE)]
    faster = [p for p in close if seconds[p.name] < alone]
    ranked = sorted(faster, key=lambda p: p.cost.both.seconds)
    return ranked or [p for p in timed if p.name == "xla"]


def _reason(region: Region, plan: Plan, plain: Plan, found: _Found) -> str:
    if found.seconds:
        times = ", ".join(
            f"{format_time(seconds)} with {name}"
            for name, seconds in found.seconds.items()
            if name != "xla"
        )
        alone = found.seconds.get("xla")
        first = "" if alone is None else f"{format_time(alone)} as XLA compiles it; "
        return f"measured: {first}{times}"
    after = "" if found.unmeasured is None else f"; not measured: {found.unmeasured}"
    if len(region.sites) == 1 and not any(part.makers for part in plan.parts):
        return decide(region.sites[0]).reason + after
    both, fused = plain.cost.both.seconds, plan.cost.both.seconds
    times = f"{format_time(both)} as XLA compiles it, {format_time(fused)} fused"
    if not plan.parts:
        return f"fused kernels would be slower forward and backward: {times}{after}"
    return f"{both / fused:.2f} times as fast forward and backward: {times}{after}"


def normal_form(region: Region) -> str:
    """Returns a digest that is equal for regions that the same kernels compute."""
    sites = [
        (
            SiteShape.of(site),
            is_transposed(site),
            site.implementation,
            site.block_tokens,
            site.precision.name,
            site.keeps_s,
            site.selection is not None,
            [len(p.rest) for p in site.projections],
        )
        for site in region.sites
    ]
    makers = [
        (number, maker.expression, maker.features and maker.feature_dtype.name)
        for number, maker in sorted(region.makers.items())
    ]
    form = sites, makers, sorted(region.producers), sorted(region.gates)
    return hashlib.sha256(repr(form).encode()).hexdigest()
