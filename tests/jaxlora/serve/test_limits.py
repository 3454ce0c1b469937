"""Quotas of tenants, and bodies that are refused before anything reads them."""

import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from fastapi import HTTPException

from jaxlora.config.serve_config import ServeConfig
from jaxlora.errors import DataError
from jaxlora.serve.database import Database
from jaxlora.serve.limits import (
    Limits,
    OverQuota,
    OverStorage,
    TokenBucket,
    decompress,
)
from jaxlora.serve.registry import Registry
from jaxlora.session.datum import Datum


@pytest.fixture
def registry(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/serve.db")) as database:
        yield Registry(database)


@pytest.fixture
def limits(registry, clock):
    def make(**quotas) -> Limits:
        config = ServeConfig(
            model="m", quotas=quotas, limits={"datums": 3, "tokens": 20}
        )
        return Limits(config, registry, clock=clock)

    return make


def data(*lengths: int) -> list[Datum]:
    return [
        Datum(tokens=np.arange(n), target_tokens=np.arange(n), weights=np.ones(n))
        for n in lengths
    ]


def test_a_request_has_so_many_datums_and_tokens(limits):
    assert limits().check_data(data(5, 6, 7)) == 18
    with pytest.raises(DataError, match="4 datums, and this server takes at most 3"):
        limits().check_data(data(1, 1, 1, 1))
    with pytest.raises(DataError, match="21 tokens, and this server takes at most 20"):
        limits().check_data(data(10, 11))


def test_models_and_storage_are_counted_by_tenant(limits, registry):
    limits = limits(default={"models": 1, "storage_bytes": 10}, rich={})
    limits.check_new_model("alice")
    registry.add("model", "alice")
    registry.add("checkpoint", "alice", num_bytes=9)
    limits.check_storage("alice", 1)
    with pytest.raises(OverQuota, match="you have 1 models, and your quota is 1"):
        limits.check_new_model("alice")
    with pytest.raises(OverStorage, match="stored 9 bytes, and your quota is 10"):
        limits.check_storage("alice", 2)
    registry.add("upload", "alice", num_bytes=1)
    with pytest.raises(OverStorage):
        limits.check_storage("alice")
    limits.check_new_model("bob")
    for _ in range(3):
        registry.add("model", "rich", num_bytes=10**12)
        limits.check_new_model("rich")
        limits.check_storage("rich", 10**12)


def test_pending_tokens_are_bounded_and_one_request_is_always_taken(limits):
    limits = limits(default={"pending_tokens": 100})
    limits.begin("alice", 1000)
    with pytest.raises(OverQuota, match="1,000 pending tokens, and your quota is 100"):
        limits.begin("alice", 1)
    limits.begin("bob", 60)
    limits.begin("bob", 40)
    assert limits.pending("bob") == 100
    limits.end("alice", 1000)
    limits.begin("alice", 100)


def test_a_tenant_has_its_tokens_a_second(limits, clock):
    """A burst first, then the rate; what one request owes is paid before the next."""
    limits = limits(slow={"tokens_per_second": 10.0})
    for _ in range(2):
        assert limits.may_run("slow")
        limits.spend("slow", 60)  # the bucket holds ten seconds, 100 tokens
    assert not limits.may_run("slow")
    clock.now += 1.9
    assert not limits.may_run("slow")
    clock.now += 0.2
    assert limits.may_run("slow")
    limits.spend("fast", 10**9)
    assert limits.may_run("fast")


def test_a_bucket_keeps_its_rate_on_average():
    bucket, now, spent = TokenBucket(100.0, 0.0), 0.0, 0
    rng = np.random.default_rng(0)
    while now < 1000:
        if wait := bucket.wait(now):
            now += wait
            continue
        tokens = int(rng.integers(1, 3000))
        bucket.take(tokens, now)
        spent += tokens
        now += 0.01
    assert 1000 * 100 <= spent <= 1010 * 100 + 3000


# ---- compressed bodies ---------------------------------------------------------------


def status_of(body: bytes, most: int) -> int:
    with pytest.raises(HTTPException) as found:
        decompress(body, most)
    return found.value.status_code


def test_frames_are_decompressed_up_to_a_bound():
    one = zstandard.compress(b"x" * 1000)
    assert decompress(one, 1000) == b"x" * 1000
    assert decompress(one + one, 2000) == b"x" * 2000
    assert decompress(one, 2**50) == b"x" * 1000  # a bound takes no memory
    assert status_of(one, 999) == 413
    assert decompress(b"", 10) == b""


def test_a_bomb_needs_no_memory():
    """64 KiB that stand for 2 GiB."""
    chunks = zstandard.ZstdCompressor(level=3).compressobj()
    piece = bytes(2**24)
    bomb = b"".join(chunks.compress(piece) for _ in range(128)) + chunks.flush()
    assert len(bomb) < 2**18
    tracemalloc.start()
    assert status_of(bomb, 2**20) == 413
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_a_body_that_is_cut_off_is_refused_wherever_it_is_cut():
    body = zstandard.compress(bytes(range(256)) * 10)
    assert {status_of(body[:n], 10_000) for n in range(1, len(body))} == {400}
    assert status_of(body + b"more", 10_000) == 400
    assert status_of(b"no zstd", 10_000) == 400
