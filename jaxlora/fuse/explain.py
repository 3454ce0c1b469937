"""Explains what was found in a function, what is fused and why, and what it saves."""

import collections
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core
from rich.console import Console
from rich.table import Table

from jaxlora.common.console import literal, show
from jaxlora.fuse.api import options_of, trace_call
from jaxlora.fuse.cost import Cost, Decision, decide
from jaxlora.fuse.device_rates import describe_device
from jaxlora.fuse.rewrite import Rewritten
from jaxlora.fuse.site import Refusal
from jaxlora.fuse.site_shape import SiteShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedSite:
    """A low-rank branch that was found, and whether it is fused.

    Attributes:
        location: File, line and function of the code that made it.
        path: Names of the primitives around it, outermost first.
        shape: Its sizes.
        runs: How often it runs in a call of the function.
        decision: Whether it is fused and why, with the predicted costs of its linears.
        computed_by: The call of the kernels: `kernels`, or the `producer` or `gate`
            that it computes too; `xla` if it is not fused.
        input_refusal: Why kernels cannot compute the norm or gate that makes its input;
            None: they can, or there is none.
    """

    location: str
    path: tuple[str, ...]
    shape: SiteShape
    runs: float
    decision: Decision
    computed_by: str
    input_refusal: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Says what the fusion pass does to a function.

    `str()` is a table of the sites, with a line for each reason, as wide as the
    terminal. It has T tokens, K input and N output features of each site, or `N1+N2` if
    two linears share x. Times and memory traffic are those of a run of both passes, as
    XLA compiles them → fused; in a function that already is a gradient, of the forward
    pass.

    Attributes:
        device: Name of the device for which times are predicted.
        sites: The low-rank branches that were found.
        refusals: Sums that are almost one, and products with the shape of an adapter
            that are in none, with the reason why they are left as they are.
    """

    device: str
    sites: tuple[ExplainedSite, ...]
    refusals: tuple[Refusal, ...]

    @property
    def num_fused(self) -> int:
        """Number of sites that are fused."""
        return sum(site.decision.fused for site in self.sites)

    @property
    def before(self) -> Cost:
        """Predicted cost of both passes of all sites as XLA compiles them."""
        return sum((site.decision.before * site.runs for site in self.sites), Cost())

    @property
    def after(self) -> Cost:
        """Predicted cost of both passes of all sites, with those fused in kernels."""
        each = (
            (s.decision.after if s.decision.fused else s.decision.before) * s.runs
            for s in self.sites
        )
        return sum(each, Cost())

    def __str__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        console = Console(width=width, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            for shown in self._parts():
                show(console, shown)
        return capture.get().rstrip("\n")

    def _parts(self) -> Iterator[Table | str]:
        sites = "site" if len(self.sites) == 1 else "sites"
        found = f"{len(self.sites)} {sites} found, {self.num_fused} fused"
        yield f"{found}; times are predicted for {describe_device(self.device).title}"
        if self.sites:
            yield _site_table(self.sites)
            yield from _by_reason(map(_reason, self.sites))
        yield from _by_reason(
            ("input by XLA", site.input_refusal, site.location)
            for site in self.sites
            if site.input_refusal is not None
        )
        yield from _by_reason(
            ("near miss", r.reason, r.location) for r in self.refusals
        )
        if self.sites:
            costs = self.before, self.after
            both = f"{_times(*costs)}, {_megabytes(*costs)} MB"
            yield f"all sites, forward and backward: {both}"


def explain[**P](
    fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
) -> Explanation:
    """Explains what `fuse` does to a function on the present device.

    Args:
        fn: The function, or one that `fuse` returned, which is explained with the
            options that `fuse` was given.
        *args: Its arguments. Arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: Its keyword arguments.

    Raises:
        FuseError: The function has side effects.
    """
    fn, options = options_of(fn)
    program = trace_call(fn, options, args, kwargs)
    found = program.rewritten
    return explain_sites(program.traced, found)


def explain_sites(
    jaxpr: core.Jaxpr, found: Rewritten, device: str | None = None
) -> Explanation:
    """Explains the sites of a function.

    Args:
        jaxpr: The traced function.
        found: What was found in it and in its inner jaxprs.
        device: JAX's `device_kind`; None: the present device.
    """
    runs = dict(_runs_of(jaxpr))
    sites = []
    for choice in found.choices:
        site, part = choice.site, choice.part
        decision = decide(site, device)
        if device is None:
            decision = dataclasses.replace(
                decision, fused=part is not None, reason=choice.reason
            )
        sites.append(
            ExplainedSite(
                location=site.location,
                path=site.path,
                shape=SiteShape.of(site),
                runs=runs.get(_identity(site.jaxpr), 1.0),
                decision=decision,
                computed_by="xla" if part is None else part.name,
                input_refusal=choice.refusal,
            )
        )
    return Explanation(
        device=describe_device(device).name,
        sites=tuple(sites),
        refusals=found.refusals,
    )


def _runs_of(jaxpr: core.Jaxpr, runs: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Yields what identifies a jaxpr and all jaxprs in it, and how often each runs.

    A branch of a conditional counts as a fraction of a run, and a loop of unknown
    length as one.
    """
    yield _identity(jaxpr), runs
    for eqn in jaxpr.eqns:
        inner = [
            one
            for value in eqn.params.values()
            for one in (value if isinstance(value, tuple | list) else [value])
            if isinstance(one, core.Jaxpr)
        ]
        count = {"scan": eqn.params.get("length"), "cond": 1 / max(len(inner), 1)}
        for one in inner:
            yield from _runs_of(one, runs * (count.get(eqn.primitive.name) or 1.0))


