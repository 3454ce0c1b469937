"""Files by key: whole or not there at all, never replaced, sent without copies."""

import datetime
import io
import os
import tarfile
from urllib.parse import parse_qs, unquote, urlsplit

import obstore
import pytest

from jaxlora.errors import ConfigError, StorageError
from jaxlora.serve import storage as module
from jaxlora.serve.storage import LinkError, Links, NotStored, Storage

KEY = "alice/0f:train:0/weights/first"


@pytest.fixture(params=["folder", "memory"])
def storage(request, tmp_path):
    if request.param == "folder":
        return Storage((tmp_path / "files").as_uri())
    return Storage("memory:///", cache=tmp_path / "cache")


def put(storage, key: str, files: dict[str, bytes] | bytes) -> None:
    with storage.writing(key) as path:
        if isinstance(files, bytes):
            path.write_bytes(files)
            return
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


def test_a_folder_and_a_file_come_back(storage):
    put(storage, KEY, {"a.json": b"{}", "deep/b.bin": bytes(3000)})
    put(storage, "alice/0f:train:0/weights/state", b"state")
    folder = storage.fetch(KEY)
    assert (folder / "a.json").read_bytes() == b"{}"
    assert (folder / "deep/b.bin").stat().st_size == 3000
    assert storage.fetch("alice/0f:train:0/weights/state").read_bytes() == b"state"
    assert storage.files(KEY) == {"a.json": 2, "deep/b.bin": 3000}
    assert storage.files("alice/0f:train:0/weights/state") == {"state": 5}
    assert storage.size(KEY) == 3002
    assert b"".join(storage.read(KEY, "deep/b.bin")) == bytes(3000)
    assert storage.list("alice") == {
        f"{KEY}/a.json": 2,
        f"{KEY}/deep/b.bin": 3000,
        "alice/0f:train:0/weights/state": 5,
    }
    assert storage.list("bob") == {}


def test_what_is_there_never_changes(storage):
    """Also if somebody else writes it meanwhile."""
    put(storage, KEY, {"a": b"1"})
    with pytest.raises(ConfigError, match="is there already"):
        put(storage, KEY, {"a": b"2"})
    with (
        pytest.raises(ConfigError, match="is there already"),
        storage.writing("alice/late") as path,
    ):
        path.write_bytes(b"2")
        put(storage, "alice/late", b"1")
    assert storage.fetch("alice/late").read_bytes() == b"1"
    assert storage.list("alice") == {f"{KEY}/a": 1, "alice/late": 1}


def test_what_fails_leaves_nothing(storage, tmp_path):
    with pytest.raises(KeyError), storage.writing(KEY) as path:
        path.mkdir()
        (path / "a").write_bytes(b"1")
        raise KeyError
    assert storage.list("alice") == {}
    with pytest.raises(NotStored):
        storage.fetch(KEY)
    put(storage, KEY, {"a": b"2"})
    left = [p for p in tmp_path.rglob("*") if p.name == "new"]
    assert left == []


def test_deleted_things_are_gone_and_may_come_again(storage):
    put(storage, KEY, {"a": b"1"})
    put(storage, "alice/other", b"1")
    storage.fetch(KEY)
    storage.delete("alice/0f:train:0")
    storage.delete("alice/0f:train:0")
    for ask in (storage.fetch, storage.files, storage.size, storage.signed_urls):
        with pytest.raises(NotStored, match=f"there is no {KEY}"):
            ask(*([KEY, 60] if ask == storage.signed_urls else [KEY]))
    put(storage, KEY, {"a": b"22"})
    assert (storage.fetch(KEY) / "a").read_bytes() == b"22"
    assert storage.size("alice/other") == 1


def test_no_empty_folders_are_left(tmp_path):
    storage = Storage(tmp_path / "files")
    put(storage, KEY, {"a": b"1"})
    put(storage, "alice/other", b"1")
    storage.delete(KEY)
    assert [path.name for path in (tmp_path / "files" / "alice").iterdir()] == ["other"]


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "a//b", "a/../b", ".writing/x", "a/.hidden", "a/@complete", "a/b\0"),
        *("é", "a" * 201, "a/" * 500 + "a", "a/b\n", "~/x", "-x"),
    ],
)
def test_keys_that_cannot_be(storage, key):
    for ask in (storage.fetch, storage.files, storage.list, storage.delete):
        with pytest.raises(ConfigError, match="is no key"):
            ask(key)
    with pytest.raises(ConfigError, match="is no key"), storage.writing(key):
        pass


def test_an_archive_is_sent_in_pieces(storage):
    files = {"a.json": b"{}", "deep/b.bin": os.urandom(2**21 + 7), "empty": b""}
    put(storage, KEY, files)
    length, pieces = storage.archive(KEY)
    pieces = [*pieces]
    assert max(map(len, pieces)) <= 2**21 + 512
    data = b"".join(pieces)
    assert len(data) == length
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    assert found == {f"first/{name}": content for name, content in files.items()}
    put(storage, "alice/one", b"1")
    with tarfile.open(
        fileobj=io.BytesIO(b"".join(storage.archive("alice/one")[1]))
    ) as t:
        assert t.getnames() == ["one"]
    with pytest.raises(NotStored):
        storage.archive("alice/none")
    with pytest.raises(NotStored, match="there is no 'x' in"):
        storage.read(KEY, "x")


