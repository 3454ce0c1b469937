"""A headless Chromium that opens a page of the disk, over its debugging pipe."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
# A page must cause no exceptions, and no errors such as refused requests.
_ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
# The browser reads commands from descriptor 3 and writes to 4.
_BEGIN = """
import fcntl, os, sys
high = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab.

    Attributes:
        errors: Exceptions and messages of the console, since the browser began.
    """

    def __init__(self, commands: int, answers: int):
        """Opens a tab.

        Args:
            commands: Pipe to the browser.
            answers: Pipe from it. Messages of both are JSON and end with a zero byte.
        """
        self._commands, self._answers, self._read = commands, answers, b""
        self._numbers, self._session = itertools.count(1), None
        self.errors: list[dict[str, Any]] = []
        made = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=made, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            data = os.read(self._answers, 2**16)
            assert data, "the browser has ended"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        found = json.loads(message)
        if found.get("method") in _ERRORS:
            self.errors.append(found["params"])
        return found

    def _call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": values}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (found := self._receive()).get("id") != number:
            pass
        assert "error" not in found, found
        return found["result"]

    def open(self, page: pathlib.Path, width: int, height: int, *, phone: bool) -> None:
        """Opens a file in a window of a size, and waits until it is loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self._call("Page.navigate", url=page.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Moves, presses or releases the mouse."""
        self._call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="none" if kind == "mouseMoved" else "left",
            clickCount=1,
        )


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[Browser]:
    """Starts the browser with an empty profile in a folder, and ends it."""
    assert FOUND is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _BEGIN,
            f"{theirs_in}",
            f"{theirs_out}",
            FOUND,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.kill()
        process.wait()
