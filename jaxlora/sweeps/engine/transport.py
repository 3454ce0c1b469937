"""Connections between the driver of a sweep and its workers, by authenticated sockets.

The driver listens; each worker gets the address and a secret key through its standard
input, and connects back. Both ends prove that they have the key before a message is
read. When a connection ends, the worker knows that the driver is gone, and the driver
that the worker is.

One thread for each connection reads, and one writes, so that a process that stops in
the middle of a message, or reads nothing, does not block the driver.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)

from jaxlora.sweeps.engine import messages as m
from jaxlora.sweeps.engine.launch import Launcher, Lost, Process

logger = logging.getLogger(__name__)

_BACKLOG = 128
# A connection ends when the peer's host has given no sign of life for this time.
_PEER_SECONDS = 60
_DOOR_SECONDS = 60  # in which a peer must prove that it has the key
# Time for a process to end once its connection has ended, and the part of it for which
# the driver does nothing else.
_LEAVE_SECONDS = 10.0
_WAIT_SECONDS = 0.5


class _Worker:
    """A worker as the driver sees it: its process, and the messages for it."""

    def __init__(self, group: int):
        self.group = group
        self.process: Process | None = None
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.is_connected, self.is_lost = False, False
        self.left = float("inf")  # the time at which its connection ended
        self.connection: Connection | None = None

    def leave(self) -> None:
        """Ends its connection, now or as soon as there is one.

        A process that lives on because its host could not be reached then ends itself.
        """
        self.is_lost = True
        if (connection := self.connection) is not None:
            with contextlib.suppress(OSError), _socket_of(connection) as opened:
                opened.shutdown(socket.SHUT_RDWR)


class Workers:
    """Starts workers and passes messages; only one thread may call the methods.

    At most one worker of a group lives at any time.
    """

    def __init__(self, launcher: Launcher):
        """Listens for workers; none runs yet."""
        self._launcher, self._key = launcher, secrets.token_bytes(32)
        self._listener = Listener((launcher.host, 0), "AF_INET", _BACKLOG)
        self._address = self._listener.address
        self._is_closed = False
        self._workers: dict[int, _Worker] = {}  # by group
        self._started: list[_Worker] = []  # by the number that each one sends
        self._found: queue.SimpleQueue[tuple[_Worker, bytes | None]]
        self._found = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def _accept(self) -> None:
        """Accepts connections, each of which gets a thread of its own."""
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:  # such as too many open files
                logger.warning("no worker can connect: %s", error)
                time.sleep(1.0)
                continue
            if self._is_closed:
                connection.close()
                self._listener.close()
                return
            threading.Thread(
                target=self._serve, args=(connection,), daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        """Reads from a connection until it ends."""
        with connection:
            try:
                _limit_reads(connection, _DOOR_SECONDS)
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                worker = self._started[int(connection.recv_bytes())]
                _limit_reads(connection, 0)
                watch_peer(connection)
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("a connection was refused: %s", error)
                return
            worker.connection = connection
            if worker.is_lost:
                return
            worker.is_connected = True
            writer = threading.Thread(
                target=_write, args=(connection, worker.outbox), daemon=True
            )
            writer.start()
            with contextlib.suppress(OSError, EOFError):
                while True:
                    self._found.put((worker, connection.recv_bytes()))
            worker.outbox.put(None)
            writer.join()
        self._found.put((worker, None))

    def start(self, group: int, folder: pathlib.Path) -> bool:
        """Starts the worker of a group, unless its devices are not available now.

        Returns:
            Whether it was started.
        """
        worker, number = _Worker(group), len(self._started)
        self._started.append(worker)
        door = {"address": self._address, "key": self._key.hex(), "number": number}
        worker.process = self._launcher.start(group, folder, json.dumps(door).encode())
        if worker.process is None:
            return False
        self._workers[group] = worker
        return True

    def send(self, group: int, messages: Sequence[m.ToWorker]) -> None:
        """Sends messages, which are lost if the worker has ended."""
        if worker := self._workers.get(group):
            for message in messages:
                worker.outbox.put(m.encode(message))

    def receive(self, timeout: float) -> list[tuple[int, m.FromWorker | Lost]]:
        """Returns what has arrived, with its group, in order of arrival.

        If nothing has, it waits for up to `timeout` seconds.

        Raises:
            ProcessError: Workers cannot be started any more. Later calls still return
                what arrives.
        """
        self._launcher.look()
        came: list[tuple[_Worker, bytes | None]] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._found.get(timeout=timeout))
            while True:
                came.append(self._found.get_nowait())
        found: list[tuple[int, m.FromWorker | Lost]] = []
        for worker, data in came:
            if self._workers.get(worker.group) is not worker:
                continue  # it was killed
            if data is None:
                worker.is_connected, worker.left = False, time.monotonic()
                continue
            try:
                found.append((worker.group, m.decode(data)))
            except ValueError as error:
                logger.warning("group %d is killed: %s", worker.group, error)
                self.kill(worker.group)
        for group, worker in list(self._workers.items()):
            if not worker.is_connected and (lost := _ending(worker)) is not None:
                del self._workers[group]
                worker.leave()
                found.append((group, lost))
        return found

    def kill(self, group: int) -> None:
        """Ends a worker at once; it is reported as lost."""
        if worker := self._workers.get(group):
            assert worker.process is not None
            worker.process.kill()
            worker.is_connected, worker.left = False, time.monotonic()

    def close(self) -> None:
        """Ends all workers at once."""
        for group in self._workers:
            self.kill(group)
        for worker in self._workers.values():
            assert worker.process is not None
            worker.process.ending(_LEAVE_SECONDS)
            worker.leave()
        self._workers.clear()
        self._is_closed = True
        with contextlib.suppress(OSError):  # it may have returned already
            socket.create_connection(self._address).close()  # `accept` returns


def _write(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Writes messages to a connection until a None comes, or the connection ends."""
    with contextlib.suppress(OSError):
        while (data := outbox.get()) is not None:
            connection.send_bytes(data)


