"""The worker's end of the pipes to the driver."""

import os
import threading
from collections.abc import Callable

from jaxlora.sweeps.engine.messages import FromWorker, Message, decode, encode


class Link:
    """Sends messages to the driver, and receives its messages in a thread."""

    def __init__(self, read: int, write: int):
        """Makes the object; `listen` comes next.

        Args:
            read: File descriptor of the pipe from the driver.
            write: That of the pipe to it.
        """
        self._read, self._write = read, write
        self._sending = threading.Lock()

    @staticmethod
    def of_this_process() -> "Link":
        """Takes the standard input and output; what is printed goes to stderr."""
        read, write = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        return Link(read, write)

    def send(self, message: FromWorker) -> None:
        """Sends a message from any thread; it is lost if the driver has ended."""
        rest = memoryview(encode(message))
        try:
            with self._sending:
                while rest:
                    rest = rest[os.write(self._write, rest) :]
        except BrokenPipeError:
            return

    def listen(
        self, receive: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        """Calls functions from a thread of its own.

        Args:
            receive: Is called with each message of the driver.
            ended: Is called when the driver has ended, or wants this process to end.
        """

        def read() -> None:
            with os.fdopen(self._read, "rb") as file:
                for line in file:
                    receive(decode(line))
            ended()

        threading.Thread(target=read, daemon=True, name="driver").start()
