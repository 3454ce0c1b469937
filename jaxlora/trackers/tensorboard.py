"""Writes a TensorBoard file."""

import contextlib
import importlib.abc
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxlora.common.atomic import wrap_os_errors


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Makes imports of a package fail, unless it has been imported before.

    Other threads can import it meanwhile: a run imports this module beside its start.
    """
    here = threading.get_ident()

    class Hidden(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == package and threading.get_ident() == here:
                raise ModuleNotFoundError(f"{name} is not needed here", name=name)

    # Other threads may go through the lists, so none is changed.
    hidden = Hidden()
    sys.meta_path = [hidden, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [finder for finder in sys.meta_path if finder is not hidden]


# tensorboardX imports torch if that is installed, which takes seconds of each start. It
# needs torch for nothing but tensors of torch.
with _without("torch"):
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import hparams, text

_proto: Any = event_pb2  # its classes are made when it is imported
_summaries: Any = summary_pb2
_FLUSH_SECONDS = 30.0


class Board:
    """Writes a TensorBoard file in the calling thread, so that errors are raised.

    The writer of tensorboardX uses a thread, which only prints its errors.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        settings: dict[str, Any],
        metrics: Iterable[str],
        *,
        first_step: int,
    ):
        """Opens the file, and writes its head.

        Args:
            folder: Folder of the file, which is made.
            settings: Hyperparameters, for TensorBoard's table of them.
            metrics: Names of metrics that the table shows beside them.
            first_step: TensorBoard drops what a killed process wrote from this step on.
        """
        # Two runs that start in the same second must not share a file.
        name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"events.out.tfevents.{name}.{time.time_ns()}"
        with wrap_os_errors(self._path):
            # The folder is not synced to the disk, as its file is not, either.
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(self._path))
        self._flushed = time.monotonic()
        try:
            self._write(file_version="brain.Event:2")
            start = _proto.SessionLog(status=_proto.SessionLog.START)
            self._write(step=first_step, session_log=start)
            if settings:
                for summary in hparams(settings, dict.fromkeys(metrics, 0.0))[:2]:
                    self._write(summary=summary)
        except BaseException:
            self._writer.close()
            raise

    def add(self, values: dict[str, float | str], step: int) -> None:
        """Writes numbers and texts of one step, by tag, as one record."""
        found = []
        for tag, value in values.items():
            if isinstance(value, str):
                found += text(tag, value).value
            else:
                found.append(_summaries.Summary.Value(tag=tag, simple_value=value))
        self._write(step=step, summary=_summaries.Summary(value=found))

    def _write(self, **fields: Any) -> None:
        event = _proto.Event(wall_time=time.time(), **fields)
        with wrap_os_errors(self._path):
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        with wrap_os_errors(self._path):
            try:
                self._writer.flush()
            finally:
                self._writer.close()