def _ending(worker: _Worker) -> Lost | None:
    """Returns how a worker without a connection ended; None if it still runs."""
    assert worker.process is not None
    seconds = time.monotonic() - worker.left
    if seconds > _LEAVE_SECONDS:
        worker.process.kill()
    return worker.process.ending(_WAIT_SECONDS if seconds > 0 else 0.0)


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Opens the socket of a connection once more, for its options."""
    with socket.socket(fileno=os.dup(connection.fileno())) as opened:
        yield opened


def _limit_reads(connection: Connection, seconds: int) -> None:
    """Makes each read of a connection fail after some seconds; 0: never."""
    with _socket_of(connection) as opened:
        timeout = struct.pack("ll", seconds, 0)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def watch_peer(connection: Connection) -> None:
    """Makes a connection end when the peer's host has not answered for a while."""
    with _socket_of(connection) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _PEER_SECONDS // 2),
            ("TCP_KEEPINTVL", _PEER_SECONDS // 6),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 1000 * _PEER_SECONDS),
        ):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """The worker's end of a connection, which receives in a thread of its own."""

    def __init__(self, connection: Connection):
        """Makes the object; `listen` comes next."""
        self._connection, self._sending = connection, threading.Lock()

    @staticmethod
    def of_this_process() -> "Link":
        """Connects to the driver that standard input names, and closes the input."""
        door = json.loads(sys.stdin.buffer.read())
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        key = bytes.fromhex(door["key"])
        connection = Client(tuple(door["address"]), "AF_INET", key)
        watch_peer(connection)
        connection.send_bytes(b"%d" % door["number"])
        return Link(connection)

    def send(self, message: m.FromWorker) -> None:
        """Sends a message from any thread; it is lost if the driver has ended."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send_bytes(m.encode(message))

    def listen(
        self, receive: Callable[[m.ToWorker], None], ended: Callable[[], None]
    ) -> None:
        """Receives messages in a thread of its own, until the driver has ended."""

        def read() -> None:
            try:
                while not isinstance(message := self._receive(), m.End):
                    receive(message)
            except (OSError, EOFError):
                logger.warning("the driver has ended")
            finally:
                ended()

        threading.Thread(target=read, daemon=True, name="driver").start()

    def _receive(self) -> m.ToWorker:
        return m.decode(self._connection.recv_bytes())
