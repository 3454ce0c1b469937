"""One process at a time writes to a run's folder, and a dead one holds nobody up."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from jaxlora import RunConfig, Trainer
from jaxlora.errors import CheckpointError, StorageError
from jaxlora.run import lock as run_lock
from jaxlora.run.lock import (
    RunLock,
    check_not_in_use,
    find_owner,
    is_in_use,
    read_owner,
)

HOLDER = """
import pathlib, sys
from jaxlora.run.lock import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
OTHER_HOST = {
    "host": "node7",
    "pid": os.getpid(),  # alive here, but that says nothing
    "user": "eve",
    "command": "jaxlora train run.yaml",
    "since": "2026-01-02T03:04:05+00:00",
}


@pytest.fixture
def held(tmp_path):
    """A folder that another process holds, and that process."""
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    yield folder, holder
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "_RETRY_SECONDS", 0.01)


def refused(folder: pathlib.Path) -> str:
    with pytest.raises(CheckpointError, match="is in use by") as error, RunLock(folder):
        pytest.fail("the lock must not be had")
    return str(error.value)


def test_a_second_process_is_told_who_is_there(held):
    folder, holder = held
    text = refused(folder)
    assert f"process {holder.pid} of " in text
    assert os.uname().nodename in text and "choose another output_dir" in text
    with pytest.raises(CheckpointError, match=f"process {holder.pid} of"):
        check_not_in_use(folder)
    (folder / "run.lock").unlink()  # by somebody who thinks that it is stale
    assert "another process; its run.lock was removed" in refused(folder)
    assert not (folder / "run.lock").exists()
    owner = find_owner(folder)
    assert owner is not None and owner.host == "?"


def test_a_killed_process_holds_nobody_up(held, caplog):
    folder, holder = held
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    owner = read_owner(folder / "run.lock")
    assert owner is not None and owner.pid == holder.pid
    with RunLock(folder):
        owner = read_owner(folder / "run.lock")
        assert owner is not None and owner.pid == os.getpid()
    assert f"taking over from process {holder.pid}" in caplog.text
    assert not (folder / "run.lock").exists()


def test_two_trainers_in_one_process(tmp_path):
    errors = []

    def second():
        errors.append(refused(tmp_path))

    with RunLock(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert f"process {os.getpid()} of" in errors[0]
    with RunLock(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"pid": 1}', "\x00", "\xff", "[" * 9999]
)
def test_what_nobody_can_read_stops_nobody(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    with RunLock(tmp_path):
        assert read_owner(tmp_path / "run.lock") is not None


def test_words_for_the_terminal_are_checked(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(OTHER_HOST | {"command": "\x1b[2J"}))
    assert read_owner(path) is None


def test_a_kernel_lock_that_is_free_ends_the_claim_of_another_host(tmp_path, caplog):
    """And where locks end at a host, an owner notices that another has taken over."""
    path = tmp_path / "run.lock"
    path.write_text(json.dumps(OTHER_HOST))
    assert find_owner(tmp_path) is None
    with RunLock(tmp_path) as lock:
        owner = read_owner(path)
        assert owner is not None and owner.pid == os.getpid()
        assert "taking over from process" in caplog.text
        lock.check()
        path.write_text(json.dumps(OTHER_HOST))
        with pytest.raises(CheckpointError, match="eve on node7"):
            lock.check()


def without_locks(is_without):
    def flock(handle, operation):
        if is_without(handle):
            raise OSError(errno.ENOLCK, "No locks available")

    return flock


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    """Without locks on folders alone, as NFS, run.lock is enough."""
    monkeypatch.setattr(run_lock.fcntl, "flock", without_locks(lambda handle: True))
    match = "No locks available.*Choose an output_dir on a file system with locks"
    with pytest.raises(StorageError, match=match):
        RunLock(tmp_path).__enter__()
    is_folder = lambda handle: stat.S_ISDIR(os.fstat(handle).st_mode)
    monkeypatch.setattr(run_lock.fcntl, "flock", without_locks(is_folder))
    with RunLock(tmp_path) as lock:
        lock.check()


def test_a_removed_lock_keeps_others_out(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / "run.lock").unlink()
        lock.check()
        assert is_in_use(tmp_path)
        assert "another process; its run.lock was removed" in refused(tmp_path)
    assert not is_in_use(tmp_path)


def test_an_error_releases_the_lock(tmp_path):
    folder = tmp_path / "deep" / "run"
    with pytest.raises(KeyboardInterrupt), RunLock(folder):
        raise KeyboardInterrupt
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(ValueError), RunLock(folder):
        raise ValueError
    assert folder.is_dir() and not any(folder.iterdir())


def test_places_that_cannot_hold_a_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StorageError, match="cannot be written: Not a directory"):
            RunLock(folder).__enter__()

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(run_lock.os, "ftruncate", read_only)
    with pytest.raises(StorageError, match="Read-only file system"):
        RunLock(tmp_path).__enter__()
    monkeypatch.undo()
    with RunLock(tmp_path):
        pass


def test_a_trainer_asks_before_it_loads_a_model(tmp_path, jobs):
    config = RunConfig(model="nowhere/at-all", output_dir=str(tmp_path), jobs=jobs[:1])
    with RunLock(tmp_path), pytest.raises(CheckpointError, match="is in use by"):
        Trainer(config)


def make_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


MAKE = {
    "pipe": os.mkfifo,
    "folder": pathlib.Path.mkdir,
    "link": lambda path: path.symlink_to("file"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_in_the_place_of_the_lock(tmp_path, jobs, kind):
    """Nobody waits for the other end of a pipe, and nothing is removed."""
    (tmp_path / "file").write_text("{}")
    path = tmp_path / "run.lock"
    MAKE[kind](path)
    before = path.lstat()
    match = r"run\.lock is not a regular file.*Move it away, or choose another output"
    with pytest.raises(CheckpointError, match=match):
        RunLock(tmp_path).__enter__()
    config = RunConfig(model="nowhere/at-all", output_dir=str(tmp_path), jobs=jobs[:1])
    with pytest.raises(CheckpointError, match=match):
        Trainer(config)
    assert not is_in_use(tmp_path) and find_owner(tmp_path) is None
    assert path.lstat() == before and (tmp_path / "file").read_text() == "{}"


def test_a_lock_that_becomes_a_pipe(tmp_path):
    """While the run is active."""
    path = tmp_path / "run.lock"
    with RunLock(tmp_path) as lock:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="is not a regular file"):
            lock.check()
    assert path.is_fifo()
