"""Draws a sweep on one HTML page that needs no network and no other file.

The table and the charts are there without scripts; a short script sorts and filters
them. Every text comes from settings of the user and is escaped.
"""

import base64
import dataclasses
import hashlib
import html
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from jaxlora.common.atomic import write_text
from jaxlora.config.configuration_names import number_text, value_text
from jaxlora.printable import one_line
from jaxlora.sweeps.ranking import SweepReport, is_number

_WIDTH, _HEIGHT, _MARGIN = 1000, 320, 50  # of a picture, in its own units
_MOST_TICKS = 7
_LOG_FROM = 20.0  # ratio of the largest to the smallest number
_MOST_VALUES = 6  # of a number that is not divided into ranges
_NUM_RANGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelAxis:
    """One axis.

    Attributes:
        name: The setting.
        places: Place of each configuration on it, from 0 (bottom) to 1, in the order of
            the ranking.
        ticks: (place, text) of the values that are written beside it.
    """

    name: str
    places: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]


def write_page(report: SweepReport, title: str, path: pathlib.Path) -> None:
    """Writes the page to an HTML file.

    Raises:
        StorageError: It cannot be written.
    """
    template = (resources.files("jaxlora.sweeps") / "page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.S)
    assert script is not None
    digest = hashlib.sha256(script[1].encode()).digest()
    parts = {
        "title": _escape(title),
        "script_hash": base64.b64encode(digest).decode(),
        "count": str(len(report.trials)),
        "metric": _escape(report.metric_name),
        "kept": _escape(", ".join(report.kept)),
        "importance": _importance(report),
        "parallel": _parallel(report),
        "curves": _curves(report),
        "family": _family(report),
        "table": _table(report),
    }
    # In one pass, so that nothing in a part is taken for a mark.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    write_text(path, page)


def _escape(text: object) -> str:
    return html.escape(one_line(text))


def _shade(place: int, count: int) -> str:
    """Returns the color of a line: blue for the best, orange for the worst."""
    share = place / max(1, count - 1)
    return f"hsl({220 - 190 * share:.0f} 75% 48%)"


def _line(place: int, count: int, points: list[tuple[float, float]]) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline data-row="{place}" points="{text}" fill="none" '
        f'stroke="{_shade(place, count)}"/>'
    )


def _text(x: float, y: float, text: object, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>'
    )


def _svg(name: str, label: str, parts: list[str]) -> str:
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    drawn = "\n".join(parts)
    return (
        f'<svg id="{name}" viewBox="{box}" role="img" aria-label="{label}">\n{drawn}\n'
        "</svg>"
    )


def _height(share: float) -> float:
    return _HEIGHT - 30 - share * (_HEIGHT - 70)


def _parallel(report: SweepReport) -> str:
    """Draws parallel coordinates, with an area on each axis to drag a filter on."""
    axes, count = parallel_axes(report), len(report.trials)
    gap = (_WIDTH - 2 * _MARGIN) / max(1, len(axes) - 1)
    xs = [_MARGIN + i * gap for i in range(len(axes))]
    parts = [
        _line(
            place,
            count,
            [(x, _height(a.places[place])) for x, a in zip(xs, axes, strict=True)],
        )
        for place in reversed(range(count))
    ]
    for number, (x, axis) in enumerate(zip(xs, axes, strict=True)):
        parts += _drawn_axis(number, x, axis)
    return _svg("parallel", "Settings of each configuration and how good it is", parts)


def _drawn_axis(number: int, x: float, axis: ParallelAxis) -> list[str]:
    top, bottom = _height(1), _height(0)
    anchor = "start" if number == 0 else "middle"
    places = " ".join(f"{place:.4f}" for place in axis.places)
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>',
        _text(x - (_MARGIN - 4 if number == 0 else 0), 18, axis.name, anchor),
        *(_text(x + 4, _height(h) + 4, text) for h, text in axis.ticks),
        f'<rect class="kept" x="{x - 8:.1f}" width="16" y="0" height="0"/>',
        f'<rect class="drag" data-places="{places}" data-top="{top}" '
        f'data-bottom="{bottom}" x="{x - 16:.1f}" width="32" y="{top - 8}" '
        f'height="{bottom - top + 16}"/>',
    ]


def _curves(report: SweepReport) -> str:
    """Draws the metric over the share of steps done."""
    losses = [loss for points in report.curves.values() for _, loss in points]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    span = high - low or 1.0
    parts = []
    for place in reversed(range(len(report.trials))):
        trial = report.trials[place]
        points = report.curves.get(trial.settings.name, ())
        drawn = [
            (
                _MARGIN + step / trial.num_steps * (_WIDTH - 2 * _MARGIN),
                _height((loss - low) / span),
            )
            for step, loss in points
        ]
        parts.append(_line(place, len(report.trials), drawn))
    bottom = _HEIGHT - 8
    parts += [
        _text(4, _height(1) + 4, f"{high:.3f}"),
        _text(4, _height(0) + 4, f"{low:.3f}"),
        _text(_MARGIN, bottom, "0"),
        _text(_WIDTH - _MARGIN, bottom, "all steps", "end"),
    ]
    return _svg("curves", "Evaluations of each configuration", parts)


def _importance(report: SweepReport) -> str:
    rows = [
        f'<tr><th scope="row">{_escape(name)}</th>'
        f'<td><meter min="0" max="1" value="{share:.3f}">{share:.0%}</meter> '
        f"{share:.0%}</td></tr>"
        for name, share in importance(report.varied, report.costs).items()
    ]
    return "\n".join(rows)


