"""Decides for each site whether kernels compute it, and which functions around it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jax.extend import core

from jaxlora.fuse.cost import decide, format_time
from jaxlora.fuse.measure import Stopwatch, Times
from jaxlora.fuse.producers import Part, find_around, is_worth_a_kernel, parts_of
from jaxlora.fuse.site import Site


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """How a site is computed, and why.

    Attributes:
        site: The site.
        part: The call of the kernels that computes it; None: XLA computes it.
        reason: Why it is computed so, as a clause without a full stop.
        refusal: Why kernels cannot compute the function that makes its input, or None.
        seconds: Measured times of both passes of its part in each way, by name; empty
            if nothing was measured.
    """

    site: Site
    part: Part | None
    reason: str
    refusal: str | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def outputs(self) -> tuple[core.Var, ...]:
        """The variables that are computed in the chosen way."""
        if self.part is not None:
            return self.part.outputs
        return tuple(p.root for p in self.site.projections)

    def apart(self) -> "Choice":
        """Returns the choice without row-wise functions in the call."""
        part = None if self.part is None else Part(site=self.site)
        return dataclasses.replace(self, part=part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chooser:
    """Chooses how sites are computed.

    Attributes:
        implementation: Name of a back end, which then computes everything that it can,
            or `auto`.
        program: Puts calls of the kernels into a jaxpr, so that it can be timed.
        stopwatch: Measures times; None: the prediction and the rule decide.
    """

    implementation: str
    program: Callable[[core.Jaxpr, Sequence[Part]], core.Jaxpr | None]
    stopwatch: Stopwatch | None

    def choose(self, sites: Sequence[Site]) -> list[Choice]:
        """Chooses how the sites of one jaxpr are computed."""
        around = find_around(sites)
        refusals = {id(s): a.refusal for s, a in zip(sites, around, strict=True)}
        found: dict[int, Choice] = {}
        for whole in parts_of(sites, around):
            parts, (seconds, unmeasured) = self._choose(whole)
            part_of = {id(site): part for part in parts for site in part.sites}
            for site in whole.sites:
                reason = decide(site).reason
                if unmeasured is not None:
                    reason += f"; not measured: {unmeasured}"
                found[id(site)] = Choice(
                    site=site,
                    part=part_of.get(id(site)),
                    reason=_measured(seconds) if seconds else reason,
                    refusal=refusals[id(site)],
                    seconds=seconds,
                )
        return [found[id(site)] for site in sites]

    def _choose(self, whole: Part) -> tuple[Sequence[Part], Times]:
        """Returns the calls that compute a part, and the times that were measured."""
        alone = [Part(site=site) for site in whole.sites]
        is_auto = self.implementation == "auto"
        times: Times = {}, None
        if self.stopwatch is not None:
            ways = {"xla": []} if is_auto else {}
            ways |= {"kernels": alone, whole.name: [whole]}
            times = seconds, _ = self.stopwatch.times(whole, ways, self.program)
            if seconds:
                return ways[min(seconds, key=lambda name: seconds[name])], times
        if not is_auto:
            return [whole], times
        fused = [part for part in alone if decide(part.site).fused]
        if len(fused) == len(alone) and is_worth_a_kernel(whole.sites):
            return [whole], times
        return fused, times


def _measured(seconds: Mapping[str, float]) -> str:
    each = (
        f"{format_time(time)} "
        + ("as XLA compiles it" if name == "xla" else f"with {name}")
        for name, time in seconds.items()
    )
    return f"measured: {', '.join(each)}"
