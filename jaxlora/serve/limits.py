"""Limits of requests and quotas of tenants."""

import asyncio
import io
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import zstandard
from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxlora.config.serve_config import Quota, RequestLimits, ServeConfig
from jaxlora.errors import DataError, JaxloraError
from jaxlora.serve.registry import Registry
from jaxlora.session.datum import Datum


class OverQuota(JaxloraError):
    """A tenant has used its quota for now; the client sends the request again."""


class OverStorage(JaxloraError):
    """A tenant has no room left in the storage, and must delete something."""


class TokenBucket:
    """Tokens that flow in at a rate, up to those of some seconds.

    A tenant may go below zero with one request, which then must be paid back before the
    next one begins, so a request larger than the bucket does not wait forever.
    """

    SECONDS = 10.0

    def __init__(self, rate: float, now: float):
        """Makes a full bucket.

        Args:
            rate: Tokens a second.
            now: Seconds of the clock.
        """
        self.rate = rate
        self._level, self._at = rate * self.SECONDS, now

    def wait(self, now: float) -> float:
        """Returns the seconds until a request may begin."""
        self._fill(now)
        wait = -self._level / self.rate
        return wait if wait > 1e-6 else 0.0  # less may be too little for a clock

    def take(self, tokens: float, now: float) -> None:
        """Takes the tokens of a request that begins."""
        self._fill(now)
        self._level -= tokens

    def _fill(self, now: float) -> None:
        full = self.rate * self.SECONDS
        self._level = min(full, self._level + (now - self._at) * self.rate)
        self._at = now


class Limits:
    """Limits of requests, and the tenants' use of their quotas.

    Any thread may use it.
    """

    def __init__(
        self,
        config: ServeConfig,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Makes the object.

        Args:
            config: The server's settings.
            registry: Counts what tenants have.
            clock: Returns seconds, of any origin.
        """
        self.config, self._registry, self._clock = config, registry, clock
        self._lock = threading.Lock()
        self._pending: defaultdict[str, int] = defaultdict(int)
        self._buckets: dict[str, TokenBucket] = {}

    def quota(self, tenant: str) -> Quota:
        """Returns the quota of a tenant."""
        return self.config.quota(tenant)

    def check_data(self, data: Sequence[Datum]) -> int:
        """Checks the size of a pass; returns its tokens.

        Raises:
            DataError: It has more datums or tokens than a request may have.
        """
        most = self.config.limits
        if len(data) > most.datums:
            raise DataError(
                f"the request has {len(data)} datums, and this server takes at most "
                f"{most.datums} at once. Send several requests; their gradients add up."
            )
        tokens = sum(len(datum.tokens) for datum in data)
        if tokens > most.tokens:
            raise DataError(
                f"the request has {tokens} tokens, and this server takes at most "
                f"{most.tokens} at once. Send several requests; their gradients add up."
            )
        return tokens

    def check_new_model(self, tenant: str) -> None:
        """Checks that a tenant may have another model.

        Raises:
            OverQuota: It has as many as it may have.
        """
        most = self.quota(tenant).models
        if most is not None and (has := self._num_models(tenant)) >= most:
            raise OverQuota(
                f"you have {has} models, and your quota is {most}. Unload one first."
            )

    def _num_models(self, tenant: str) -> int:
        models = self._registry.list(tenant, "model")
        return sum(not model.fields.get("unloaded") for model in models)

    def check_storage(self, tenant: str, num_bytes: int = 0) -> None:
        """Checks that a tenant has room for more bytes.

        Raises:
            OverStorage: It has not.
        """
        most = self.quota(tenant).storage_bytes
        if most is None:
            return
        has = self._registry.stored_bytes(tenant)
        if has + num_bytes > most or has >= most:
            raise OverStorage(
                f"you have stored {has:,} bytes, and your quota is {most:,}. Delete "
                "checkpoints or uploads first."
            )

    def begin(self, tenant: str, tokens: int) -> None:
        """Counts tokens of a request as pending until `end`.

        Raises:
            OverQuota: The tenant has too many already. One request is always taken.
        """
        most = self.quota(tenant).pending_tokens
        with self._lock:
            pending = self._pending[tenant]
            if most is not None and pending and pending + tokens > most:
                raise OverQuota(
                    f"you have {pending:,} pending tokens, and your quota is {most:,}. "
                    "Wait for results before you send more."
                )
            self._pending[tenant] += tokens

    def end(self, tenant: str, tokens: int) -> None:
        """Takes back what `begin` has counted."""
        with self._lock:
            self._pending[tenant] -= tokens

    def pending(self, tenant: str) -> int:
        """Returns a tenant's pending tokens."""
        with self._lock:
            return self._pending[tenant]

    def may_run(self, tenant: str) -> bool:
        """Whether a tenant's next request may begin, by its tokens a second."""
        with self._lock:
            bucket = self._bucket(tenant)
            return bucket is None or bucket.wait(self._clock()) == 0.0

    def spend(self, tenant: str, tokens: int) -> None:
        """Takes the tokens of a request that begins from the tenant's rate."""
        with self._lock:
            if (bucket := self._bucket(tenant)) is not None:
                bucket.take(tokens, self._clock())

    def _bucket(self, tenant: str) -> TokenBucket | None:
        rate = self.quota(tenant).tokens_per_second
        if rate is None:
            return None
        if tenant not in self._buckets:
            self._buckets[tenant] = TokenBucket(rate, self._clock())
        return self._buckets[tenant]


# Beginning of paths to which tenants send files of data, which may be larger than other
# bodies.
UPLOADS = "/jobs/v1/uploads/"
# Frames with a larger window would need as much memory for any content.
_SMALL_BODY = 2**16
_PIECE_BYTES = 2**20  # that are decompressed at once, and take memory
MOST_WINDOW = 2**27


class BodyLimits:
    """Refuses bodies that are too large before anything reads them.

    Bodies that are compressed with zstd arrive decompressed in the app, and are bounded
    on both sides. It stands behind the check of the key, so that only tenants can send
    bodies at all.
    """

    def __init__(
        self, app: ASGIApp, limits: RequestLimits, *, decompresses: bool = True
    ):
        """Makes the object.

        Args:
            app: The app.
            limits: The limits.
            decompresses: Whether bodies arrive decompressed; else another one of these
                follows.
        """
        self._app, self._limits, self._decompresses = app, limits, decompresses
        self._open: dict[str, int] = defaultdict(int)  # bytes, by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = scope["path"].startswith(UPLOADS)
        most = self._limits.upload_bytes if is_upload else self._limits.body_bytes
        length = _content_length(headers, most)
        principal = scope.get("state", {}).get("principal")
        tenant = "" if principal is None else principal.tenant
        if self._open[tenant] and self._open[tenant] + length > self._limits.open_bytes:
            raise HTTPException(
                429,
                f"your open requests have {self._open[tenant]:,} bytes, and at most "
                f"{self._limits.open_bytes:,} are taken at once. Wait for answers "
                "before you send more.",
            )
        self._open[tenant] += length
        try:
            receive = _bounded(receive, most, self._limits.body_seconds)
            encoding = headers.get("content-encoding", "identity").strip().lower()
            if encoding == "zstd" and self._decompresses:
                scope, receive = await _decompressed(scope, receive, most)
            elif encoding not in ("", "identity", "zstd"):
                raise HTTPException(
                    415,
                    f"content-encoding {encoding:.40} is not read. Use zstd or none.",
                )
            await self._app(scope, receive, send)
        finally:
            self._open[tenant] -= length
            if not self._open[tenant]:
                del self._open[tenant]


def _content_length(headers: Headers, most: int) -> int:
    """Returns the length of a body, or its bound if it is not known."""
    if "transfer-encoding" in headers:
        return most
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdecimal()):
        raise HTTPException(400, "the header content-length is no number.")
    if len(text) > 20 or int(text) > most:
        raise _too_large(most)
    return int(text)


