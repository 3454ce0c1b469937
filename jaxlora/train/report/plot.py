"""Draws the losses of a run, so that forty jobs can be read in one picture."""

import io
import math
import pathlib
import time
from typing import TYPE_CHECKING, Any

from jaxlora.common.atomic import write_bytes
from jaxlora.common.background import in_background
from jaxlora.run.callback import Callback
from jaxlora.run.events import WindowEvent
from jaxlora.run.folder import PICTURE
from jaxlora.run.log import METRICS_FILE, read_events

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_NAMED = 8  # jobs in colors; the others are grey
_KINDS = {"step": ("loss", "training"), "eval": ("eval_loss", "held out")}
_MIN_SECONDS = 60.0  # between two pictures while a run trains
_MAX_SHARE = 0.005  # of the time that may be spent on drawing

Curves = dict[str, list[tuple[int, float]]]  # (step, loss) by job


class LossPlot(Callback):
    """Draws losses.png again from time to time while a run trains.

    It takes at most half a percent of the time, as training waits for it.
    """

    def __init__(self, folder: pathlib.Path):
        """Makes the object.

        Args:
            folder: Folder of the run.
        """
        self._folder = folder
        self._next = time.monotonic() + _MIN_SECONDS
        self._has_imported = False

    def on_window(self, event: WindowEvent) -> None:
        """Draws the picture if it is due.

        Raises:
            StorageError: It cannot be written.
        """
        if not self._has_imported:  # the end of the run would wait for it
            self._has_imported = True
            in_background(_import_library)
        began = time.monotonic()
        if began >= self._next:
            plot_losses(self._folder / METRICS_FILE, self._folder / PICTURE)
            took = time.monotonic() - began
            self._next = began + max(_MIN_SECONDS, took / _MAX_SHARE)


def _import_library() -> None:
    """Imports what a picture needs; an error is raised where a picture is drawn."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def plot_losses(metrics: pathlib.Path, picture: pathlib.Path) -> None:
    """Draws the jobs' training losses, and their held-out losses beside them.

    The jobs with the lowest losses have colors and names, best first; the others are
    grey.

    Args:
        metrics: A run's metrics.jsonl.
        picture: PNG file to write.
    """
    from matplotlib.figure import Figure

    curves = _read_curves(metrics)
    panels = [kind for kind in _KINDS if curves[kind]] or ["step"]
    names = rank_jobs(curves)
    figure = Figure(figsize=(6.5 * len(panels), 4.5), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, kind in zip(row, panels, strict=True):
        _draw(axes, curves[kind], names)
        axes.set_title(_KINDS[kind][1], fontsize="medium")
        axes.set_xlabel("optimizer step of the job")
        axes.set_ylabel("loss, nats per target token")
        axes.grid(alpha=0.3)
    if names:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside right upper",
            fontsize="small",
        )
    write_png(figure, picture)


def write_png(figure: "Figure", picture: pathlib.Path) -> None:
    """Writes a figure of matplotlib as a PNG file.

    Raises:
        StorageError: It cannot be written.
    """
    # matplotlib's object API needs no display and has no global state, unlike pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)
    write_bytes(picture, drawn.getvalue())


def _read_curves(metrics: pathlib.Path) -> dict[str, Curves]:
    """Reads the losses of a run by kind of event and job."""
    curves: dict[str, Curves] = {kind: {} for kind in _KINDS}
    for event in read_events(metrics):
        if event["event"] in _KINDS:
            key, _ = _KINDS[event["event"]]
            points = curves[event["event"]].setdefault(event["job"], [])
            points.append((event["step"], event[key]))
    return curves


def rank_jobs(curves: dict[str, Curves]) -> list[str]:
    """Sorts the jobs by their best held-out loss, then by their last training loss."""

    def place(name: str) -> tuple[float, float]:
        evals, steps = curves["eval"].get(name), curves["step"].get(name)
        best = min((loss for _, loss in evals), default=math.inf) if evals else math.inf
        return best, steps[-1][1] if steps else math.inf

    names = dict.fromkeys(name for found in curves.values() for name in found)
    return sorted(names, key=place)


def _draw(axes: Any, curves: Curves, names: list[str]) -> None:
    """Draws one panel: the best jobs in colors over the others in grey."""
    for place, name in reversed(list(enumerate(names))):
        points = curves.get(name)
        if not points:
            continue
        steps, losses = zip(*points, strict=True)
        marker = "o" if len(points) < 20 else ""
        style = {"marker": marker, "markersize": 3}
        if place < _NUM_NAMED:
            axes.plot(steps, losses, color=f"C{place}", label=name, **style)
        else:
            label = f"{len(names) - _NUM_NAMED} more" if place == _NUM_NAMED else None
            axes.plot(steps, losses, color="0.8", linewidth=0.8, label=label)
