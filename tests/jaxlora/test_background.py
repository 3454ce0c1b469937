"""The end of a process does not wait for work in the background."""

import os
import subprocess
import sys
import threading

from jaxlora.cli import main as command
from jaxlora.common import background
from jaxlora.common.background import end_process, in_background

# A mistake is found while something is compiled, and a file is still being written.
PROGRAM = """
import sys, threading, time
from jaxlora.cli.main import main
from jaxlora.common.background import in_background

def write():
    time.sleep(0.2)
    open(sys.argv[2], "w").write("whole")

in_background(lambda: time.sleep(60))
threading.Thread(target=write).start()
sys.exit(main())
"""


def test_a_mistake_ends_the_command_with_its_status(tmp_path):
    out = tmp_path / "written"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", out],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("jaxlora: error: ")
    assert out.read_text() == "whole"


def test_only_where_something_is_under_way(monkeypatch):
    ended, goes_on = [], threading.Event()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(background, "_NAME", "of this test")
    end_process(1)
    assert not ended
    future = in_background(goes_on.wait)
    end_process(3)
    assert ended == [3]
    assert command.main(["train", "nowhere.yaml"]) == 1  # a caller's process stays
    assert ended == [3]
    goes_on.set()
    assert future.result()
