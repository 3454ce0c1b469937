"""Which engine a request is for, by the ids that its path and its body name."""

import asyncio
import io
from typing import Any

import pydantic
import zstandard
from starlette.datastructures import Headers
from starlette.types import Scope

from jaxlora.serve.fleet.relay import Incoming
from jaxlora.serve.ids import engine_of
from jaxlora.serve.limits import MOST_WINDOW, decompress

TINKER = "/api/v1/"
_PROTOBUF = "application/x-protobuf"
# Requests of these routes name ids, and any engine can answer them.
_ANYWHERE = frozenset(
    f"{TINKER}{name}" for name in ("session_heartbeat", "telemetry", "sessions/search")
)
_MOST_ID = 600
# The first bytes of a compressed body are within so many: a block has half at most.
_MOST_BEGIN = 2**18
# Other requests go on while a larger one is read.
_LARGE_BODY = 2**17


class _Named(pydantic.BaseModel):
    """The ids in a body, which is read without making objects of all else."""

    request_id: Any = None
    sampling_session_id: Any = None
    model_id: Any = None
    session_id: Any = None


async def engine_named(scope: Scope, incoming: Incoming, most: int) -> int | None:
    """Returns the engine that has what a request is about; None: any engine will do.

    Args:
        scope: The request.
        incoming: Its body, of which as much is read as is needed.
        most: Most bytes of a body, decompressed.

    Raises:
        HTTPException: The body cannot be decompressed, or is too large.
    """
    path = scope["path"]
    if scope["method"] != "POST" or not path.startswith(TINKER) or path in _ANYWHERE:
        return None
    if path.endswith("/finish"):
        return engine_of(path.removeprefix(f"{TINKER}sessions/"))
    headers = Headers(scope=scope)
    is_compressed = headers.get("content-encoding", "").strip().lower() == "zstd"
    if headers.get("content-type", "").startswith(_PROTOBUF):
        return engine_of(await _model_of_protobuf(incoming, is_compressed))
    body = await incoming.whole()
    if is_compressed or len(body) > _LARGE_BODY:  # a small one may become large
        return await asyncio.to_thread(_engine_of_json, body, is_compressed, most)
    return _engine_of_json(body, is_compressed, most)


def _engine_of_json(body: bytes, is_compressed: bool, most: int) -> int | None:
    if is_compressed:
        body = decompress(body, most)
    try:
        named = _Named.model_validate_json(body)
    except pydantic.ValidationError:
        return None  # any engine says what is wrong
    ids = named.request_id, named.sampling_session_id, named.model_id, named.session_id
    found = next((id for id in ids if id is not None), None)
    return engine_of(found) if isinstance(found, str) else None


async def _model_of_protobuf(incoming: Incoming, is_compressed: bool) -> str:
    """Returns the id of the model, with which a pass in protobuf begins."""
    sent, tried = bytearray(), 0
    while len(sent) < _MOST_BEGIN and not incoming.is_complete:
        sent += await incoming.more()
        if len(sent) >= 2 * tried:  # else many small pieces would take long
            tried = len(sent)
            if len(_beginning(sent, is_compressed)) == _MOST_ID:
                break
    begin = _beginning(sent, is_compressed)
    if len(begin) < 2 or begin[0] != 0x0A:  # field 1, of bytes
        return ""
    # A length below 128 is one byte; a longer id is none of ours.
    return begin[2 : 2 + begin[1]].decode(errors="replace")


def _beginning(sent: bytearray, is_compressed: bool) -> bytes:
    """Returns the first bytes of a body, of which the beginning has come."""
    if not is_compressed:
        return bytes(sent[:_MOST_ID])
    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    try:
        with decompressor.stream_reader(io.BytesIO(sent)) as reader:
            return reader.read(_MOST_ID)
    except zstandard.ZstdError:
        return b""  # the engine says so