def test_a_restart_removes_what_a_crash_left(tmp_path):
    """And nothing that is being written at the time."""
    root = tmp_path / "files"
    storage = Storage(root)
    with storage.writing("alice/kept") as path:
        path.write_bytes(b"1")
        storage.clean()
    assert storage.list("alice") == {"alice/kept": 1}
    with pytest.raises(StorageError), storage.writing(KEY) as path:
        path.mkdir()
        (path / "a").write_bytes(b"1")
        restarted = Storage(root)  # as if the process were killed here
        assert restarted.list("alice") == {"alice/kept": 1}
        restarted.clean()
        assert [*(root / ".writing").iterdir()] == []
    assert root.stat().st_mode & 0o777 == 0o700


def test_processes_share_a_folder(tmp_path):
    """None removes what another is writing, and only one gets a name."""
    root = tmp_path / "files"
    one, other = Storage(root, writer="0"), Storage(root, writer="1")
    with one.writing(KEY) as path:
        path.write_bytes(b"1")
        Storage(root, writer="1").clean()
        with (
            pytest.raises(ConfigError, match="is there already"),
            other.writing(KEY) as late,
        ):
            late.write_bytes(b"2")
            put(Storage(root, writer="2"), KEY, b"3")
        (root / KEY).unlink()
    assert one.fetch(KEY).read_bytes() == b"1"


def test_a_crash_during_an_upload_leaves_nothing_that_can_be_seen(
    tmp_path, monkeypatch
):
    """Its objects are deleted after a day, and no others."""
    storage = Storage("memory:///", cache=tmp_path)
    put(storage, KEY, {"a": b"1"})
    bucket = storage._place
    obstore.put(bucket._store, "alice/crashed/@0123/a", b"1")
    obstore.put(bucket._store, f"{KEY}/@0123/a", b"the loser of a race")
    assert storage.list("alice") == {f"{KEY}/a": 1}
    with pytest.raises(NotStored):
        storage.fetch("alice/crashed")
    storage.clean()
    assert len(bucket._objects(None)) == 4
    monkeypatch.setattr(module, "_STALE_SECONDS", -1.0)
    storage.clean()
    assert len(bucket._objects(None)) == 2
    assert (storage.fetch(KEY) / "a").read_bytes() == b"1"


def test_copies_of_objects_are_kept_up_to_a_size(tmp_path, monkeypatch):
    storage = Storage("memory:///", cache=tmp_path, cache_bytes=250)
    for name in "abc":
        put(storage, f"alice/{name}", bytes(100))
    old = storage.fetch("alice/a")
    for name in "bc":
        storage.fetch(f"alice/{name}")
    assert old.exists()  # somebody may be about to read it
    monkeypatch.setattr(module, "_FRESH_SECONDS", 0.0)
    then = datetime.datetime(2020, 1, 1).timestamp()
    os.utime(old.parent, (then, then))
    assert storage.fetch("alice/c").exists()
    assert not old.exists()
    assert storage.fetch("alice/a").stat().st_size == 100


def test_an_object_store_that_fails(tmp_path, monkeypatch):
    storage = Storage("memory:///", cache=tmp_path)

    def fail(*_, **__):
        raise obstore.exceptions.GenericError("the network is away")

    monkeypatch.setattr(obstore, "put", fail)
    with pytest.raises(StorageError, match="the network is away"):
        put(storage, KEY, b"1")
    monkeypatch.setattr(obstore, "get", fail)
    with pytest.raises(StorageError, match=f"{KEY}: the storage has failed"):
        storage.fetch(KEY)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("ftp://host/x", {}, "cannot be opened"),
        ("s3://bucket/x", {"regoin": "x"}, "cannot be opened"),
        ("file://host/x", {}, "three slashes"),
        ("no url", {}, "cannot be opened"),
    ],
)
def test_a_storage_that_cannot_be(tmp_path, url, options, words):
    with pytest.raises(ConfigError, match=words):
        Storage(url, options=options, cache=tmp_path)


def test_an_object_store_signs_addresses_itself(tmp_path, monkeypatch):
    options = {"access_key_id": "me", "secret_access_key": "s", "region": "r"}
    storage = Storage("s3://bucket/pre", options=options, cache=tmp_path)
    commit = {"folder": "@01", "is_file": False, "files": {"a.json": 2}}
    monkeypatch.setattr(storage._place, "_commit_of", lambda key: commit)
    (url,) = storage.signed_urls(KEY, 60).values()
    assert "X-Amz-Expires=60" in url and "@01/a.json" in url.replace("%40", "@")
    local = Storage(tmp_path / "files")
    put(local, KEY, {"a.json": b"{}"})
    assert local.signed_urls(KEY, 60) is None


def test_a_link_is_valid_for_a_while_and_for_one_thing(clock):
    links = Links(b"secret", clock)
    parts = urlsplit(links.path(KEY, 60, file="a b/ü.json"))
    query = {key: value[0] for key, value in parse_qs(parts.query).items()}
    assert unquote(parts.path) == f"/download/{KEY}"
    expires, signature = int(query["expires"]), query["signature"]
    links.check(KEY, query["file"], expires, signature)
    for key, file, until, text in [
        (KEY + "0", query["file"], expires, signature),
        (KEY, None, expires, signature),
        (KEY, query["file"], expires + 1, signature),
        (KEY, query["file"], expires, signature[:-1]),
        (KEY, query["file"], expires, "é\ud800"),
    ]:
        with pytest.raises(LinkError, match="damaged"):
            links.check(key, file, until, text)
    with pytest.raises(LinkError, match="damaged"):
        Links(b"another", clock).check(KEY, query["file"], expires, signature)
    clock.now += 60
    with pytest.raises(LinkError, match="expired"):
        links.check(KEY, query["file"], expires, signature)
