"""Sends requests to an engine's process, and its answers back, piece by piece."""

import asyncio
import collections
import contextlib
import pathlib
import time
from collections.abc import AsyncIterator, Sequence

import h11
from starlette.types import Receive, Scope, Send

from jaxlora.serve.hub import Unavailable
from jaxlora.serve.listener import KEEP_SECONDS

Headers = list[tuple[bytes, bytes]]

_PIECE = 2**16
# The engine closes a connection later, so that none is closed while it is sent to.
_IDLE_SECONDS = KEEP_SECONDS / 3
# Headers of one connection, and those that this one sets.
_OWN = frozenset(
    b"connection keep-alive te trailer upgrade expect proxy-authorization"
    b" x-forwarded-proto x-forwarded-for".split()
)
_OF_BODY = frozenset((b"content-length", b"transfer-encoding"))
_OF_ANSWER = frozenset(b"connection keep-alive transfer-encoding date server".split())


class Away(Unavailable):
    """An engine does not answer. Its clients send their requests again."""


class ClientGone(Exception):
    """The client has closed its connection."""


class Incoming:
    """The body of a request, whose beginning may be looked at before it is sent on."""

    def __init__(self, receive: Receive):
        """Makes the object; `receive` gives the messages of the request."""
        self._receive = receive
        self._known: list[bytes] = []
        self.is_complete = False

    async def more(self) -> bytes:
        """Waits for the next piece, and keeps it.

        Raises:
            ClientGone: It never comes.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.is_complete = not message.get("more_body", False)
        self._known.append(message.get("body", b""))
        return self._known[-1]

    async def whole(self) -> bytes:
        """Returns the whole body."""
        while not self.is_complete:
            await self.more()
        self._known = [b"".join(self._known)]
        return self._known[0]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the pieces; those that come now are not kept."""
        for piece in self._known:
            yield piece
        while not self.is_complete:
            yield await self.more()
            self._known.pop()

    async def end(self) -> None:
        """Waits until the client has closed its connection.

        Raises:
            ClientGone: It has.
        """
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGone


class _Connection:
    """A connection to an engine, which has one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    async def send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def response(self) -> h11.Response:
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError("the engine has closed the connection")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError("the engine has closed the connection")

    async def _next(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_PIECE))
        assert not isinstance(event, type)  # no request is paused
        return event

    def begin_again(self) -> bool:
        """Prepares for another request; returns whether there can be one."""
        if {self._http.our_state, self._http.their_state} != {h11.DONE}:
            return False
        self._http.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    def close(self) -> None:
        self._writer.transport.abort()  # nobody waits for what was not sent

    async def end(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Relay:
    """The way to an engine: connections to its socket, which are kept open.

    Attributes:
        num_open: Requests that the engine has not answered.
    """

    def __init__(self, socket: pathlib.Path):
        """Makes the object; `socket` is that of the engine."""
        self._socket = socket
        self._idle: collections.deque[_Connection] = collections.deque()
        self.num_open = 0

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[_Connection]:
        """Gives a connection, which is kept if its request is answered as a whole.

        Raises:
            Away: It breaks off.
        """
        self.num_open += 1
        connection = None
        try:
            connection = await self._connect()
            yield connection
            if connection.begin_again():
                self._idle.append(connection)
                connection = None
        except (OSError, h11.RemoteProtocolError) as error:
            raise Away("the engine of this request does not answer.") from error
        finally:
            self.num_open -= 1
            if connection is not None:
                await connection.end()

    async def _connect(self) -> _Connection:
        before = time.monotonic() - _IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < before:  # the oldest is first
            self._idle.popleft().close()
        if self._idle:
            return self._idle.pop()
        return _Connection(*await asyncio.open_unix_connection(str(self._socket)))

    def close(self) -> None:
        """Closes connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    async def end(self) -> None:
        """Closes them, and waits for that."""
        while self._idle:
            await self._idle.pop().end()

    async def get(self, path: str, headers: Headers) -> tuple[int, bytes]:
        """Returns the status and the body of an answer.

        Raises:
            Away: The engine does not answer.
        """
        async with self._connection() as connection:
            given = _headers_to_send(headers, "http", "")
            given = [(key, value) for key, value in given if key not in _OF_BODY]
            head = h11.Request(method="GET", target=path, headers=given)
            await connection.send(head)
            await connection.send(h11.EndOfMessage())
            response = await connection.response()
            body = b"".join([piece async for piece in connection.body()])
        return response.status_code, body

    async def forward(self, scope: Scope, incoming: Incoming, send: Send) -> None:
        """Sends a request on, and its answer back.

        Args:
            scope: The request.
            incoming: Its body.
            send: Sends the answer.

        Raises:
            Away: The engine does not answer, or its answer breaks off.
            ClientGone: The client does not wait for the answer.
            HTTPException: The body is too large, or does not come.
        """
        async with self._connection() as connection:
            await connection.send(_head(scope))
            sending = asyncio.create_task(_send_body(connection, incoming))
            sending.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                await _answer(await connection.response(), connection, send)
            except (OSError, h11.RemoteProtocolError):
                await asyncio.wait([sending], timeout=0)
                if sending.done() and (reason := sending.exception()) is not None:
                    raise reason from None
                raise
            finally:
                sending.cancel()
            # Only now, as a client with its whole answer looks as if it had gone.
            await send({"type": "http.response.body"})


async def _send_body(connection: _Connection, incoming: Incoming) -> None:
    """Sends a body; if the client goes, the engine notices that."""
    try:
        async for piece in incoming.pieces():
            await connection.send(h11.Data(data=piece))
        await connection.send(h11.EndOfMessage())
        await incoming.end()
    except Exception:
        connection.close()  # which ends the wait for the answer, too
        raise


async def _answer(response: h11.Response, connection: _Connection, send: Send) -> None:
    """Sends an answer without its end."""
    headers = [(k, v) for k, v in response.headers if k not in _OF_ANSWER]
    start = {"type": "http.response.start", "status": response.status_code}
    await send({**start, "headers": headers})
    async for piece in connection.body():
        await send({"type": "http.response.body", "body": piece, "more_body": True})


def _head(scope: Scope) -> h11.Request:
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    host = (scope.get("client") or ("",))[0]
    headers = _headers_to_send(scope["headers"], scope["scheme"], host)
    return h11.Request(method=scope["method"], target=target, headers=headers)


def _headers_to_send(
    headers: Sequence[tuple[bytes, bytes]], scheme: str, host: str
) -> Headers:
    kept = [(key, value) for key, value in headers if key not in _OWN]
    more = [(b"x-forwarded-proto", scheme.encode())]
    if host:
        more.append((b"x-forwarded-for", host.encode()))
    if b"host" not in {key for key, _ in kept}:
        more.append((b"host", b"localhost"))
    return kept + more
