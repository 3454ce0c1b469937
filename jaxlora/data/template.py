"""Renders untrusted templates in a child process with limits of time and memory.

A sandbox keeps a template from unsafe objects. But only the system can limit its time
and memory, because a single operation of a template may be arbitrarily long. So all
templates run in child processes (`template_worker`), of which each thread that renders
uses one. They are started when they are first needed and restarted after they were
killed. They end by themselves when they are idle or when this process ends, for
whatever reason.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import select
import shlex
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlora.data.template_tasks import Payload, Task
from jaxlora.errors import DataError

_BATCH_PAYLOADS = 256
_BATCH_BYTES = 2**20
_POLL_SECONDS = 0.2
_SYSTEM_LIMITS_MEMORY = sys.platform == "linux"
# Exit code of a child that has run out of memory.
_OUT_OF_MEMORY = 3
# After a template has killed this many processes in a row, a call gives up on it.
_MAX_DEATHS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering.

    Attributes:
        seconds: Processor time.
        bytes: Memory of the process.
        characters: Length of the rendered text.
    """

    seconds: float = 2.0
    bytes: int = 2**30
    characters: int = 2**26


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a payload has no text.

    Attributes:
        kind: `limit`, `unclear` (a turn of a conversation), `no answer` (no message of
            the assistant), `lost` (a part of a conversation is not printed), `syntax`,
            or `other`.
        why: The reason, without the name of the record or template.
    """

    kind: str
    why: str


Answer = dict[str, Any] | Failure


def abort(threads: Collection[int]) -> None:
    """Ends the renderings that these threads wait for; their answers are useless.

    Args:
        threads: Identifiers of threads, as in `threading.get_ident`.
    """
    for thread, process in list(_running.items()):
        if thread in threads:
            process.abort()


# The process that each thread waits for, by the thread's identifier.
_running: dict[int, "TemplateProcess"] = {}


class TemplateProcess:
    """A child process that renders templates.

    Its methods may be called from several threads.
    """

    def __init__(self, limits: TemplateLimits | None = None):
        """Makes the object; the child is started when it is first needed.

        Args:
            limits: Limits of one rendering.
        """
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_aborted = False

    def run(self, task: Task, payloads: Sequence[Payload]) -> list[Answer]:
        """Renders a template in this child process; see `run_task`."""
        answers: list[Answer] = [Failure("other", "")] * len(payloads)
        waiting: list[tuple[int, bytes]] = []
        for i, payload in enumerate(payloads):
            try:
                waiting.append((i, payload.pickled()))
            # Pickling runs code of the objects in a record, which may raise any error.
            except Exception as error:
                why = f"a value cannot be sent to a template: {error}"
                answers[i] = Failure("other", why)
        with self._lock:
            self._is_aborted = False
            _running[threading.get_ident()] = self
            try:
                self._answer_all(task, waiting, answers)
            finally:
                del _running[threading.get_ident()]
        return answers

    def abort(self) -> None:
        """Ends the call of `run` in another thread soon; its answers are useless."""
        self._is_aborted = True
        child = self._child
        if child is not None:
            child.process.kill()

    def _answer_all(
        self, task: Task, waiting: list[tuple[int, bytes]], answers: list[Answer]
    ) -> None:
        # After a death, the rest of the batch is sent one by one, because it is not
        # known which payload killed the child.
        num_alone = num_deaths = 0
        while waiting and not self._is_aborted:
            batch = waiting[:1] if num_alone else _first_batch(waiting)
            done, death = self._run_batch(task, [payload for _, payload in batch])
            if done:
                num_deaths = 0
            if death is not None and len(batch) == 1:
                done, num_deaths = [death], num_deaths + 1
            elif death is not None:
                num_alone = len(batch)
            num_alone = max(0, num_alone - len(done))
            for (i, _), answer in zip(batch, done, strict=False):
                answers[i] = answer
            del waiting[: len(done)]
            if num_deaths == _MAX_DEATHS:
                _give_up(waiting, answers)

    def stop(self) -> None:
        """Ends the child process, if there is one."""
        with self._lock:
            if self._child is not None:
                self._child.stop()
            self._child = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._child is None else self._child.process.pid

    def _run_batch(
        self, task: Task, payloads: list[bytes]
    ) -> tuple[list[Answer], Failure | None]:
        """Returns the answers that arrived, and why the child died, if it did."""
        child = self._child
        if child is None or child.owner != os.getpid():
            child = self._child = _Child(self._limits)
        answers: list[Answer] = []
        try:
            for line in child.exchange(task, payloads):
                answers.append(_read_answer(line, self._limits))
        except BaseException:
            # The child is in the middle of an answer, so it cannot be used again.
            self._child = None
            child.stop()
            raise
        if len(answers) == len(payloads):
            return answers, None
        self._child = None
        return answers, child.cause_of_death()


def _first_batch(waiting: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Returns the first payloads, to be sent together; a large one is sent alone."""
    num, total = 0, 0
    for _, payload in waiting[:_BATCH_PAYLOADS]:
        total += len(payload)
        if num and total > _BATCH_BYTES:
            break
        num += 1
    return waiting[:num]


