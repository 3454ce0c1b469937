"""Logs the events of a run as JSON lines, and reads them."""

import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Any

from jaxlora.common.atomic import wrap_os_errors, write_bytes, write_text
from jaxlora.common.json_file import read_regular_file
from jaxlora.errors import CheckpointError
from jaxlora.run.callback import Callback
from jaxlora.run.events import Event

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
# Events after the checkpoint that a run resumed from, which happen again.
DROPPED_FILE = "metrics_dropped.jsonl"
_LOSS_KEYS = {"step": ("loss",), "eval": ("eval_loss",)}


class RunLog(Callback):
    """Writes metrics.jsonl: one JSON object for each event that is logged.

    Every event has its round. A resumed run moves the events after its checkpoint,
    which will happen again, to metrics_dropped.jsonl: all of them if there is none.
    """

    def __init__(self, folder: pathlib.Path, *, keep_rounds: int | None):
        """Opens the log of a run.

        Args:
            folder: Folder for metrics.jsonl.
            keep_rounds: Rounds done at the checkpoint that the run resumes from; later
                events are moved. None: there is none, so that all are.

        Raises:
            CheckpointError: The earlier events cannot be read.
            StorageError: The log cannot be written.
        """
        self._path = folder / METRICS_FILE
        last = -1 if keep_rounds is None else keep_rounds
        events = read_events(self._path)
        if dropped := [event for event in events if event["round"] > last]:
            self._keep_dropped(folder / DROPPED_FILE, dropped)
        write_text(self._path, _lines(e for e in events if e["round"] <= last))
        with wrap_os_errors(self._path):
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size

    def _keep_dropped(self, path: pathlib.Path, dropped: list[dict[str, Any]]) -> None:
        """Adds events to the file of those that were dropped."""
        write_bytes(path, _read(path) + _lines(dropped).encode())
        logger.warning(
            "%s: %d events from round %d on go to %s, as those rounds run again",
            self._path,
            len(dropped),
            dropped[0]["round"],
            path.name,
        )

    def on_event(self, event: Event) -> None:
        """Writes a line for an event, if events of its kind are logged.

        Raises:
            StorageError: The file cannot be written, for example because the disk is
                full. No part of the event is written.
        """
        if not event.is_logged:
            return
        record = {
            "event": event.kind,
            "round": event.round,
            "time": round(time.time(), 3),
            **event.values(),
        }
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with wrap_os_errors(self._path):
            try:
                rest = memoryview(line)
                while rest:  # an almost full disk may accept only a part
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(line)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _lines(events: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the events of a metrics.jsonl, without a last line that a kill cut short.

    Raises:
        CheckpointError: A line is damaged.
    """
    events, lines = [], _read(path).split(b"\n")
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


def _read(path: pathlib.Path) -> bytes:
    """Reads a file of events; it is empty if there is none."""
    try:
        return read_regular_file(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Move it away."
        ) from None


def _event(line: bytes) -> dict[str, Any]:
    """Parses an event, and checks the values that are used later."""
    event = _DECODER.decode(line.decode())
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


# `json.loads` would make one for each line, which takes longer than to read the line.
_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
