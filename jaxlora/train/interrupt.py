"""Ctrl-C as a wish: finish the window, write a checkpoint, leave."""

import logging
import signal
import threading

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While it is open, the first SIGINT or SIGTERM only sets `requested`.

    The second one acts as it did before. Outside the main thread, where Python cannot
    catch signals, it does nothing.

    Attributes:
        requested: Whether a signal came.
    """

    def __init__(self):
        self.requested = False
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def _note(self, number: int, frame) -> None:
        self.requested = True
        self._restore()
        logger.warning(
            "%s: finishing the window, then writing a checkpoint. Once more to leave "
            "at once.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_) -> None:
        self._restore()
