"""Renders untrusted templates in child processes with limits of time and memory.

A sandbox keeps a template from unsafe objects. But only the system can limit its time
and memory, because a single operation of a template may be arbitrarily long. So all
templates run in child processes (`template_worker`), of which each thread that renders
uses one. They are started when they are first needed and restarted after they were
killed. They end by themselves when they are idle or when this process ends, for
whatever reason.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pickle
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxlora.data.templates.template_task import (
    OUT_OF_MEMORY,
    Payload,
    Task,
    TemplateLimits,
)
from jaxlora.errors import DataError

_MAX_PROCESSES = 8
_WATCH_SECONDS = 0.2
# After a template has killed this many processes in a row, a call gives up on it.
_MAX_DEATHS = 3
# A module stands in for the package `jaxlora`, whose own code would load JAX.
_PROGRAM = """
import sys, types
package = sys.modules["jaxlora"] = types.ModuleType("jaxlora")
package.__path__ = [sys.argv[2]]
sys.path += sys.argv[3:]
from jaxlora.data.templates.template_worker import main
main(sys.argv[1])
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a payload has no text.

    Attributes:
        kind: `limit`, `unclear` (a turn of a conversation), `no answer` (no message of
            the assistant), `lost` (a part of a conversation is not printed), `not text`
            (a value that is printed), `syntax`, or `other`.
        why: The reason, without the name of the record or template.
    """

    kind: str
    why: str


Answer = dict[str, Any] | Failure


class TemplatePool:
    """Child processes that render templates, of which each call uses one.

    Its methods may be called from several threads.

    Attributes:
        num: How many threads can render templates at the same time.
    """

    def __init__(self, num: int = 1, limits: TemplateLimits | None = None):
        """Makes the object; each child is started when it is first needed.

        Args:
            num: The most children.
            limits: Limits of each of them.
        """
        self.num, self._limits = num, limits or TemplateLimits()
        # The last one returned is used first, so a single thread starts a single child.
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(num):
            self._free.put(None)
        # By identifier of the thread: what it waits for, and whether in vain.
        self._running: dict[int, _Child | None] = {}
        self._aborted: set[int] = set()

    def run(self, task: Task, payloads: Sequence[Payload]) -> list[Answer]:
        """Renders a template in a process that is free; see `run_task`."""
        answers: list[Answer] = [Failure("other", "")] * len(payloads)
        waiting: list[tuple[int, bytes]] = []
        for i, payload in enumerate(payloads):
            try:
                waiting.append((i, payload.pickled()))
            # Pickling runs code of the objects in a record, which may raise any error.
            except Exception as error:
                why = f"a value cannot be sent to a template: {error}"
                answers[i] = Failure("other", why)
        thread = threading.get_ident()
        self._aborted.discard(thread)
        self._running[thread] = None
        self._running[thread] = self._free.get()
        try:
            self._answer_all(thread, task, waiting, answers)
        except BaseException:
            # The child may be in the middle of an answer, so it cannot be used again.
            if (child := self._running[thread]) is not None:
                child.end()
            self._running[thread] = None
            raise
        finally:
            self._free.put(self._running.pop(thread))
        return answers

    def abort(self, threads: Collection[int]) -> None:
        """Ends the calls of `run` in other threads soon; their answers are useless.

        Args:
            threads: Identifiers of threads, as in `threading.get_ident`.
        """
        for thread, child in list(self._running.items()):
            if thread in threads:
                self._aborted.add(thread)
                if child is not None:
                    child.process.kill()

    def _answer_all(
        self,
        thread: int,
        task: Task,
        waiting: list[tuple[int, bytes]],
        answers: list[Answer],
    ) -> None:
        num_deaths = 0
        while waiting and num_deaths < _MAX_DEATHS:
            child = self._running[thread]
            if child is None:
                child = self._running[thread] = _Child(self._limits)
            if thread in self._aborted:
                return
            done = child.answer(task, [payload for _, payload in waiting])
            num_deaths = 0 if done else num_deaths
            if len(done) < len(waiting):
                self._running[thread] = None
                # Each answer is sent at once, so the first one that is missing is that
                # of the payload that killed the child.
                if (death := child.cause_of_death()) is not None:
                    done.append(death)
                    num_deaths += 1
            for (i, _), answer in zip(waiting, done, strict=False):
                answers[i] = answer
            del waiting[: len(done)]
        why = (
            f"it was not tried, as the {_MAX_DEATHS} records before it exceeded a limit"
        )
        for i, _ in waiting:
            answers[i] = Failure("limit", why)


class _Child:
    """One running child process.

    Attributes:
        process: The process.
        end: Ends the process.
    """

    def __init__(self, limits: TemplateLimits):
        """Starts the process.

        Raises:
            DataError: The process cannot be started.
        """
        self._limits = limits
        command = _command(limits)
        cure = f"Run it by hand to see why: {shlex.join(command)}"
        what = "the process that renders templates"
        try:
            # In its own session, the child does not get a terminal's Ctrl-C.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise DataError(f"{what} cannot be started ({error}). {cure}") from error
        self.end = weakref.finalize(self, _end, self.process, os.getpid())
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        # Writes go past the buffer of `stdin`, as a fork would write its copy of it.
        self._stdin, self._stdout = stdin.fileno(), stdout
        self._is_over_memory = threading.Event()
        if self._read_line() is None:
            self.end()
            raise DataError(
                f"{what} ended as it started (exit code {self.process.returncode}). "
                f"{cure}"
            )
        if not limits.by_system:
            arguments = (self.process, limits.bytes, self._is_over_memory)
            threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def answer(self, task: Task, payloads: list[bytes]) -> list[Answer]:
        """Returns the answers to payloads, fewer if the child ends before."""
        content = memoryview(pickle.dumps((task, payloads), pickle.HIGHEST_PROTOCOL))
        # If the child has ended, reading from it below shows that.
        with contextlib.suppress(BrokenPipeError):
            while content:
                content = content[os.write(self._stdin, content) :]
        answers: list[Answer] = []
        while len(answers) < len(payloads) and (line := self._read_line()) is not None:
            answer = json.loads(line.decode("utf-8", "surrogatepass"))
            answers.append(Failure(**answer) if "kind" in answer else answer)
        return answers

    def cause_of_death(self) -> Failure | None:
        """Waits for the child to end and returns why; None if it was only idle."""
        code = self.process.wait()
        self.end()
        if code == 0:
            return None
        if self._is_over_memory.is_set() or code == OUT_OF_MEMORY:
            return Failure("limit", self._limits.over_memory)
        if code == -signal.SIGPROF:
            return Failure("limit", f"it takes more than {self._limits.seconds:g} s")
        return Failure(
            "limit", f"it ended the process that renders templates (exit code {code})"
        )

    def _read_line(self) -> bytes | None:
        """Reads the child's next line; None if the child has ended."""
        # A character takes at most six bytes in JSON.
        line = self._stdout.readline(8 * self._limits.characters)
        if line.endswith(b"\n"):
            return line
        if line:
            self._is_over_memory.set()
            self.process.kill()
        return None


