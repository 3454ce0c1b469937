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


def start_server(
    folder: pathlib.Path, model: pathlib.Path, port: int, **settings: Any
) -> subprocess.Popen:
    """Serves a model of a folder; returns the process, which answers."""
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
    try:
        _wait(process, f"http://127.0.0.1:{port}")
    except BaseException:
        process.kill()
        raise
    return process


@contextlib.contextmanager
def running_server(
    folder: pathlib.Path, model: pathlib.Path, **settings: Any
) -> Iterator[str]:
    """Serves a model of a folder; gives the address."""
    port = free_port()
    process = start_server(folder, model, port, **settings)
    try:
        yield f"http://127.0.0.1:{port}"
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
