"""Graceful shutdown: finish the window, write a checkpoint, return."""

import logging
import signal
import threading

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager in which the first SIGINT or SIGTERM only sets `requested`.

    A second signal is handled as it was before. Outside the main thread, where Python
    cannot install signal handlers, the context manager does nothing.

    Attributes:
        requested: Whether a signal has arrived.
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
            "%s: finishing the window, then writing a checkpoint. Send it again to "
            "quit immediately.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_) -> None:
        self._restore()
