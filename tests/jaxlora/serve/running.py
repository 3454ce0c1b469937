"""Runs `jaxlora serve` as a process."""

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import yaml

from tests.jaxlora.session.conftest import SETTINGS


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def running_server(
    folder: pathlib.Path, model: pathlib.Path, **settings: Any
) -> Iterator[str]:
    """Serves a model of a folder; gives the address."""
    port = free_port()
    config = {
        "model": str(model),
        "folder": str(folder / "serve"),
        "port": port,
        "train_unembed": "ignore",
        "session": SETTINGS | {"microbatch_tokens": [32, 96]},
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config | settings))
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlora", "serve", str(file), "--device", "cpu"]
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(process, address)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _wait(process: subprocess.Popen, address: str) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/healthz", timeout=10).close()
            return
        time.sleep(0.1)
    raise TimeoutError("the server does not answer")
