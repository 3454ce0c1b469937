"""How a process ends while it works in the background."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

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


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch):
    """Hides servers that other tests share, which run for as long as this process."""
    every, others = threading.enumerate, {*threading.enumerate()}
    own = lambda: [thread for thread in every() if thread not in others]
    monkeypatch.setattr(threading, "enumerate", own)


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


def test_an_idle_pool_holds_nothing_up(monkeypatch):
    """Its threads would end with the interpreter, which does not come to that."""
    ended, goes_on = [], threading.Event()
    monkeypatch.setattr(os, "_exit", ended.append)
    with ThreadPoolExecutor(1, thread_name_prefix=f"{background.POOL}-test") as pool:
        pool.submit(int).result()
        future = in_background(goes_on.wait)
        end_process(3)
        assert ended == [3]
        goes_on.set()
        assert future.result()


def test_a_command_ends_without_a_search_for_garbage(monkeypatch):
    """It takes half a second behind a run; a caller's process goes on as it was."""
    frozen = []
    monkeypatch.setattr(command.gc, "freeze", lambda: frozen.append(True))
    command.main(["train", "nowhere.yaml"])
    assert not frozen
    monkeypatch.setattr(sys, "argv", ["jaxlora", "train", "nowhere.yaml"])
    monkeypatch.setattr(command, "end_process", lambda status: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    assert command.main() == 1 and frozen


# Work is under way when a script ends. A shell that starts the tests in the background
# may have SIGINT ignored in all of them.
SCRIPT = """
import signal, sys, time
from jaxlora.common.background import in_background

signal.signal(signal.SIGINT, signal.default_int_handler)

def work():
    time.sleep(0.3)
    open(sys.argv[1], "w").write("whole")

in_background(work)
"""


@pytest.mark.parametrize(
    ("last", "status", "says"),
    [
        ("", 0, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(3)", 3, ""),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_script_ends_after_the_work(tmp_path, last, status, says):
    out = tmp_path / "written"
    command = [sys.executable, "-c", SCRIPT + last, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.split("\n")[-2:][0]) == (status, says)
    assert out.read_text() == "whole"


def test_ctrl_c_ends_a_script_that_waits_for_the_work():
    # A signal just before the main thread waits does not wake it: Ctrl-C again.
    script = """
import os, signal, threading
from jaxlora.common.background import in_background

heard = threading.Event()

def hear(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heard.set()
    raise KeyboardInterrupt

def work():
    threading.main_thread().join()
    while not heard.wait(0.2):
        os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

signal.signal(signal.SIGINT, hear)
in_background(work)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130


def test_a_script_ends_while_xla_compiles():
    script = """
import jax
from jaxlora.common.background import in_background

def deep(x):
    for _ in range(40):
        x = jax.numpy.linalg.qr(x)[0] + jax.numpy.sort(x)
    return x

in_background(jax.jit(deep).lower(jax.numpy.ones((8, 8))).compile)
"""
    environ = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
