"""Explains what was found in a function, what is fused and why, and what it saves."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import networkx as nx
from jax.extend import core
from rich.console import Console
from rich.table import Table

from jaxlora.console import literal, show
from jaxlora.fuse.api import trace_call
from jaxlora.fuse.cost import Cost, Decision, decide, format_time, graph_cost
from jaxlora.fuse.cut import Cut, find_cuts
from jaxlora.fuse.device import describe_device
from jaxlora.fuse.graph import data_flow, inner_jaxprs
from jaxlora.fuse.picture import save_picture
from jaxlora.fuse.rewrite import Rewritten
from jaxlora.fuse.site import Refusal
from jaxlora.fuse.site_shape import SiteShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedSite:
    """A low-rank branch that was found, and what becomes of it.

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
    """What the fusion pass does to a function.

    `str()` is a table as wide as the terminal.

    Attributes:
        device: Name of the device for which times are predicted.
        sites: The low-rank branches that were found.
        refusals: Sums that are almost one, and why they are left as they are.
        before: Predicted cost of a call of the function as XLA compiles it.
        after: Predicted cost with the fused sites in the kernels.
        graph: The data-flow graph; see `jaxlora.fuse.graph.data_flow`.
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
        branches = "branch" if len(self.sites) == 1 else "branches"
        found = f"{len(self.sites)} low-rank {branches} found, {self.num_fused} fused"
        yield f"{found}; predicted for the device {self.device}"
        if self.sites:
            yield _site_table(self.sites)
            yield from _reasons(self.sites)
        for refusal in self.refusals:
            yield f"not a site: {_short(refusal.location)}: {refusal.reason}"
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
    table.add_column("site", no_wrap=True)
    for head in ("T x K x N", "rank", "fused"):
        table.add_column(head, no_wrap=True)
    for head in ("runs", "forward, us", "both, us", "MB"):
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
            f"{ranks} x {shape.adapters}" if shape.adapters > 1 else ranks,
            "yes" if decision.fused else "no",
            f"{runs:g}",
            _micros(decision.forward_before, decision.forward_after),
            _micros(decision.before, decision.after),
            _megabytes(decision.before, decision.after),
        )
        table.add_row(*map(literal, cells))
    return table


def _reasons(sites: Sequence[ExplainedSite]) -> Iterator[str]:
    """Returns a line for each reason, with the number of sites that have it."""
    counts: dict[tuple[bool, str], int] = {}
    for site in sites:
        why = site.decision.fused, site.decision.reason
        counts[why] = counts.get(why, 0) + 1
    for (fused, reason), count in counts.items():
        yield f"{count} {'fused' if fused else 'not fused'}: {reason}"


def _micros(before: Cost, after: Cost) -> str:
    return f"{1e6 * before.seconds:,.0f} → {1e6 * after.seconds:,.0f}"


def _megabytes(before: Cost, after: Cost) -> str:
    return f"{before.num_bytes / 1e6:,.0f} → {after.num_bytes / 1e6:,.0f}"


def _change(before: Cost, after: Cost) -> str:
    times = f"{format_time(before.seconds)} → {format_time(after.seconds)}"
    return f"{times}, {_megabytes(before, after)} MB"


def _short(location: str) -> str:
    """Shortens a location to the name of the file and the line."""
    file, _, rest = location.partition(":")
    return f"{pathlib.PurePath(file).name}:{rest.partition(':')[0].split(' ')[0]}"