def _family(report: SweepReport) -> str:
    """Draws the tree of configurations and their copies; empty if there are none."""
    family = report.family()
    trials = {trial.settings.name: trial for trial in report.trials}
    roots = [name for name in family if not trials[name].parent]
    if not roots:
        return ""

    def branch(name: str) -> str:
        origin = trials[name].settings.clone_of
        step = None if origin is None else origin.step
        where = "" if step is None else f" from step {step}"
        value = trials[name].value(report.metric)
        shown = "-" if value is None else f"{value:.4f}"
        inner = "".join(map(branch, family.get(name, ())))
        below = f"<ul>{inner}</ul>" if inner else ""
        return f"<li>{_escape(name)}{where}: {shown}{below}</li>"

    tree = "".join(map(branch, roots))
    return f"<h2>Copies</h2>\n<ul>{tree}</ul>"


def _table(report: SweepReport) -> str:
    heads = "".join(
        f'<th scope="col"><button type="button">{_escape(name)}</button></th>'
        for name in report.header()
    )
    rows = []
    for place, trial in enumerate(report.trials):
        mark = ' class="best"' if trial.settings.name in report.kept else ""
        cells = "".join(map(_cell, report.row(place)))
        reason = _escape(trial.progress.reason)
        rows.append(f'<tr data-row="{place}"{mark} title="{reason}">{cells}</tr>')
    body = "\n".join(rows)
    return f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>"


def _cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if is_number(value) and math.isfinite(value):
        shown = f"{value:.4g}" if isinstance(value, float) and value >= 0.1 else None
        text = shown or (f"{value:,}" if value > 9999 else value_text(value))
        return f'<td data-value="{value!r}">{_escape(text)}</td>'
    return f"<td>{_escape(value_text(value))}</td>"


# ---- the axes of parallel coordinates: a varied setting each, and the metric ---------


def parallel_axes(report: SweepReport) -> list[ParallelAxis]:
    """Returns the axes of all varied settings, and of the metric."""
    names = [trial.settings.name for trial in report.trials]
    columns = {
        key: [column[name] for name in names] for key, column in report.varied.items()
    }
    axes = [_axis(name, values) for name, values in columns.items()]
    costs = list(report.costs.values())
    worst = max(filter(math.isfinite, costs), default=0.0)
    values = [report.metric.cost(c if math.isfinite(c) else worst) for c in costs]
    return [*axes, _axis(report.metric_name, values)]


def _axis(name: str, values: Sequence[Any]) -> ParallelAxis:
    distinct = {value_text(value): value for value in values}
    is_numeric = all(map(is_number, values))
    if is_numeric:
        distinct = {value_text(value): value for value in sorted(values)}
    if is_numeric and len(distinct) > _MOST_TICKS:
        return _range(name, values)
    last = max(1, len(distinct) - 1)
    order = list(distinct) if is_numeric else sorted(distinct)
    places = {text: place / last for place, text in enumerate(order)}
    ticks = [(place, text) for text, place in places.items()]
    if len(ticks) > 4 * _MOST_TICKS:
        ticks = [ticks[0], ticks[-1]]
    return ParallelAxis(
        name=name,
        places=tuple(places[value_text(value)] for value in values),
        ticks=tuple(ticks),
    )


def _range(name: str, values: Sequence[float]) -> ParallelAxis:
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= _LOG_FROM
    scaled = [math.log(v) if is_log else float(v) for v in values]
    first, last = min(scaled), max(scaled)
    middle = math.exp((first + last) / 2) if is_log else (first + last) / 2
    return ParallelAxis(
        name=name,
        places=tuple((s - first) / (last - first) for s in scaled),
        ticks=tuple(
            (place, number_text(value))
            for place, value in ((0.0, low), (0.5, middle), (1.0, high))
        ),
    )


# ---- what each setting explains alone ------------------------------------------------


def importance(
    varied: Mapping[str, Mapping[str, Any]], losses: Mapping[str, float]
) -> dict[str, float]:
    """Returns the share of the variance of places that each setting explains alone.

    It is one minus the variance within groups of equal values over the whole variance,
    both without bias (epsilon squared, Kelley 1935), and 0 if that is negative. Places
    are compared rather than losses, as a configuration that diverges would outweigh all
    others. Numbers of many values are divided into four ranges of as many
    configurations each.

    Args:
        varied: Value of each setting, by setting and configuration.
        losses: Loss of each configuration; those without are left out.

    Returns:
        The shares by setting, the largest first.
    """
    names = [name for name, loss in losses.items() if np.isfinite(loss)]
    places = _places([losses[name] for name in names])
    found = {
        setting: _explained(_groups([column[name] for name in names]), places)
        for setting, column in varied.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _places(losses: list[float]) -> np.ndarray:
    """Returns the places of losses; equal ones have the mean of theirs."""
    values, which, counts = np.unique(losses, return_inverse=True, return_counts=True)
    if not len(values):
        return np.zeros(0)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def _groups(values: list[Any]) -> np.ndarray:
    """Numbers the groups of equal, or similar, values."""
    _, which = np.unique([value_text(v) for v in values], return_inverse=True)
    numbers = [value for value in values if is_number(value)]
    if len(numbers) < len(values) or len(set(numbers)) <= _MOST_VALUES:
        return which
    borders = np.quantile(numbers, np.arange(1, _NUM_RANGES) / _NUM_RANGES)
    return np.searchsorted(borders, numbers)


def _explained(groups: np.ndarray, places: np.ndarray) -> float:
    num_groups, count = len(np.unique(groups)), len(places)
    if num_groups < 2 or count <= num_groups or not places.std():
        return 0.0
    within = sum(
        float(((p := places[groups == group]) - p.mean()).__pow__(2).sum())
        for group in np.unique(groups)
    )
    whole = float(((places - places.mean()) ** 2).sum())
    return max(0.0, 1 - within / (count - num_groups) * (count - 1) / whole)
