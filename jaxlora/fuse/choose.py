"""Decides for each site whether kernels compute it, and which functions around it.

The rule: under `auto`, kernels compute norms and gates if the function itself draws the
dropout masks of the linears that they are computed with. A back end that is named
computes everything that it can. The times behind the rule are in docs/measured/fuse.md.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jax.extend import core

from jaxlora.fuse.cost import decide, format_time
from jaxlora.fuse.measure import SiteTimer, Times
from jaxlora.fuse.producers import Part, find_parts
from jaxlora.fuse.site import Site
from jaxlora.fuse.site_shape import draws_masks


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
        return self.site.roots

    def apart(self) -> "Choice":
        """Returns the choice without row-wise functions in the call."""
        part = None if self.part is None else Part(site=self.site)
        return dataclasses.replace(self, part=part)


def choose(
    sites: Sequence[Site],
    implementation: str,
    program: Callable[[core.Jaxpr, Sequence[Part]], core.Jaxpr | None],
    site_timer: SiteTimer | None,
) -> list[Choice]:
    """Chooses how the sites of one jaxpr are computed.

    Args:
        sites: The sites.
        implementation: Name of a back end, which then computes everything that it can,
            or `auto`.
        program: Puts calls of the kernels into a jaxpr, so that it can be timed.
        site_timer: Measures times; None: the prediction and the rule decide.
    """
    parts = dict(zip(sites, find_parts(sites), strict=True))
    found: dict[Site, Choice] = {}
    for first, whole in parts.items():
        if first in found:
            continue
        ways = {"xla": []} if implementation == "auto" else {}
        ways["kernels"] = [Part(site=site) for site in whole.sites]
        ways[whole.name] = [whole]
        times: Times = {}, None
        if site_timer is not None:
            times = site_timer.times(whole, ways, program)
        seconds, unmeasured = times
        if seconds:
            calls = ways[min(seconds, key=lambda name: seconds[name])]
        else:
            calls = _by_rule(whole, implementation)
        part_of = {site: call for call in calls for site in call.sites}
        for site in whole.sites:
            reason = _measured(seconds) if seconds else decide(site).reason
            if unmeasured is not None:
                reason += f"; not measured: {unmeasured}"
            found[site] = Choice(
                site=site,
                part=part_of.get(site),
                reason=reason,
                refusal=parts[site].refusal,
                seconds=seconds,
            )
    return [found[site] for site in sites]


def _by_rule(whole: Part, implementation: str) -> Sequence[Part]:
    """Returns the calls that compute a part, by the prediction and the rule."""
    if implementation != "auto":
        return [whole]
    fused = [Part(site=site) for site in whole.sites if decide(site).fused]
    if len(fused) == len(whole.sites) and all(map(draws_masks, whole.sites)):
        return [whole]
    return fused


def _measured(seconds: Mapping[str, float]) -> str:
    each = (
        f"{format_time(time)} "
        + ("as XLA compiles it" if name == "xla" else f"with {name}")
        for name, time in seconds.items()
    )
    return f"measured: {', '.join(each)}"