def _too_large(most: int) -> HTTPException:
    return HTTPException(
        413,
        f"the body is larger than {most:,} bytes, the most that this server takes at "
        "once. Send it in parts.",
    )


def _bounded(receive: Receive, most: int, seconds: float) -> Receive:
    """Bounds the bytes of a body, and the time between two pieces of it."""
    num_bytes, is_complete = 0, False

    async def bounded() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), seconds)
        except TimeoutError:
            raise HTTPException(
                408, f"no byte of the body has come for {seconds:g} s. Send it again."
            ) from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > most:
            raise _too_large(most)
        is_complete = not message.get("more_body", False)
        return message

    return bounded


async def _decompressed(
    scope: Scope, receive: Receive, most: int
) -> tuple[Scope, Receive]:
    """Returns the scope and the messages of a request without compression."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HTTPException(400, "the body has ended too early. Send it again.")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = b"".join(pieces)
    # Another thread would take longer to begin than a small body takes.
    is_small = 0 <= _frame_size(body) <= _SMALL_BODY and most > _SMALL_BODY
    if is_small and len(body) <= _SMALL_BODY:
        body = decompress(body, _SMALL_BODY)
    else:
        body = await asyncio.to_thread(decompress, body, most)
    dropped = (b"content-encoding", b"content-length", b"transfer-encoding")
    kept = [(key, value) for key, value in scope["headers"] if key not in dropped]
    length = (b"content-length", str(len(body)).encode())
    is_given = False

    async def whole() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": [*kept, length]}, whole


def _frame_size(body: bytes) -> int:
    """Returns the bytes that the only frame of a body decompresses to; -1: unknown."""
    try:
        parameters = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError:
        return -1
    return parameters.content_size if parameters.content_size < 2**62 else -1


def decompress(body: bytes, most: int) -> bytes:
    """Decompresses what zstd has compressed.

    Args:
        body: One or more frames.
        most: Most bytes of the result. No more are ever in memory.

    Raises:
        HTTPException: The body is not zstd, or larger.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    # The reader would end without an error where a frame is cut off. One more frame
    # behind it is only read if the body is complete.
    end = secrets.token_bytes(16)
    whole = io.BytesIO(body + zstandard.compress(end))
    reader = decompressor.stream_reader(whole, read_across_frames=True)
    found, left = bytearray(), most + len(end) + 1
    try:
        while left > 0 and (piece := reader.read(min(left, _PIECE_BYTES))):
            found += piece
            left -= len(piece)
    except zstandard.ZstdError as error:
        raise HTTPException(400, f"the body cannot be decompressed: {error}.") from None
    if len(found) > most + len(end):
        raise _too_large(most)
    if not found.endswith(end):
        raise HTTPException(400, "the body cannot be decompressed: it is cut off.")
    return bytes(memoryview(found)[: -len(end)])
