"""Draws a data-flow graph as the kernels that XLA makes of it, with its cuts."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jaxlora.errors import JaxloraError, StorageError
from jaxlora.fuse.predict.cut import Cut
from jaxlora.fuse.predict.graph import Operation, Tensor, operations
from jaxlora.fuse.predict.kernel_rates import KernelRates
from jaxlora.fuse.predict.launches import Launch, Origins, xla_launches
from jaxlora.fuse.predict.work import Kind

_MAX_BOXES = 90  # of a graph that is drawn kernel by kernel
_MAX_LABELLED = 16  # boxes of a graph in which every tensor is labelled
_WIDTH, _HEIGHT = 2.9, 0.8  # inches of a box with its surroundings
_COLORS = {"compute": "#f6c89f", "memory": "#bcd7ee", "fold": "#e4e4e4"}
_CUT, _EDGE, _FUSED = "#c0262d", "#888888", "#2a7a3b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Box:
    """A box of the picture.

    Attributes:
        label: Its text.
        color: A key of `_COLORS`.
        operations: The operations that it stands for.
        in_kernel: Whether it shares a fused kernel with a large product.
    """

    label: str
    color: str
    operations: frozenset[int]
    in_kernel: bool = False


def save_picture(
    graph: nx.MultiDiGraph,
    cuts: Sequence[Cut],
    device: KernelRates,
    path: str | pathlib.Path,
) -> None:
    """Writes a picture of a graph with its cuts.

    Each box is a kernel that XLA makes of the graph, with its predicted time. Graphs
    with many kernels are folded: a box then stands for the path at a cut, or for the
    kernels between such paths.

    Args:
        graph: The data-flow graph.
        cuts: Where it is split.
        device: The device for which times are predicted.
        path: The file; its suffix, `.svg` or `.png`, is the format.

    Raises:
        JaxloraError: The suffix is another one.
        StorageError: The file cannot be written.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".svg", ".png"):
        raise JaxloraError(
            f"a picture is written as .svg or .png, got {str(path)!r}: change the "
            "suffix of the file."
        )
    picture = _picture(graph, cuts, device)
    # Without these, the same graph would have other bytes each time.
    settings: dict[str, Any] = {"svg.hashsalt": "jaxlora"}
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with matplotlib.rc_context(settings):
            _draw(picture, device).savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise StorageError(f"the picture {path} cannot be written: {error}.") from error


def _picture(
    graph: nx.MultiDiGraph, cuts: Sequence[Cut], device: KernelRates
) -> "nx.DiGraph[Any]":
    """Returns the graph of boxes, with the attributes `box`, `tensor` and `is_cut`."""
    launches = xla_launches(graph)
    boxes = [_kernel_box(graph, launch, cuts, device) for launch in launches]
    picture = _connect(graph, boxes, cuts)
    if len(boxes) > _MAX_BOXES:
        picture = _connect(graph, _fold(picture, cuts, launches, device), cuts)
    return picture


def _kernel_box(
    graph: nx.MultiDiGraph, launch: Launch, cuts: Sequence[Cut], device: KernelRates
) -> _Box:
    ops = [graph.nodes[i]["operation"] for i in launch.operations]
    own = frozenset(launch.operations)
    time = f"{1e6 * launch.seconds(device) / launch.runs:.0f} us"
    runs = f" x {launch.runs:g}" if launch.runs != 1 else ""
    megabytes = (launch.bytes_read + launch.bytes_written) / 1e6
    return _Box(
        label=f"{_title(ops, launch)}\n{time}{runs}, {megabytes:.1f} MB",
        color="compute" if launch.is_compute_bound(device) else "memory",
        operations=own,
        in_kernel=any(own & cut.inside for cut in cuts if cut.tensors),
    )


