"""The command `jaxlora serve` as a process, and what can be seen of it from outside."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import yaml

from jaxlora.errors import JaxloraError

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_COMPILED = "Finished XLA compilation of"
_OTHER_BITS = "has other bits after the restart"
_SAMPLE = re.compile(r"^(jaxlora_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_KEY_PROCESSES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """The counters of a server at a moment.

    Attributes:
        at: The moment, by `time.monotonic`.
        cpu_seconds: Processor time of the server's process.
        client_seconds: Processor time of this one.
        compiled: Programs that XLA has compiled.
        numbers: The samples of `/metrics`, by name and labels.
    """

    at: float
    cpu_seconds: float
    client_seconds: float
    compiled: int
    numbers: Mapping[str, float]

    def sum(self, name: str, *labels: str) -> float:
        """Adds up the samples of a metric whose labels contain all of some texts."""
        return sum(
            value
            for key, value in self.numbers.items()
            if key.partition("{")[0] == name and all(one in key for one in labels)
        )


class Server:
    """A server whose tenants have keys.

    Attributes:
        address: Where it listens.
        keys: The key of each tenant; `ops` has the scope admin.
        started_at: When its process was started last, by `time.monotonic`.
        log: The file with what it has logged, programs that are compiled included.
    """

    def __init__(
        self,
        work: pathlib.Path,
        settings: Mapping[str, Any],
        tenants: Iterable[str],
        options: Iterable[str],
        log: pathlib.Path,
    ):
        """Starts it, and makes the keys meanwhile; `wait` waits for it.

        Args:
            work: Folder for its file and its own folder.
            settings: Settings of the file, without folder and keys.
            tenants: The tenants.
            options: Further arguments of the command.
            log: See the class.
        """
        self._file, self._options = work / "serve.yaml", [*options]
        content = {**settings, "folder": str(work / "serve"), "keys": True}
        self._file.write_text(yaml.safe_dump(content))
        self.address = f"http://127.0.0.1:{settings['port']}"
        self.log = log
        # The first key makes the tables of the database.
        self.keys = {"ops": self._add_key("ops", "--scopes", "admin")}
        self.start()
        with ThreadPoolExecutor(_KEY_PROCESSES) as pool:
            names = [*tenants]
            self.keys |= dict(zip(names, pool.map(self._add_key, names), strict=True))

    def _add_key(self, tenant: str, *options: str) -> str:
        command = [sys.executable, "-m", "jaxlora", "keys", "add", str(self._file)]
        done = subprocess.run([*command, tenant, *options], capture_output=True)
        if done.returncode:
            raise JaxloraError(f"{tenant} gets no key: {done.stderr.decode()}")
        return done.stdout.decode().strip()

    # ---- its life --------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process."""
        self.started_at = time.monotonic()
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxlora", "serve", self._file, *self._options],
                env=os.environ | {"JAX_LOG_COMPILES": "1"},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait(self, seconds: float = 300.0) -> float:
        """Waits until it answers; returns the seconds since the process was started.

        Raises:
            JaxloraError: It does not.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            try:
                httpx.get(f"{self.address}/healthz", timeout=10.0)
            except httpx.HTTPError:
                time.sleep(0.02)
            else:
                return time.monotonic() - self.started_at
        said = self.log.read_text(errors="replace")[-2000:]
        raise JaxloraError(f"the server does not answer:\n{said}")

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> float:
        """Ends it by SIGTERM; returns the seconds."""
        began = time.monotonic()
        self._end(signal.SIGTERM)
        return time.monotonic() - began

    def _end(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait()

    # ---- what it shows ---------------------------------------------------------------

    def seen(self) -> Seen:
        """Reads its counters."""
        text = httpx.get(
            f"{self.address}/metrics",
            headers={"X-API-Key": self.keys["ops"]},
            timeout=60.0,
        ).text
        found = {f"{m[1]}{{{m[2] or ''}}}": float(m[3]) for m in _SAMPLE.finditer(text)}
        stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return Seen(
            at=time.monotonic(),
            cpu_seconds=(int(user) + int(system)) / _TICKS,
            client_seconds=time.process_time(),
            compiled=self._count(_COMPILED),
            numbers=found,
        )

    def memory(self) -> dict[str, float]:
        """Returns its resident memory in GiB, its threads and its open files."""
        folder = pathlib.Path(f"/proc/{self._process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return {
            "resident_gib": round(pages * _PAGE / 2**30, 2),
            "threads": len([*(folder / "task").iterdir()]),
            "files": len([*(folder / "fd").iterdir()]),
        }

    @property
    def other_bits(self) -> int:
        """Steps that had another result when they were computed again."""
        return self._count(_OTHER_BITS)

    def _count(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)
