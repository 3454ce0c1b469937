"""Workers on this host: processes that have pipes to the driver.

A worker whose pipe ends knows that the driver is gone: it writes a checkpoint and ends.
"""

import logging
import os
import pathlib
import select
import subprocess
from collections.abc import Mapping, Sequence

from jaxlora.common.atomic import make_folder
from jaxlora.sweeps.engine.messages import FromWorker, ToWorker, decode, encode
from jaxlora.sweeps.engine.workers import Lost, Workers

logger = logging.getLogger(__name__)

LOG_FILE = "worker.log"
_CHUNK = 1 << 16
_TAIL_BYTES = 2000


class Worker:
    """A process that speaks the messages of a worker through its pipes."""

    def __init__(
        self, command: Sequence[str], folder: pathlib.Path, environ: Mapping[str, str]
    ):
        """Starts the process.

        It is in a session of its own, so that Ctrl-C reaches the driver alone.

        Args:
            command: The program and its arguments.
            folder: Folder for its log, which is made.
            environ: Environment variables besides those of this process.
        """
        make_folder(folder)
        self._folder, self._rest, self._unsent = folder, b"", b""
        with open(folder / LOG_FILE, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self.stdout = self.process.stdin, self.process.stdout
        # A process that is stopped reads nothing, and must not stop its driver, too.
        for pipe in (self._stdin, self.stdout):
            os.set_blocking(pipe.fileno(), False)

    def send(self, lines: bytes = b"") -> None:
        """Sends lines, and those that the pipe had no room for before.

        They are lost if the process has ended, or was interrupted.
        """
        self._unsent += lines
        try:
            while self._unsent and not self._stdin.closed:
                sent = os.write(self._stdin.fileno(), self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = b""

    def read(self) -> tuple[list[bytes], bool]:
        """Returns the lines that have come, and whether more may come."""
        self.send()
        while True:
            try:
                chunk = os.read(self.stdout.fileno(), _CHUNK)
            except BlockingIOError:
                chunk = None
            if not chunk:
                break
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        return lines, chunk is None

    def interrupt(self) -> None:
        """Ends the pipe to the process."""
        self.send()
        self._stdin.close()

    def wait(self) -> str:
        """Waits for the end of the process; returns how it ended."""
        self.interrupt()
        status = self.process.wait()
        self.stdout.close()
        how = (
            f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        )
        return f"process {self.process.pid} {how}{log_tail(self._folder)}"


def log_tail(folder: pathlib.Path) -> str:
    """Returns the last line of a worker's log, and where the others are."""
    path = folder / LOG_FILE
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; {path} ends with: {last}" if last else ""


class LocalWorkers(Workers):
    """Workers that are child processes."""

    def __init__(self, command: Sequence[str], environs: Sequence[Mapping[str, str]]):
        """Makes the object; no worker runs.

        Args:
            command: Program and arguments of every worker.
            environs: Environment variables of each group, besides the driver's.
        """
        self._command, self._environs = command, environs
        self._workers: dict[int, Worker] = {}

    def start(self, group: int, folder: pathlib.Path) -> bool:
        """Starts a process; see `Workers.start`."""
        self._workers[group] = Worker(self._command, folder, self._environs[group])
        return True

    def send(self, group: int, messages: Sequence[ToWorker]) -> None:
        """Sends messages; see `Workers.send`."""
        if worker := self._workers.get(group):
            worker.send(b"".join(map(encode, messages)))

    def receive(self, timeout: float) -> list[tuple[int, FromWorker | Lost]]:
        """Returns what has come; see `Workers.receive`."""
        for worker in self._workers.values():
            worker.send()
        by_file = {w.stdout: (g, w) for g, w in self._workers.items()}
        ready, _, _ = select.select(list(by_file), [], [], timeout)
        found: list[tuple[int, FromWorker | Lost]] = []
        for group, worker in map(by_file.__getitem__, ready):
            lines, is_open = worker.read()
            found += [(group, decode(line)) for line in lines]
            if not is_open:
                del self._workers[group]
                found.append((group, Lost(reason=worker.wait())))
        return found

    def interrupt(self, group: int) -> None:
        """Ends the pipe to a worker; see `Workers.interrupt`."""
        if worker := self._workers.get(group):
            worker.interrupt()

    def kill(self, group: int) -> None:
        """Kills a worker; see `Workers.kill`."""
        if worker := self._workers.get(group):
            worker.process.kill()

    def close(self) -> None:
        """Kills all workers that are left."""
        for worker in self._workers.values():
            worker.process.kill()
            worker.wait()
        self._workers.clear()