def _give_up(waiting: list[tuple[int, bytes]], answers: list[Answer]) -> None:
    """Answers all waiting payloads with an error, after too many killed a process."""
    why = f"it was not tried, as the {_MAX_DEATHS} records before it exceeded a limit"
    for i, _ in waiting:
        answers[i] = Failure("limit", why)
    waiting.clear()


def _read_answer(line: bytes, limits: TemplateLimits) -> Answer:
    answer = json.loads(line.decode("utf-8", "surrogatepass"))
    error = answer.get("error")
    if error is None:
        return answer
    if error == "MemoryError":
        return _over_memory(limits)
    if error == "TooLong":
        return Failure("limit", f"it prints more than {limits.characters} characters")
    if error == "Unclear":
        return Failure("unclear", answer["why"])
    if error == "NoAnswer":
        return Failure("no answer", answer["why"])
    if error == "LostPart":
        return Failure("lost", answer["why"])
    kind = "syntax" if error == "TemplateSyntaxError" else "other"
    return Failure(kind, f"{error}: {answer['why']}")


def _over_memory(limits: TemplateLimits) -> Failure:
    mebibytes = limits.bytes // 2**20
    return Failure("limit", f"it takes more than {mebibytes} MiB of memory")


class _Child:
    """One running child process.

    Attributes:
        process: The process.
        owner: Id of the process that started it.
    """

    def __init__(self, limits: TemplateLimits):
        """Starts the process.

        Raises:
            DataError: The process cannot be started.
        """
        self._limits = limits
        # Longest line of an answer: a character takes at most six bytes in JSON.
        self._max_line_bytes = 8 * limits.characters
        command = _command(limits)
        self.owner = os.getpid()
        self._buffer = bytearray()
        self._is_over_memory = False
        try:
            # In its own session, the child does not get a terminal's Ctrl-C.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise DataError(
                f"the process that renders templates cannot be started ({error}). Run "
                f"it by hand to see why: {shlex.join(command)}"
            ) from error
        self.stop = weakref.finalize(self, _end, self.process, self.owner)
        self._poll = select.poll()
        self._poll.register(self._pipe("stdout"), select.POLLIN)
        if self._read_line() is None:
            self.stop()
            raise DataError(
                "the process that renders templates ended as it started (exit code "
                f"{self.process.returncode}). Run it by hand to see why: "
                f"{shlex.join(command)}"
            )

    def exchange(self, task: Task, payloads: list[bytes]) -> Iterator[bytes]:
        """Sends a batch; yields lines of answers, until the child ends."""
        frame = pickle.dumps((task, payloads), pickle.HIGHEST_PROTOCOL)
        content = memoryview(len(frame).to_bytes(8, "little") + frame)
        # If the child has ended, reading from it below shows that.
        with contextlib.suppress(BrokenPipeError):
            while content:
                content = content[os.write(self._pipe("stdin"), content) :]
        for _ in payloads:
            line = self._read_line()
            if line is None:
                return
            yield line

    def cause_of_death(self) -> Failure | None:
        """Waits for the child to end and returns why; None if it was only idle."""
        code = self.process.wait()
        self.stop()
        if code == 0:
            return None
        if self._is_over_memory or code == _OUT_OF_MEMORY:
            return _over_memory(self._limits)
        if code == -signal.SIGPROF:
            return Failure("limit", f"it takes more than {self._limits.seconds:g} s")
        return Failure(
            "limit", f"it ended the process that renders templates (exit code {code})"
        )

    def _read_line(self) -> bytes | None:
        """Reads the child's next line; None if the child has ended."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not self._poll.poll(_POLL_SECONDS * 1000):
                self._watch_memory()
                continue
            chunk = os.read(self._pipe("stdout"), 2**16)
            if not chunk:
                return None
            self._buffer += chunk
            if len(self._buffer) > self._max_line_bytes:
                self._kill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _watch_memory(self) -> None:
        """Kills the child above its memory limit, on systems that do not enforce it."""
        if _SYSTEM_LIMITS_MEMORY:
            return
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        used = subprocess.run(command, capture_output=True, text=True).stdout
        if used.strip() and int(used) * 1024 > self._limits.bytes:
            self._kill()

    def _kill(self) -> None:
        self._is_over_memory = True
        self.process.kill()

    def _pipe(self, name: str) -> int:
        return getattr(self.process, name).fileno()


def _command(limits: TemplateLimits) -> list[str]:
    """Command line of the child, which runs without `site` and the user's settings."""
    folders = [Path(__file__).parents[2]]
    for package in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folders.append(Path(spec.origin).parents[1])
    numbers = map(str, (limits.seconds, limits.bytes, limits.characters))
    program = str(Path(__file__).with_name("template_worker.py"))
    paths = dict.fromkeys(map(str, folders))
    return [sys.executable, "-I", "-S", program, *numbers, *paths]


def _end(process: subprocess.Popen, owner: int) -> None:
    """Kills the child, unless this is a fork of the process that started it."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
