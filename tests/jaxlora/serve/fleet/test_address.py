"""Which engine a request is for."""

import asyncio
import json
import threading

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from jaxlora.serve.fleet import address
from jaxlora.serve.fleet.address import engine_named
from jaxlora.serve.fleet.relay import ClientGone, Incoming
from jaxlora.serve.ids import Ids, engine_of
from tests.jaxlora.serve.fleet.test_front import datum
from tests.jaxlora.serve.tinker.conftest import PROTOBUF, pass_request

MODEL = f"{Ids(3).new()}:train:0"


def incoming(body: bytes, size: int = 1000) -> Incoming:
    """The body of a request, which comes in pieces."""
    pieces = [body[i : i + size] for i in range(0, max(1, len(body)), size)]

    async def receive():
        if not pieces:
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    return Incoming(receive)


def named(path: str, body: bytes, method: str = "POST", **headers: str) -> int | None:
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [
            (key.replace("_", "-").encode(), value.encode())
            for key, value in headers.items()
        ],
    }

    async def find():
        found = incoming(body)
        number = await engine_named(scope, found, 10**7)
        whole = b"".join([piece async for piece in found.pieces()])
        assert whole == body  # all of it is sent on
        return number

    return asyncio.run(find())


def test_ids_tell_their_engine():
    for number in (0, 1, 99):
        ids = Ids(number)
        assert len(ids.new()) == 32 and ids.new() != ids.new()
        assert engine_of(f"{ids.new()}:train:0") == number
    for other in ("", "e0-a", "e100-a", "e1", "e1-x", "x" * 600):
        assert engine_of(other) == 0


@pytest.mark.parametrize(
    ("route", "body", "number"),
    [
        ("optim_step", {"seq_id": 1, "model_id": MODEL}, 3),
        ("retrieve_future", {"request_id": Ids(2).new(), "model_id": MODEL}, 2),
        ("asample", {"sampling_session_id": f"{Ids(4).new()}:sample:0"}, 4),
        ("create_model", {"session_id": Ids(5).new(), "a": {"model_id": "e7-a"}}, 5),
        ("create_model", {"session_id": Ids(0).new()}, 0),
        ("load_weights", {"session_id": Ids(6).new(), "model_id": None}, 6),
        ("create_session", {"tags": []}, None),
        ("session_heartbeat", {"session_id": Ids(5).new()}, None),
        ("optim_step", {"model_id": 7}, None),
        ("optim_step", [], None),
    ],
)  # fmt: skip
def test_json_names_the_engine(route, body, number):
    text = json.dumps(body).encode()
    assert named(f"/api/v1/{route}", text) == number
    packed = zstandard.compress(text)
    assert named(f"/api/v1/{route}", packed, content_encoding="zstd") == number


def test_large_json_is_read_in_another_thread():
    body = {"forward_input": {"data": [[1] * 100_000]}, "model_id": MODEL}
    assert named("/api/v1/forward", json.dumps(body).encode()) == 3


@pytest.mark.parametrize("size", [1, 40_000])
def test_protobuf_names_the_engine_at_its_beginning(size):
    request = pass_request(MODEL, 1, [datum(0, size)])
    body = request.SerializeToString()
    assert named("/api/v1/forward_backward", body, content_type=PROTOBUF) == 3
    packed = zstandard.compress(body)
    kinds = {"content_type": PROTOBUF, "content_encoding": "zstd"}
    assert named("/api/v1/forward_backward", packed, **kinds) == 3


def test_a_body_without_a_beginning_is_not_read_again_and_again(monkeypatch):
    """Empty blocks decompress to nothing, however many there are."""
    read, begin = [], address._beginning

    def beginning(sent, is_compressed):
        read.append(len(sent))
        return begin(sent, is_compressed)

    monkeypatch.setattr(address, "_beginning", beginning)
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"a")
    head, empty = frame[:6], bytes(3)  # a block that is raw, not the last, and of 0
    body = head + empty * 200_000 + b"\x01\0\0"
    assert zstandard.ZstdDecompressor().decompress(body, 10) == b""
    kinds = {"content_type": PROTOBUF, "content_encoding": "zstd"}
    assert named("/api/v1/forward_backward", body, **kinds) == 0
    assert sum(read) < 4 * 2**18


def test_a_small_body_that_becomes_large_is_read_in_another_thread(monkeypatch):
    threads = []
    decompress = address.decompress

    def noted(body, most):
        threads.append(threading.current_thread())
        return decompress(body, most)

    monkeypatch.setattr(address, "decompress", noted)
    packed = zstandard.compress(b'{"model_id": "e3-a"}' + b" " * 10**6)
    assert named("/api/v1/optim_step", packed, content_encoding="zstd") == 3
    assert threads[0] is not threading.main_thread()


def test_paths_name_the_engine_or_none():
    id = Ids(3).new()
    assert named(f"/api/v1/sessions/{id}/finish", b"{}") == 3
    assert named(f"/api/v1/sessions/{id}", b"", "GET") is None
    assert named("/v1/chat/completions", b"{}") is None


@given(st.binary(max_size=100), st.booleans(), st.booleans())
def test_no_body_breaks_anything(body, is_protobuf, is_packed):
    kinds = {"content_type": PROTOBUF} if is_protobuf else {}
    if is_packed:
        body, kinds = zstandard.compress(body), kinds | {"content_encoding": "zstd"}
    assert named("/api/v1/forward_backward", body, **kinds) in (None, *range(100))


def test_a_body_that_breaks_off_is_not_sent_on():
    async def read():
        found = incoming(b"{}")
        await found.whole()
        found.is_complete = False
        await found.more()

    with pytest.raises(ClientGone):
        asyncio.run(read())
