"""Ends a run early: on signals, failing devices or a removed folder."""

import contextlib
import logging
import pathlib
import signal
import threading
from collections.abc import Iterator

import jax

from jaxlora.errors import CheckpointError, DeviceError, JaxloraError
from jaxlora.run.folder import CHECKPOINTS
from jaxlora.run.lock import RunLock
from jaxlora.train.saved.read_checkpoint import newest_checkpoint

_NO_MEMORY = "RESOURCE_EXHAUSTED"
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
            "%s: finishing what is in flight, then writing a checkpoint. Send it again "
            "to quit immediately.",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_) -> None:
        self._restore()


@contextlib.contextmanager
def explained(output_dir: pathlib.Path, lock: RunLock) -> Iterator[None]:
    """Raises errors of devices as `DeviceError`, which says what to do.

    An error of the system or of the run's files, if the folder was removed meanwhile,
    becomes one that says so.

    Args:
        output_dir: Folder of the run.
        lock: Lock of that folder.
    """
    try:
        yield
    except (OSError, JaxloraError) as error:
        try:
            lock.check_folder()
        except CheckpointError as removed:
            raise removed from error
        raise
    except jax.errors.JaxRuntimeError as error:
        where = ", ".join(getattr(error, "__notes__", ()))
        what, cure = "a device failed", "See whether all devices work (nvidia-smi)."
        if _NO_MEMORY in str(error):
            what = "a device is out of memory"
            cure = (
                "Lower microbatch_tokens, set remat: elementwise, mlp or layer, or "
                "choose a mesh with more stages or a larger fsdp."
            )
        number = newest_checkpoint(output_dir / CHECKPOINTS)
        kept = (
            "Nothing was saved yet, so the run starts anew"
            if number is None
            else f"The checkpoint after round {number} is whole; continue with --resume"
        )
        reason = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
        raise DeviceError(
            f"{what}{' (' + where + ')' if where else ''}: {reason}. {cure} {kept}."
        ) from error
