"""The folder of whole programs: what is read from it, and what never is."""

import os
import threading

import pytest

from jaxlora.programs.kept import DamagedEntryError, KeptPrograms

KEY, DATA = "a" * 64, b"a program" * 100


@pytest.fixture
def kept(tmp_path) -> KeptPrograms:
    return KeptPrograms(folder=tmp_path / "programs")


def test_an_entry_comes_back(kept):
    assert kept.read(KEY) is None
    kept.write(KEY, DATA)
    assert kept.read(KEY) == DATA
    assert kept.read("b" * 64) is None
    assert kept.path(KEY).stat().st_mode & 0o777 == 0o600
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in kept.folder.iterdir()] == [kept.path(KEY).name]


@pytest.mark.parametrize("at", [0, 5, 20, 60, 400, -1])
def test_a_damaged_entry(kept, at):
    kept.write(KEY, DATA)
    damaged = bytearray(kept.path(KEY).read_bytes())
    damaged[at] ^= 1
    kept.path(KEY).write_bytes(damaged)
    with pytest.raises(DamagedEntryError, match="damaged"):
        kept.read(KEY)


@pytest.mark.parametrize("size", [0, 10, 60, 500])
def test_a_truncated_entry(kept, size):
    kept.write(KEY, DATA)
    kept.path(KEY).write_bytes(kept.path(KEY).read_bytes()[:size])
    with pytest.raises(DamagedEntryError, match="damaged"):
        kept.read(KEY)


def test_an_entry_of_others(kept, monkeypatch):
    kept.write(KEY, DATA)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(DamagedEntryError, match=f"belongs to user {user}"):
        kept.read(KEY)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_write(kept, mode):
    kept.write(KEY, DATA)
    kept.path(KEY).chmod(mode)
    with pytest.raises(DamagedEntryError, match="other users may write"):
        kept.read(KEY)


def test_a_folder_that_others_may_write(kept, caplog):
    kept.write(KEY, DATA)
    kept.folder.chmod(0o777)
    with pytest.raises(DamagedEntryError, match="other users may write"):
        kept.read(KEY)
    kept.write("b" * 64, DATA)
    assert "a compiled program is not kept" in caplog.text
    assert not kept.path("b" * 64).exists()


def test_a_link_is_not_followed(kept, tmp_path):
    kept.write(KEY, DATA)
    kept.path(KEY).rename(tmp_path / "elsewhere")
    kept.path(KEY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedEntryError, match="not a regular file"):
        kept.read(KEY)


def test_a_folder_or_a_pipe_is_no_entry(kept):
    kept.write("b" * 64, DATA)
    kept.path(KEY).mkdir()
    with pytest.raises(DamagedEntryError):
        kept.read(KEY)
    kept.path(KEY).rmdir()
    os.mkfifo(kept.path(KEY))
    with pytest.raises(DamagedEntryError, match="not a regular file"):
        kept.read(KEY)


def test_the_entries_used_least_recently_go_first(kept):
    size = len(DATA) + 50
    small = KeptPrograms(folder=kept.folder, max_bytes=3 * size + size // 2)
    for number, key in enumerate("abc"):
        small.write(key, DATA)
        os.utime(small.path(key), (number, number))
    assert small.read("a") == DATA  # so b is the oldest now
    (kept.folder / "notes.txt").write_bytes(b"x" * 10_000)  # this is not ours
    small.write("d", DATA)
    left = {path.stem for path in kept.folder.iterdir()}
    assert left == {"a", "c", "d", "notes"}


def test_an_entry_beyond_the_bound_is_not_kept(kept):
    small = KeptPrograms(folder=kept.folder, max_bytes=10)
    small.write(KEY, DATA)
    assert small.read(KEY) is None


def test_a_full_disk_is_said(kept, monkeypatch, caplog):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    kept.write(KEY, DATA)
    assert "No space left on device" in caplog.text
    assert kept.read(KEY) is None and not list(kept.folder.iterdir())


def _write(folder, number):
    KeptPrograms(folder=folder).write(KEY, bytes([number]) * 100_000)


def test_concurrent_writers(kept):
    """Readers see an entry as a whole, whoever wrote it."""
    threads = [
        threading.Thread(target=_write, args=(kept.folder, number))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = kept.read(KEY)
        assert found is None or (len(found) == 100_000 and len(set(found)) == 1)
    assert kept.read(KEY) is not None
    assert len(list(kept.folder.iterdir())) == 1
