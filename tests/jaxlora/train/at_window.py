"""Callbacks that act after each window, or at each checkpoint of a run."""

import os
import pathlib
import shutil
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


class Copies(Callback):
    """Copies the folder of a run at each checkpoint, as a kill would leave it."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.copies: list[pathlib.Path] = []

    def on_checkpoint(self, event) -> None:
        target = self._folder / f"{len(self.copies)}"
        unfinished = shutil.ignore_patterns("*tmp*", "*.lock")
        shutil.copytree(self.trainer.output_dir, target, ignore=unfinished)
        self.copies.append(target)


def at_windows(call: Callable[[Trainer], None] | None) -> list[AtWindow]:
    """Returns the callbacks of a run that calls a function, if one is given."""
    return [] if call is None else [AtWindow(call)]
