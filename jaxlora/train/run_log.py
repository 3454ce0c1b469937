"""Logs the events of a run as JSON lines and for TensorBoard."""

import json
import math
import os
import pathlib
import socket
import time
from typing import Any

from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from jaxlora.atomic import make_folder, wrap_os_errors, write_text
from jaxlora.errors import CheckpointError
from jaxlora.json_file import check_regular_file

METRICS_FILE = "metrics.jsonl"
_proto: Any = event_pb2  # its classes are made when it is imported
_PLOTTED_KEYS = ("loss", "eval_loss", "grad_norm", "learning_rate")
_LOSS_KEYS = {"step": ("loss",), "eval": ("eval_loss",)}
_FLUSH_SECONDS = 30.0


class RunLog:
    """Writes events as JSON lines and to TensorBoard.

    Every event has its round, so that a resumed run can drop the events after its
    checkpoint, which will happen again.
    """

    def __init__(self, folder: pathlib.Path, *, keep_rounds: int | None):
        """Opens the log of a run.

        Args:
            folder: Folder for metrics.jsonl and tensorboard/.
            keep_rounds: Rounds done at the checkpoint that the run resumes from; later
                events are dropped. None: the run is new.

        Raises:
            CheckpointError: The earlier events cannot be read.
            StorageError: The log cannot be written.
        """
        self._path = folder / METRICS_FILE
        last = -1 if keep_rounds is None else keep_rounds
        kept = [e for e in read_events(self._path) if e["round"] <= last]
        write_text(self._path, "".join(json.dumps(e) + "\n" for e in kept))
        with wrap_os_errors(self._path):
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._board = _Board(folder / "tensorboard", first_step=last + 1)

    def event(self, kind: str, round_number: int, **values: Any) -> None:
        """Writes one event.

        Args:
            kind: Kind of the event: window, step, eval, paused, resumed or job.
            round_number: Round that the event belongs to.
            **values: Numbers and texts, such as `job` and `step`.

        Raises:
            StorageError: The file cannot be written, for example because the disk is
                full. No part of the event is written.
        """
        record = {
            "event": kind,
            "round": round_number,
            "time": round(time.time(), 3),
            **values,
        }
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")
        job, step = values.get("job"), values.get("step", round_number)
        for key in _PLOTTED_KEYS if job else ("tokens_per_second",):
            if key in values:
                tag = f"{key}/{job}" if job else key
                self._board.add(tag, values[key], step)

    def _write(self, line: bytes) -> None:
        with wrap_os_errors(self._path):
            size = os.fstat(self._file).st_size
            try:
                rest = memoryview(line)
                while rest:  # an almost full disk may accept only a part
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        """Closes both logs.

        Raises:
            StorageError: The last values for TensorBoard cannot be written.
        """
        os.close(self._file)
        self._board.close()


class NoLog:
    """The log of a process that writes none."""

    def event(self, kind: str, round_number: int, **values: Any) -> None:
        """Does nothing; see `RunLog.event`."""

    def close(self) -> None:
        """Does nothing."""


class _Board:
    """Writes TensorBoard files in the calling thread, so that errors are raised.

    The writer of tensorboardX uses a thread, which only prints its errors.
    """

    def __init__(self, folder: pathlib.Path, *, first_step: int):
        # Two runs that start in the same second must not share a file.
        name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"events.out.tfevents.{name}.{time.time_ns()}"
        with wrap_os_errors(self._path):
            make_folder(folder)
            self._writer = RecordWriter(str(self._path))
        self._flushed = time.monotonic()
        self._write(file_version="brain.Event:2")
        start = _proto.SessionLog(status=_proto.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def add(self, tag: str, value: float, step: int) -> None:
        self._write(step=step, summary=scalar(tag, value))

    def _write(self, **fields: Any) -> None:
        event = _proto.Event(wall_time=time.time(), **fields)
        with wrap_os_errors(self._path):
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with wrap_os_errors(self._path):
            try:
                self._writer.flush()
            finally:
                self._writer.close()


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the events of a metrics.jsonl, without a last line that a kill cut short.

    Raises:
        CheckpointError: A line is damaged.
    """
    try:
        check_regular_file(path)
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}."
        ) from error
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(_event(line))
        except (ValueError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break  # empty, or cut short
            raise CheckpointError(
                f"{path}, line {number} is not an event of a run: {error}. Remove "
                "the line, or move the file away; a run can be resumed without it."
            ) from None
    return events


def _event(line: bytes) -> dict[str, Any]:
    """Parses an event, and checks the values that are used later."""
    event = json.loads(line, parse_constant=_reject_constant)
    if not isinstance(event, dict):
        raise ValueError(f"it is a {type(event).__name__}, not an object")
    names = ["event"] + (["job"] if "job" in event else [])
    counts = ["round"] + (["step"] if "job" in event else [])
    for key in names:
        if not isinstance(event.get(key), str):
            raise ValueError(f"{key} is missing or not a string")
    for key in counts:
        if type(event.get(key)) is not int or not 0 <= event[key] < 2**53:
            raise ValueError(f"{key} is missing or not a count")
    for key in _LOSS_KEYS.get(event["event"], ()):
        if type(event.get(key)) not in (int, float) or not math.isfinite(event[key]):
            raise ValueError(f"{key} is missing or not a number")
    return event


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
