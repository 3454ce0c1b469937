"""Ends this process when another process of the run has ended.

Without that, this process would wait forever for a computation that all processes take
part in. Each process counts up a number in JAX's coordination service every second, and
says so if it fails. JAX has such a watch too, which aborts with a stack trace; this one
comes first, and its message says what to do.
"""

import logging
import os
import socket
import sys
import threading
import time

import jax
from jax._src.distributed import global_state

from jaxlora.distributed import processes

logger = logging.getLogger(__name__)

_ALIVE, _FAILED = "jaxlora/alive", "jaxlora/failed"
_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 5.0  # in which a process may end with an error message of its own
RESUME = (
    "All checkpoints that were written are whole: start all processes again with "
    "--resume."
)


class Watch:
    """A thread that watches the other processes of the run."""

    def __init__(self, lost_after: float):
        """Makes the thread, which starts with the `with` block.

        Args:
            lost_after: Seconds without a sign of life after which a process is lost.
        """
        self._lost_after = lost_after
        self._ended = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}  # number, and when it changed
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        beat = 0
        while not self._ended.wait(_INTERVAL_SECONDS):
            beat += 1
            try:
                self._set(_ALIVE, str(beat))
                reason = self._failed() or self._lost()
            except jax.errors.JaxRuntimeError as error:
                reason = f"process 0, which coordinates the run, has ended ({error})"
            if reason is not None:
                self._leave(reason)
                return

    def report(self, error: BaseException) -> None:
        """Tells the other processes that this one ends with an error.

        The processes that fail because of this one do not wait for it. Process 0 waits
        for them, as the messages go through it.
        """
        self._ended.set()
        text = f"{type(error).__name__}: {error}"
        try:
            self._set(_FAILED, f"{socket.gethostname()}: {text:.1000}")
            deadline = time.monotonic() + _GRACE_SECONDS
            while processes.is_first() and time.monotonic() < deadline:
                if len(_read(_FAILED)) == processes.count():
                    deadline = time.monotonic()
                time.sleep(_INTERVAL_SECONDS / 2)
        except jax.errors.JaxRuntimeError:
            return  # the coordinator has ended already

    def _leave(self, reason: str) -> None:
        """Ends this process, unless it ends by itself within a few seconds."""
        # Process 0 stays longest, as the others read the reason from it.
        grace = _GRACE_SECONDS + processes.is_first() * 2 * _INTERVAL_SECONDS
        if self._ended.wait(grace):
            return
        logger.error("%s. This process ends as well. %s", reason, RESUME)
        for handler in logging.getLogger("jaxlora").handlers:
            handler.flush()
        sys.stderr.flush()
        # The main thread may be waiting for a device, where no exception reaches it.
        os._exit(1)

    def _set(self, folder: str, value: str) -> None:
        client = global_state.client
        assert client is not None
        key = f"{folder}/{processes.index()}"
        client.key_value_set(key, value, allow_overwrite=True)

    def _failed(self) -> str | None:
        for number, text in _read(_FAILED).items():
            if number != str(processes.index()):
                return f"process {number} has failed on {text}"
        return None

    def _lost(self) -> str | None:
        now = time.monotonic()
        for number, beat in _read(_ALIVE).items():
            if self._seen.get(number, ("", 0.0))[0] != beat:
                self._seen[number] = beat, now
            elif now - self._seen[number][1] > self._lost_after:
                return (
                    f"process {number} has given no sign of life for "
                    f"{self._lost_after:g} s: it was killed, or its host or the "
                    "network has failed"
                )
        return None


def _read(folder: str) -> dict[str, str]:
    """Returns the value of each process in a folder, by its number."""
    client = global_state.client
    assert client is not None
    found = client.key_value_dir_get(folder)
    return {key.rpartition("/")[2]: value for key, value in found}
