"""A callback that calls a function after each window."""

from collections.abc import Callable

from jaxlora import Callback, Trainer


class AtWindow(Callback):
    """Calls a function with the trainer after each window."""

    def __init__(self, call: Callable[[Trainer], None]):
        self._call = call

    def on_window(self, event) -> None:
        self._call(self.trainer)


def at_windows(call: Callable[[Trainer], None] | None) -> list[AtWindow]:
    """Returns the callbacks of a run that calls a function, if one is given."""
    return [] if call is None else [AtWindow(call)]
