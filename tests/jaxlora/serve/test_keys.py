"""Keys: only hashes are kept, and a key ends when it should."""

import contextlib
import re

import pytest
import sqlalchemy as sa

from jaxlora.errors import ConfigError
from jaxlora.serve import keys as module
from jaxlora.serve.database import Database
from jaxlora.serve.keys import REMEMBERED_SECONDS, Keys


@pytest.fixture
def database(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/serve.db")) as database:
        yield database


@pytest.fixture
def keys(database, clock):
    return Keys(database, clock=clock)


def test_a_key_stands_for_its_tenant_and_scopes(keys):
    key = keys.add("alice", ["train", "read"])
    assert re.fullmatch("tml-[0-9a-f]{16}-[0-9a-f]{64}", key)
    principal = keys.principal(key)
    assert (principal.tenant, principal.scopes) == ("alice", {"train", "read"})
    assert principal.may("train") and not principal.may("sample")
    operator = keys.principal(keys.add("ops", ["admin"]))
    assert operator.may("train") and operator.may("admin")


def test_only_the_hash_of_a_key_is_kept(keys, database):
    secret = keys.add("alice").rpartition("-")[2]
    with database.reading() as connection:
        (row,) = connection.execute(sa.select(module._KEYS)).all()
    assert secret not in repr(row) and len(row.digest) == 64
    assert secret not in repr(keys.list())


def test_what_is_not_a_key_stands_for_nobody(keys):
    key = keys.add("alice")
    last = "0" if key[-1] != "0" else "1"
    wrong = [
        "",
        "tml-",
        "tml-local",
        key[:-1],
        key[:-1] + last,
        key.upper(),
        key + "\n",
    ]
    wrong += [key.replace(key[4:20], "0" * 16), "tml-é", "\ud800", "x" * 100_000]
    assert [keys.principal(text) for text in wrong] == [None] * len(wrong)


def test_a_key_is_compared_in_constant_time(keys, monkeypatch):
    """Also one that does not exist."""
    seen = []
    compare = module.hmac.compare_digest
    monkeypatch.setattr(
        module.hmac, "compare_digest", lambda a, b: seen.append(1) or compare(a, b)
    )
    key = keys.add("alice")
    assert keys.principal(key)
    assert keys.principal(key.replace(key[4:20], "0" * 16)) is None
    assert len(seen) == 2


def test_a_key_ends_at_its_time(keys, clock):
    key = keys.add("alice", expires_in=60)
    clock.now += 59
    assert keys.principal(key)
    clock.now += 1
    assert keys.principal(key) is None


def test_a_revoked_key_ends_in_other_servers_too(keys, database, clock):
    other = Keys(database, clock=clock)
    key = keys.add("alice")
    assert keys.principal(key) and other.principal(key)
    keys.revoke(key[4:20])
    assert keys.principal(key) is None
    clock.now += REMEMBERED_SECONDS
    assert other.principal(key) is None
    assert keys.list()[0].revoked_at is not None


def test_a_rotated_key_stays_valid_for_a_while(keys, clock):
    old = keys.add("alice", ["read"], note="laptop")
    new = keys.rotate(old[4:20], grace=100)
    clock.now += 99
    assert keys.principal(old) and keys.principal(new).scopes == {"read"}
    clock.now += 1
    assert keys.principal(old) is None and keys.principal(new)
    assert [key.note for key in keys.list("alice")] == ["laptop"] * 2
    with pytest.raises(ConfigError, match="no valid key"):
        keys.rotate(old[4:20])


def test_a_rotated_key_lasts_as_long_as_the_first_one(keys, clock):
    old = keys.add("alice", expires_in=1000)
    clock.now += 900
    new = keys.rotate(old[4:20], grace=500)
    clock.now += 100
    assert keys.principal(old) is None  # it did not become longer
    clock.now += 899
    assert keys.principal(new)


@pytest.mark.parametrize(
    ("tenant", "scopes", "words"),
    [
        ("Alice", ["read"], "small letters"),
        ("../x", ["read"], "small letters"),
        ("", ["read"], "small letters"),
        ("a", [], "cannot have no scope"),
        ("a", ["write"], "cannot have write. Give some of: train, sample, read, admin"),
    ],
)
def test_keys_that_cannot_be_made(keys, tenant, scopes, words):
    with pytest.raises(ConfigError, match=words):
        keys.add(tenant, scopes)


def test_there_is_no_key_to_revoke(keys):
    with pytest.raises(ConfigError, match="there is no key 'x'"):
        keys.revoke("x")
