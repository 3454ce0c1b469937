"""Shows a run while it trains: a live display, or lines of the log."""

import importlib.util
import logging
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live

from jaxlora.common import console
from jaxlora.run.callback import Callback
from jaxlora.run.events import (
    EvalEvent,
    Event,
    RunEndEvent,
    StepEvent,
    WindowEvent,
    losses_by_set,
)
from jaxlora.run.status import RunStatus, StatusTracker
from jaxlora.run.status_view import StatusView, format_seconds

logger = logging.getLogger(__name__)

_REFRESH_PER_SECOND = 4
_MAX_NAMED = 4  # losses in a line of the log


class Progress(Callback):
    """Shows the state of a run on a terminal or in a notebook, and log lines elsewhere.

    A notebook needs the package ipywidgets for the live display.
    """

    def __init__(
        self,
        tracker: StatusTracker,
        *,
        log_every: int = 1,
        on: Console = console.stderr,
    ):
        """Makes the object; `start` shows the display.

        Args:
            tracker: Follows the same events, and receives them first.
            log_every: Rounds between lines of the log.
            on: Console to show the display on.
        """
        self._tracker, self._log_every, self._console = tracker, log_every, on
        self._losses: dict[str, float] = {}  # of the latest step in the window, by job
        self._live: Live | None = None
        if on.is_terminal or (on.is_jupyter and importlib.util.find_spec("ipywidgets")):
            self._live = Live(
                get_renderable=self._view,
                console=on,
                refresh_per_second=_REFRESH_PER_SECOND,
                transient=False,
            )

    def start(self) -> None:
        """Shows the display; lines of the log go above it."""
        if self._live is not None:
            before = sys.stderr
            self._live.start()
            _move_log(before)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            above = sys.stderr
            self._live.stop()
            _move_log(above)

    def _view(self) -> StatusView:
        # One line stays free, as rich clears the screen if a display fills all of it.
        height = None if self._console.is_jupyter else self._console.size.height - 1
        return StatusView(
            status=self._tracker.status(),
            max_lines=None if height is None else max(4, height),
        )

    def on_event(self, event: Event) -> None:
        """Logs a line after a window, if no display is shown."""
        if self._live is not None:
            if isinstance(event, RunEndEvent):
                self._live.refresh()
            return
        if isinstance(event, StepEvent):
            self._losses[event.job] = event.loss
        elif isinstance(event, EvalEvent):
            if losses := losses_by_set(event.metrics):
                shown = format_losses(event.eval_loss, losses)
                logger.info("%s: step %d: held-out %s", event.job, event.step, shown)
        elif isinstance(event, WindowEvent):
            before = event.round - event.num_rounds
            if event.round // self._log_every > before // self._log_every:
                logger.info("%s", log_line(self._tracker.status(), self._losses))
            self._losses = {}


def _move_log(before: object) -> None:
    """Lets the handlers of the log that write to a stream write to the present stderr.

    A script's `logging.basicConfig` writes to stderr itself, past what rich puts in its
    place while a display is shown. Such lines would end up inside the display.
    """
    for name in (None, "jaxlora"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)


def format_losses(loss: float, by_set: Mapping[str, float]) -> str:
    """Describes the loss on several held-out data sets in a few words."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in by_set.items())
    return f"loss {loss:.3f} ({parts})"


def log_line(status: RunStatus, losses: dict[str, float]) -> str:
    """Describes the state of a run in one line.

    Args:
        status: State of the run.
        losses: Training loss of the latest step of each running job, by name.
    """
    named = [f"{name} {loss:.3f}" for name, loss in list(losses.items())[:_MAX_NAMED]]
    if len(losses) > _MAX_NAMED:
        named.append(f"and {len(losses) - _MAX_NAMED} more")
    parts = [f"round {status.round}: {', '.join(named)}"]
    if len(status.jobs) > len(losses):
        parts.append(", ".join(f"{n} {kind}" for kind, n in status.counts.items()))
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tok/s")
    if status.bubble is not None:
        parts.append(f"bubble {status.bubble:.1%} by estimate")
    return " | ".join([*parts, f"{format_seconds(status.seconds_left)} left"])
