"""Callbacks that call a function after each window, or end the run there."""

import os
import signal
from collections.abc import Callable

from jaxlora import Callback, Trainer


class AtWindow(Callback):
    """Calls a function with the trainer after each window."""

    def __init__(self, call: Callable[[Trainer], None]):
        self._call = call

    def on_window(self, event) -> None:
        self._call(self.trainer)


class InterruptAt(Callback):
    """Interrupts the run once, as Ctrl-C does, where a window ends with a round."""

    def __init__(self, number: int, also: Callable[[Trainer], None] = lambda t: None):
        self._number, self._also = number, also
        self._is_done = False

    def on_window(self, event) -> None:
        if event.round >= self._number and not self._is_done:
            self._is_done = True
            self._also(self.trainer)
            os.kill(os.getpid(), signal.SIGINT)


def at_windows(call: Callable[[Trainer], None] | None) -> list[AtWindow]:
    """Returns the callbacks of a run that calls a function, if one is given."""
    return [] if call is None else [AtWindow(call)]
