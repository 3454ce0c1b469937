"""Runs a command as a user does, and notes when each of its lines came."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxlora.errors import JaxloraError

_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended.

    Attributes:
        began: Time at which the process started, in seconds since the epoch.
        seconds: Seconds until it ended.
        lines: Each line of its log, with the seconds at which it came.
    """

    began: float
    seconds: float
    lines: tuple[tuple[float, str], ...]


def run_command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    kill_when: Callable[[], bool] | None = None,
    python: str = sys.executable,
) -> Done:
    """Runs a Python module or script to its end.

    Args:
        arguments: The module, or a script that ends in .py, and its arguments.
        environment: Variables in addition to those of this process.
        kill_when: Kills the process once this holds.
        python: The interpreter.

    Raises:
        JaxloraError: It failed.
    """
    is_script = arguments[0].endswith(".py")
    command = [python, *([] if is_script else ["-m"]), *arguments]
    began, epoch = time.perf_counter(), time.time()
    lines: list[tuple[float, str]] = []
    was_killed = False
    with subprocess.Popen(
        command,
        env={**_as_users_have_it(), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=_note, args=(process.stderr, began, lines))
        reader.start()
        while kill_when is not None and process.poll() is None and not was_killed:
            if was_killed := kill_when():
                process.kill()
            time.sleep(_POLL_SECONDS)
        code, seconds = process.wait(), time.perf_counter() - began
        reader.join()
    if code and not (was_killed and code == -signal.SIGKILL):
        said = "\n".join(text for _, text in lines[-12:])
        raise JaxloraError(f"{' '.join(arguments)} ended with status {code}:\n{said}")
    return Done(began=epoch, seconds=seconds, lines=tuple(lines))


def _as_users_have_it() -> dict[str, str]:
    """Returns this process's variables without another cache of programs.

    Python may keep the bytecode of modules, as for an installed package: without it,
    each process would compile our modules, for a quarter of the time of the imports.
    """
    own = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "PYTHONDONTWRITEBYTECODE",
    )
    return {name: value for name, value in os.environ.items() if name not in own}


def _note(stream: Iterable[str], began: float, lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.perf_counter() - began, line.rstrip()))
