"""The child processes that render templates, which all threads share."""

import functools
import os
import queue
from collections.abc import Sequence

from jaxlora.data.template import Answer, TemplateProcess
from jaxlora.data.template_tasks import Payload, Task

_MAX_PROCESSES = 8


def run_task(task: Task, payloads: Sequence[Payload]) -> list[Answer]:
    """Renders a template in one of the shared child processes.

    Args:
        task: The template.
        payloads: The renderings to do; many in one call cost little each.

    Returns:
        An answer for each payload, in their order.

    Raises:
        DataError: The child process cannot be started.
    """
    return _shared().run(task, payloads)


def num_processes() -> int:
    """Returns how many threads can render templates at the same time."""
    if hasattr(os, "sched_getaffinity"):
        return min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    return min(_MAX_PROCESSES, os.cpu_count() or 1)


class TemplatePool:
    """Several child processes, of which each call uses one.

    Its methods may be called from several threads.
    """

    def __init__(self, num: int):
        """Makes the objects; each child is started when it is first needed."""
        # The last one returned is used first, so a single thread starts a single child.
        self._free: queue.LifoQueue[TemplateProcess] = queue.LifoQueue()
        self._processes = [TemplateProcess() for _ in range(num)]
        for process in self._processes:
            self._free.put(process)

    def run(self, task: Task, payloads: Sequence[Payload]) -> list[Answer]:
        """Renders a template in a process that is free; see `run_task`."""
        process = self._free.get()
        try:
            return process.run(task, payloads)
        finally:
            self._free.put(process)

    @property
    def pids(self) -> list[int]:
        """The process ids of the children that were started."""
        return [p.pid for p in self._processes if p.pid is not None]


@functools.cache
def _shared() -> TemplatePool:
    return TemplatePool(num_processes())