def _title(ops: Sequence[Operation], launch: Launch) -> str:
    if launch.sizes is not None:
        batches, rows, columns, inner = launch.sizes
        sides = f"{rows} x {inner} x {columns}"
        product = f"product {sides}" if batches == 1 else f"{batches} products {sides}"
        return f"{product}, add" if any(op.sizes is None for op in ops) else product
    names = list(dict.fromkeys(op.name for op in ops))
    ranked = sorted(names, key=lambda n: n in ("convert_element_type", "mul", "add"))
    return ", ".join(ranked[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")


def _connect(
    graph: nx.MultiDiGraph, boxes: Sequence[_Box], cuts: Sequence[Cut]
) -> "nx.DiGraph[Any]":
    """Connects boxes by the largest tensor that one reads from another."""
    ops = operations(graph)
    origins = Origins(ops)
    owner = {i: number for number, box in enumerate(boxes) for i in box.operations}
    cut_tensors = {tensor.index for cut in cuts for tensor in cut.tensors}
    picture: nx.DiGraph[Any] = nx.DiGraph()
    for number, box in enumerate(boxes):
        picture.add_node(number, box=box)
    for op in ops:
        if op.kind is Kind.VIEW or op.index not in owner:
            continue
        for tensor in op.reads:
            root = origins.tensor(tensor)
            writer, reader = owner.get(origins.writer[root.index]), owner[op.index]
            if writer is not None and writer != reader:
                is_cut = root.index in cut_tensors
                _add_edge(picture, writer, reader, root, is_cut)
    return picture


def _add_edge(
    picture: "nx.DiGraph[Any]", writer: int, reader: int, tensor: Tensor, is_cut: bool
) -> None:
    """Adds an edge; one that stands for several tensors shows a cut, or the largest."""
    known = picture.get_edge_data(writer, reader)
    size = is_cut, tensor.num_bytes
    if known is None or size > (known["is_cut"], known["tensor"].num_bytes):
        picture.add_edge(writer, reader, tensor=tensor, is_cut=is_cut)


def _fold(
    picture: "nx.DiGraph[Any]",
    cuts: Sequence[Cut],
    launches: Sequence[Launch],
    device: KernelRates,
) -> list[_Box]:
    """Makes a box for the path at each cut, and one for each piece of the rest."""
    site_of = {i: c for c, cut in enumerate(cuts) for i in (*cut.before, *cut.inside)}
    groups: dict[Any, list[int]] = {}
    rest = []
    for number, data in picture.nodes(data=True):
        site = next((site_of[i] for i in data["box"].operations if i in site_of), None)
        if site is None:
            rest.append(number)
        else:
            groups.setdefault(("site", site), []).append(number)
    levels = _levels(picture)
    sites = sorted(levels[n] for (_, _), members in groups.items() for n in members)
    for number in rest:  # between the same paths
        before = sum(level < levels[number] for level in sites)
        groups.setdefault(("rest", before), []).append(number)
    return [
        _folded(
            kind, [picture.nodes[n]["box"] for n in members], members, launches, device
        )
        for (kind, _), members in groups.items()
    ]


def _folded(
    kind: str,
    boxes: Sequence[_Box],
    numbers: Iterable[int],
    launches: Sequence[Launch],
    device: KernelRates,
) -> _Box:
    seconds = sum(launches[n].seconds(device) for n in numbers)
    largest = max(boxes, key=lambda b: len(b.label) * ("product" in b.label))
    title = largest.label.partition("\n")[0] if kind == "site" else "other kernels"
    kernels = "kernel" if len(boxes) == 1 else "kernels"
    return _Box(
        label=f"{title}\n{len(boxes)} {kernels}, {1e6 * seconds:.0f} us",
        color="compute" if kind == "site" else "fold",
        operations=frozenset(i for box in boxes for i in box.operations),
        in_kernel=any(box.in_kernel for box in boxes),
    )


def _levels(picture: "nx.DiGraph[Any]") -> dict[int, int]:
    """Returns the row of each box; boxes in a cycle of folded ones share a row."""
    condensed = nx.condensation(picture)
    rows = list(nx.topological_generations(condensed))
    row_of = {node: row for row, nodes in enumerate(rows) for node in nodes}
    for node in rows[0] if rows else ():  # just above what reads it
        readers = (row_of[reader] for reader in condensed.successors(node))
        row_of[node] = min(readers, default=1) - 1
    return {
        box: row
        for component, row in row_of.items()
        for box in condensed.nodes[component]["members"]
    }


def _positions(picture: "nx.DiGraph[Any]") -> dict[int, tuple[float, float]]:
    """Places boxes in rows, near those from which they read."""
    levels = _levels(picture)
    places: dict[int, tuple[float, float]] = {}
    for row in range(max(levels.values(), default=-1) + 1):
        members = [n for n in picture if levels[n] == row]

        def wanted(number: int) -> float:
            above = [places[p][0] for p in picture.predecessors(number) if p in places]
            return sum(above) / len(above) if above else 0.0

        members.sort(key=lambda n: (wanted(n), n))
        for column, number in enumerate(members):
            places[number] = (column - (len(members) - 1) / 2, -float(row))
    return places


def _draw(picture: "nx.DiGraph[Any]", device: KernelRates) -> Figure:
    places = _positions(picture)
    across = [x for x, _ in places.values()] or [0.0]
    rows = 1 + max((-y for _, y in places.values()), default=0.0)
    width = _WIDTH * (max(across) - min(across) + 1.2)
    figure = Figure(figsize=(max(width, 8.0), _HEIGHT * rows + 1.2), layout="tight")
    axes = figure.subplots()
    axes.set_axis_off()
    frames = {
        number: _draw_box(axes, places[number], data["box"])
        for number, data in picture.nodes(data=True)
    }
    is_labelled = len(picture) <= _MAX_LABELLED
    for writer, reader, data in picture.edges(data=True):
        style = _edge_style(places[writer], places[reader], data)
        style |= {"patchA": frames[writer], "patchB": frames[reader]}
        ends = places[writer], places[reader]
        axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=style, zorder=1)
        if data["is_cut"] or is_labelled:
            _label_edge(axes, *ends, data)
    axes.set_xlim(min(across) - 0.6, max(across) + 0.6)
    axes.set_ylim(0.5 - rows, 0.5)
    title = f"Kernels as XLA compiles them, with times predicted for {device.title}"
    axes.set_title(title, size=8, loc="left")
    _legend(figure, [data["box"] for _, data in picture.nodes(data=True)])
    return figure


def _draw_box(axes: Axes, place: tuple[float, float], box: _Box) -> Patch:
    """Draws a box, and returns its frame, at which arrows end."""
    frame = {
        "boxstyle": "round",
        "facecolor": _COLORS[box.color],
        "edgecolor": _FUSED if box.in_kernel else _EDGE,
        "linewidth": 2.0 if box.in_kernel else 0.6,
    }
    text = axes.text(*place, box.label, bbox=frame, size=7, ha="center", va="center")
    patch = text.get_bbox_patch()
    assert patch is not None
    return patch


def _edge_style(start, end, data: dict[str, Any]) -> dict[str, Any]:
    is_far = start[1] - end[1] > 1.5 and abs(start[0] - end[0]) < 0.25
    return {
        "arrowstyle": "->",
        "color": _CUT if data["is_cut"] else _EDGE,
        "linestyle": "dashed" if data["is_cut"] else "solid",
        "linewidth": (1.2 if data["is_cut"] else 0.5)
        + min(data["tensor"].num_bytes / 64e6, 2.5),
        "shrinkA": 1,
        "shrinkB": 1,
        # Around the boxes between the two.
        "connectionstyle": f"arc3,rad={0.25 if is_far else 0.0}",
    }


def _label_edge(axes: Axes, start, end, data: dict[str, Any]) -> None:
    x, y = ((a + b) / 2 for a, b in zip(start, end, strict=True))
    color = _CUT if data["is_cut"] else "#555555"
    frame = {"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0}
    label = str(data["tensor"])
    axes.text(x, y, label, size=6, color=color, bbox=frame, ha="center", zorder=2)


def _legend(figure: Figure, boxes: Sequence[_Box]) -> None:
    """Explains the colors; those that the picture lacks are left out."""
    colors = {box.color for box in boxes}
    labels = {
        "compute": "bound by compute",
        "memory": "bound by memory",
        "fold": "several kernels",
    }
    marks: list[Any] = [
        Patch(facecolor=_COLORS[color], label=label)
        for color, label in labels.items()
        if color in colors
    ]
    if any(box.in_kernel for box in boxes):
        green = "can share a kernel with a large product"
        cut = "cut: written to memory before that kernel"
        marks.append(Patch(facecolor="white", edgecolor=_FUSED, label=green))
        marks.append(Line2D([], [], color=_CUT, linestyle="dashed", label=cut))
    figure.legend(handles=marks, loc="lower left", fontsize=7, ncols=len(marks))
