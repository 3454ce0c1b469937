"""Tests that damaged inputs quickly raise the library's own errors, with clear texts.

Each case damages one file in a way that depends on the seed. To run one kind:

    pytest tests/fuzz -k parquet

Every run of the tests takes the first cases of each kind; with the mark `grid`, all of
them. `FUZZ_CASES=1000` sets the number of cases of each kind, `FUZZ_SEED=7` the seed,
and `FUZZ_SHOWN=99` the number of faults in the report.
"""

import contextlib
import faulthandler
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import traceback
import zlib
from collections.abc import Iterator

import pytest

from jaxlora import JaxloraError
from jaxlora.printable import has_invisible
from tests.fuzz import data_kinds, migrate_kinds, model_kinds, run_kinds
from tests.fuzz.kind import Kind

_SECONDS = 20.0  # limit of one case, which usually takes a few milliseconds
_MOST_BYTES = 2**30  # limit of the memory that the cases of one kind may add
_KINDS = data_kinds.KINDS | migrate_kinds.KINDS | model_kinds.KINDS | run_kinds.KINDS
_FIRST = 0.05  # the share of the cases that every run of the tests takes
_SEED = int(os.environ.get("FUZZ_SEED", "0"))
_SHOWN = int(os.environ.get("FUZZ_SHOWN", "8"))


class TooSlow(BaseException):
    """It is not an Exception, so the code under test does not catch it."""


@pytest.mark.parametrize("share", [_FIRST, pytest.param(1.0, marks=pytest.mark.grid)])
@pytest.mark.parametrize("name", _KINDS)
def test_damaged_inputs(name, share, tmp_path):
    kind = _KINDS[name]
    folder, whole = tmp_path / "case", tmp_path / "whole"
    folder.mkdir()
    kind.make(folder)
    shutil.copytree(folder, whole)
    kind.read(folder)  # undamaged files can be read
    some = math.ceil(share * kind.num_cases)
    num_cases = int(os.environ.get("FUZZ_CASES", some))
    faults = []
    with bounded_memory() as grown:
        for number in range(num_cases):
            case = Case(name, kind, number)
            faults += case.run(whole, folder)
    assert not faults, report(faults, num_cases)
    assert grown() < _MOST_BYTES, f"{name}: {grown() / 2**20:.0f} MiB more than before"


def report(faults: list[str], num_cases: int) -> str:
    shown = "\n\n".join(faults[:_SHOWN])
    return f"{len(faults)} faults in {num_cases} cases:\n\n{shown}"


class Case:
    """One damaged file."""

    def __init__(self, name: str, kind: Kind, number: int):
        self._kind = kind
        self._title = f"{name} {number} (FUZZ_SEED={_SEED})"
        self._rng = random.Random(zlib.crc32(f"{name} {number} {_SEED}".encode()))

    def run(self, whole: pathlib.Path, folder: pathlib.Path) -> list[str]:
        """Damages a file of the folder, reads it, and restores it; returns faults."""
        if self._kind.changes_folder:
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
        targets = sorted(
            {p for t in self._kind.targets for p in folder.glob(t) if p.is_file()}
        )
        path = self._rng.choice(targets)
        content = path.read_bytes()
        try:
            what = self._damage(path, content)
            where = f"{self._title}: {path.relative_to(folder)}: {what}"
            fault = self._read(folder, path)
        finally:
            _let_go(path)
            _remove(path)
            path.write_bytes(content)
        return [] if fault is None else [f"{where}\n{fault}"]

    def _damage(self, path: pathlib.Path, content: bytes) -> str:
        if self._rng.random() < 0.04 and self._kind.entries:
            return self._damage_entry(path)
        what, damaged = self._kind.damage(content, self._rng)
        path.write_bytes(damaged)
        return what

    def _damage_entry(self, path: pathlib.Path) -> str:
        """Replaces the file by another kind of directory entry."""
        what = self._rng.choice(self._kind.entries)
        path.unlink()
        match what:
            case "folder":
                path.mkdir()
            case "loop":
                path.symlink_to(path)
            case "dangling":
                path.symlink_to(path.with_name("nowhere"))
            case "pipe":
                os.mkfifo(path)
        return what

    def _read(self, folder: pathlib.Path, path: pathlib.Path) -> str | None:
        try:
            with time_limit():
                self._kind.read(folder)
        except JaxloraError as error:
            return _unclear(str(error), folder)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            return _described(error)
        return None


def _unclear(text: str, folder: pathlib.Path) -> str | None:
    """Says why the text of an error is no help; None if it is."""
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    if not any(name in text for name in names) and str(folder) not in text:
        return f"names no file: {text:.300}"
    for path in folder.rglob("*"):
        whole = rf"{re.escape(str(path))}(?![\w/-])"
        if any(len(re.findall(whole, line)) > 1 for line in text.splitlines()):
            return f"names {path.name} twice: {text:.300}"
    if has_invisible(text.replace("\n", "").replace("\t", "")):
        return f"holds control characters: {text!r:.300}"
    return None


def _described(error: BaseException) -> str:
    """An error and where it comes from: the library's lines, and the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames[:-1] if "/jaxlora/" in f.filename][-5:]
    places = "".join(
        f"\n  {f.filename}:{f.lineno} {f.name}" for f in (*mine, frames[-1])
    )
    return f"{type(error).__name__}: {error!s:.300}{places}"


def _let_go(path: pathlib.Path) -> None:
    """Ends the wait of a thread that opens a pipe to read it: it could never end."""
    if path.is_fifo():
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Ends what takes too long; where not even that is heeded, ends the process."""

    def stop(*_) -> None:
        raise TooSlow(f"it took more than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(6 * _SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def bounded_memory() -> Iterator:
    """Within it no more than some GiB can be had; tells how much memory grew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = _status_bytes("VmSize") + 16 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield lambda: _status_bytes("VmHWM") - before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _status_bytes(key: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
