"""Explains what was found in a function, what is fused and why, and what it saves."""

import collections
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import networkx as nx
from jax.extend import core
from rich.console import Console
from rich.table import Table

from jaxlora.common.console import literal, show
from jaxlora.fuse.api import trace_call
from jaxlora.fuse.predict.cost import Cost, Decision, decide, graph_cost
from jaxlora.fuse.predict.cut import Cut, find_cuts
from jaxlora.fuse.predict.graph import data_flow, inner_jaxprs
from jaxlora.fuse.predict.kernel_rates import describe_device
from jaxlora.fuse.predict.picture import save_picture
from jaxlora.fuse.predict.site_shape import SiteShape
from jaxlora.fuse.rewrite import Rewritten
from jaxlora.fuse.site import Refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedSite:
    """A low-rank branch that was found, and whether it is fused.

    Attributes:
        location: File, line and function of the code that made it.
        path: Names of the primitives around it, outermost first.
        shape: Its sizes.
        runs: How often it runs in a call of the function.
        decision: Whether it is fused and why, with its predicted costs.
    """

    location: str
    path: tuple[str, ...]
    shape: SiteShape
    runs: float
    decision: Decision


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
        refusals: Sums that are almost one, and why they are left as they are.
        before: Predicted cost of a call of the function as XLA compiles it.
        after: Predicted cost with the fused sites in the kernels.
        graph: The data-flow graph; see `jaxlora.fuse.predict.graph.data_flow`.
        cuts: Where the graph is split.
    """

    device: str
    sites: tuple[ExplainedSite, ...]
    refusals: tuple[Refusal, ...]
    before: Cost
    after: Cost
    graph: nx.MultiDiGraph = dataclasses.field(repr=False)
    cuts: tuple[Cut, ...] = dataclasses.field(repr=False)

    @property
    def num_fused(self) -> int:
        """Number of sites that are fused."""
        return sum(site.decision.fused for site in self.sites)

    @property
    def training_before(self) -> Cost:
        """Cost of both passes of all sites as XLA compiles them."""
        return sum((s.decision.before * s.runs for s in self.sites), Cost())

    @property
    def training_after(self) -> Cost:
        """Cost of both passes of all sites, with the fused ones in the kernels."""
        return sum((_chosen(s.decision) * s.runs for s in self.sites), Cost())

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a picture of the graph with its cuts.

        Args:
            path: The file; its suffix, `.svg` or `.png`, is the format.

        Raises:
            StorageError: The suffix is another one, or the file cannot be written.
        """
        save_picture(self.graph, self.cuts, describe_device(self.device), path)

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
            yield from _reasons(self.sites)
        yield from _near_misses(self.refusals)
        yield f"the function: {_change(self.before, self.after)}"
        if self.sites:
            both = _change(self.training_before, self.training_after)
            yield f"all sites, forward and backward: {both}"


def explain[**P](
    fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
) -> Explanation:
    """Explains what `fuse` does to a function on the present device.

    Args:
        fn: The function.
        *args: Its arguments. Arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: Its keyword arguments.

    Raises:
        FuseError: The function has side effects.
    """
    program = trace_call(fn, "auto", args, kwargs)
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
    described = describe_device(device)
    graph = data_flow(jaxpr)
    runs = {_identity(inner): count for inner, count in inner_jaxprs(jaxpr)}
    explained = tuple(
        ExplainedSite(
            location=site.location,
            path=site.path,
            shape=SiteShape.of(site),
            runs=runs.get(_identity(site.jaxpr), 1.0),
            decision=decide(site, device),
        )
        for site in (*found.sites, *found.declined)
    )
    before = graph_cost(graph, described)
    saved = Cost()
    for site in explained:
        if site.decision.fused:
            each = site.decision.forward_before + site.decision.forward_after * -1.0
            saved += each * site.runs
    return Explanation(
        device=described.name,
        sites=explained,
        refusals=found.refusals,
        before=before,
        after=before + saved * -1.0,
        graph=graph,
        cuts=tuple(find_cuts(graph, described)),
    )


def _identity(jaxpr: core.Jaxpr) -> tuple[int, ...]:
    """Identifies a jaxpr also after its calls were opened: its inputs are the same."""
    return tuple(map(id, jaxpr.invars))


def _chosen(decision: Decision) -> Cost:
    return decision.after if decision.fused else decision.before


def _site_table(sites: Sequence[ExplainedSite]) -> Table:
    """Makes a table of sites, with one row for those that are alike."""
    table = Table(box=None, pad_edge=False)
    for head in ("site", "T x K x N", "adapters", "fused", "runs"):
        table.add_column(head, no_wrap=True)
    for head in ("time", "MB"):
        table.add_column(head, justify="right")
    alike: dict[Any, float] = {}
    for site in sites:
        key = _short(site.location), site.shape, site.decision
        alike[key] = alike.get(key, 0.0) + site.runs
    for (location, shape, decision), runs in alike.items():
        widths = "+".join(map(str, shape.out_features))
        ranks = "+".join(map(str, dict.fromkeys(shape.ranks)))
        cells = (
            location,
            f"{shape.tokens} x {shape.in_features} x {widths}",
            f"{shape.adapters} of rank {ranks}",
            "yes" if decision.fused else "no",
            f"{runs:g}",
            _times(decision.before, decision.after),
            _megabytes(decision.before, decision.after),
        )
        table.add_row(*map(literal, cells))
    return table


def _reasons(sites: Sequence[ExplainedSite]) -> Iterator[str]:
    """Returns a line for each reason, with the places of the sites that have it."""
    places: dict[tuple[bool, str], list[str]] = {}
    for site in sites:
        why = site.decision.fused, site.decision.reason
        places.setdefault(why, []).append(_short(site.location))
    for (fused, reason), found in places.items():
        yield f"{'fused' if fused else 'not fused'}, {_counted(found)}: {reason}"


def _near_misses(refusals: Sequence[Refusal]) -> Iterator[str]:
    """Returns a line for each reason, with the places of the sums that have it."""
    places: dict[str, list[str]] = {}
    for refusal in refusals:
        places.setdefault(refusal.reason, []).append(_short(refusal.location))
    for reason, found in places.items():
        yield f"near miss, {_counted(found)}: {reason}"


def _counted(places: Sequence[str]) -> str:
    """Joins places, with the number of times of those that occur more than once."""
    counts = collections.Counter(places)
    return ", ".join(p if n == 1 else f"{p} ({n} times)" for p, n in counts.items())


def _times(before: Cost, after: Cost) -> str:
    if max(before.seconds, after.seconds) < 1e-3:
        return f"{1e6 * before.seconds:.0f} → {1e6 * after.seconds:.0f} us"
    return f"{1e3 * before.seconds:.2f} → {1e3 * after.seconds:.2f} ms"


def _megabytes(before: Cost, after: Cost) -> str:
    return f"{before.num_bytes / 1e6:,.0f} → {after.num_bytes / 1e6:,.0f}"


def _change(before: Cost, after: Cost) -> str:
    return f"{_times(before, after)}, {_megabytes(before, after)} MB"


def _short(location: str) -> str:
    """Shortens a location to the name of the file and the line."""
    file, _, rest = location.partition(":")
    return f"{pathlib.PurePath(file).name}:{rest.partition(':')[0].split(' ')[0]}"