def _watch(process: subprocess.Popen, most: int, is_over: threading.Event) -> None:
    """Kills a child above its memory limit, on a system that does not enforce it."""
    command = ["ps", "-o", "rss=", "-p", str(process.pid)]
    while process.poll() is None:
        used = subprocess.run(command, capture_output=True, text=True).stdout
        if used.strip() and int(used) * 1024 > most:
            is_over.set()
            process.kill()
        time.sleep(_WATCH_SECONDS)


def _end(process: subprocess.Popen, owner: int) -> None:
    """Kills the child, unless this is a fork of the process that started it."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _command(limits: TemplateLimits) -> list[str]:
    """Command line of the child, which runs without `site` and the user's settings."""
    ours = str(Path(__file__).parents[2])
    specs = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
    folders = [str(Path(s.origin).parents[1]) for s in specs if s and s.origin]
    arguments = [json.dumps(dataclasses.asdict(limits)), ours, *dict.fromkeys(folders)]
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments]


@functools.cache
def shared_pool() -> TemplatePool:
    """Returns the child processes that all threads share."""
    return TemplatePool(min(_MAX_PROCESSES, len(os.sched_getaffinity(0))))


# The children of a process serve no fork of it.
os.register_at_fork(after_in_child=shared_pool.cache_clear)


def run_task(task: Task, payloads: Sequence[Payload]) -> list[Answer]:
    """Renders a template in one of the shared child processes.

    Args:
        task: The template.
        payloads: The renderings to do, whose values together must fit well into the
            limit of the memory. Many in one call cost little each.

    Returns:
        An answer for each payload, in their order.

    Raises:
        DataError: The child process cannot be started.
    """
    return shared_pool().run(task, payloads)
