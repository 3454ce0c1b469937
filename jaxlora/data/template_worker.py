"""The child program that renders templates, with limits of time and memory.

`template.py` starts it as `python -I -S template_worker.py SECONDS BYTES CHARACTERS
PATH...`. Each PATH is a folder to import from; the first one holds the package. The
program reads a task with many payloads from standard input, and writes one line of JSON
for each payload to standard output. Its input is pickled, as only this package sends
it; its output is JSON, as an untrusted template may determine what is written.

The program ends when the pipe is closed or idle for long. It imports nothing heavy: a
stub replaces the package `jaxlora`, because importing the package would load JAX.
"""

import json
import os
import pickle
import resource
import select
import signal
import sys
import types

OUT_OF_MEMORY = 3

_IDLE_SECONDS = 30
_HEADER_BYTES = 8


def main(arguments: list[str]) -> None:
    """Answers requests until the input is closed or idle for long."""
    max_seconds, max_bytes, max_characters, *paths = arguments
    package = types.ModuleType("jaxlora")
    package.__path__ = [os.path.join(paths[0], "jaxlora")]
    sys.modules["jaxlora"] = package
    sys.path.extend(paths[1:])
    from jaxlora.data.template_tasks import TaskRunner

    _limit_memory(int(max_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # The system itself kills the process when its time is up, even within a long call.
    start_clock = lambda: signal.setitimer(signal.ITIMER_PROF, float(max_seconds))
    runner = TaskRunner(start_clock, int(max_characters))
    _write({})
    sys.stdout.buffer.flush()
    while (frame := _read_frame()) is not None:
        task, payloads = pickle.loads(frame)
        for payload in payloads:
            _write(runner.run(task, payload))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.flush()


def _limit_memory(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Other systems do not enforce this limit; there, `template.py` watches the memory.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _read_frame() -> bytes | None:
    """Reads the next request; None at the end of the input."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if not poll.poll(_IDLE_SECONDS * 1000):
        return None
    header = sys.stdin.buffer.read(_HEADER_BYTES)
    length = int.from_bytes(header, "little")
    frame = sys.stdin.buffer.read(length)
    return frame if header and len(frame) == length else None


def _write(answer: dict) -> None:
    line = json.dumps(answer, ensure_ascii=False)
    sys.stdout.buffer.write(line.encode("utf-8", "surrogatepass") + b"\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:
        # The parent no longer reads answers.
        os._exit(0)
    os._exit(0)
