"""Draws the regions of a function with their predicted and measured times."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from jaxlora.errors import JaxloraError, StorageError

_COLORS = {
    "XLA, predicted": "#bcd7ee",
    "chosen, predicted": "#f6c89f",
    "XLA, measured": "#4c86b8",
    "chosen, measured": "#d27d2c",
}
_HEIGHT = 0.2  # of a bar, whose region has a height of 1


class Bars(NamedTuple):
    """The bars of a region.

    Attributes:
        label: Its name.
        seconds: Times of both passes, by the names of `_COLORS`; some may be missing.
    """

    label: str
    seconds: dict[str, float]


def save_picture(regions: Sequence[Bars], title: str, path: str | pathlib.Path) -> None:
    """Writes a picture with the times of regions.

    Args:
        regions: The regions.
        title: The title of the picture.
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
    # Without these, the same regions would have other bytes each time.
    settings: dict[str, Any] = {"svg.hashsalt": "jaxlora"}
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with matplotlib.rc_context(settings):
            _draw(regions, title).savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise StorageError(f"the picture {path} cannot be written: {error}.") from error


def _draw(regions: Sequence[Bars], title: str) -> Figure:
    figure = Figure(figsize=(9.0, 1.4 + 0.9 * len(regions)), layout="tight")
    axes = figure.subplots()
    for offset, (name, color) in enumerate(_COLORS.items()):
        bars = [
            (i, r.seconds[name]) for i, r in enumerate(regions) if name in r.seconds
        ]
        if not bars:
            continue
        places = [i + _HEIGHT * (offset - 1.5) for i, _ in bars]
        micros = [1e6 * seconds for _, seconds in bars]
        drawn = axes.barh(places, micros, _HEIGHT, color=color, label=name)
        axes.bar_label(drawn, fmt="{:,.0f}", size=7, padding=2)
    axes.set_yticks(range(len(regions)), [region.label for region in regions], size=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("us, forward and backward", size=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(title, size=9, loc="left")
    if regions:
        axes.legend(fontsize=7)
    return figure