def _identity(jaxpr: core.Jaxpr) -> tuple[int, ...]:
    """Identifies a jaxpr also after its calls were opened: its inputs are the same."""
    return tuple(map(id, jaxpr.invars))


def _site_table(sites: Sequence[ExplainedSite]) -> Table:
    """Makes a table of sites, with one row for those that are alike."""
    table = Table(box=None, pad_edge=False)
    for head in ("site", "T x K x N", "adapters", "fused", "runs"):
        table.add_column(head, no_wrap=True)
    for head in ("time", "MB"):
        table.add_column(head, justify="right")
    alike: dict[Any, float] = {}
    for site in sites:
        fused = site.computed_by if site.decision.fused else "no"
        key = _short(site.location), site.shape, site.decision, fused
        alike[key] = alike.get(key, 0.0) + site.runs
    for (location, shape, decision, fused), runs in alike.items():
        widths = "+".join(map(str, shape.out_features))
        ranks = "+".join(map(str, dict.fromkeys(shape.ranks)))
        cells = (
            location,
            f"{shape.tokens} x {shape.in_features} x {widths}",
            f"{shape.adapters} of rank {ranks}",
            {"kernels": "yes", "xla": "yes"}.get(fused, fused),
            f"{runs:g}",
            _times(decision.before, decision.after),
            _megabytes(decision.before, decision.after),
        )
        table.add_row(*map(literal, cells))
    return table


def _reason(site: ExplainedSite) -> tuple[str, str, str]:
    decision = site.decision
    return "fused" if decision.fused else "not fused", decision.reason, site.location


def _by_reason(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Returns a line for each (what it is, reason), with the places that have it."""
    places: dict[tuple[str, str], list[str]] = {}
    for what, reason, location in found:
        places.setdefault((what, reason), []).append(_short(location))
    for (what, reason), names in places.items():
        counts = collections.Counter(names)
        each = (p if n == 1 else f"{p} ({n} times)" for p, n in counts.items())
        yield f"{what}, {', '.join(each)}: {reason}"


def _times(before: Cost, after: Cost) -> str:
    if max(before.seconds, after.seconds) < 1e-3:
        return f"{1e6 * before.seconds:.0f} → {1e6 * after.seconds:.0f} us"
    return f"{1e3 * before.seconds:.2f} → {1e3 * after.seconds:.2f} ms"


def _megabytes(before: Cost, after: Cost) -> str:
    return f"{before.num_bytes / 1e6:,.0f} → {after.num_bytes / 1e6:,.0f}"


def _short(location: str) -> str:
    """Shortens a location to the name of the file and the line."""
    file, _, rest = location.partition(":")
    return f"{pathlib.PurePath(file).name}:{rest.partition(':')[0].split(' ')[0]}"
