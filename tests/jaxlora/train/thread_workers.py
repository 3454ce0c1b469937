"""Workers of a sweep that are threads of the test's process, and share its programs."""

import contextlib
import pathlib
import queue
import threading

from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine import run, worker
from jaxlora.sweeps.engine.launch import Lost
from jaxlora.sweeps.engine.transport import Link, Workers


class Killed(BaseException):
    """Ends a worker at once: no checkpoint is written on the way."""


class ThreadLink(Link):
    """Passes the messages of one worker on to the driver, as bytes."""

    def __init__(self, group: int, sent: queue.Queue):
        self._group, self._sent, self.is_killed = group, sent, False

    def send(self, message) -> None:
        if self.is_killed:
            raise Killed
        self._sent.put((self._group, m.decode(m.encode(message))))


class ThreadWorkers(Workers):
    """Starts workers in threads, which are killed when they send something next."""

    def __init__(self):
        self.sent: queue.Queue = queue.Queue()
        self.threads: list[threading.Thread] = []
        self.drivers: dict[int, worker._Driver] = {}
        self.links: dict[int, ThreadLink] = {}

    def start(self, group: int, folder: pathlib.Path) -> bool:
        driver, link = worker._Driver(), ThreadLink(group, self.sent)
        self.drivers[group], self.links[group] = driver, link

        def train() -> None:
            reason = "ended"
            try:
                worker.train(driver.waiting.get(), link, driver)
            except (Exception, Killed) as error:
                reason = repr(error)
            self.sent.put((group, Lost(reason=reason)))

        thread = threading.Thread(target=train)
        self.threads.append(thread)
        thread.start()
        return True

    def send(self, group: int, messages) -> None:
        for message in messages:
            if isinstance(message, m.End):
                self.kill(group)
            else:
                self.drivers[group].receive(m.decode(m.encode(message)))

    def receive(self, timeout: float):
        try:
            found = [self.sent.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self.sent.empty():
            found.append(self.sent.get())
        return found

    def kill(self, group: int) -> None:
        self.links[group].is_killed = True
        self.drivers[group].control.end()

    def close(self) -> None:
        for group, driver in self.drivers.items():
            if driver.control is not None:
                self.kill(group)
        for thread in self.threads:
            thread.join()


def use_threads(monkeypatch) -> list[ThreadWorkers]:
    """Lets workers of sweeps be threads; the list gets those of each sweep."""
    made = []

    @contextlib.contextmanager
    def opened(*_):
        made.append(ThreadWorkers())
        yield made[-1]

    monkeypatch.setattr(run, "_open_workers", opened)
    return made
