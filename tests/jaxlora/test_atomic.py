"""Files and folders are there whole or not at all, also after a kill."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest
import safetensors

from jaxlora.common.atomic import (
    find_complete_folder,
    new_folder,
    new_path,
    remove_leftovers,
    replace_folder,
    sync_files,
    write_text,
)
from jaxlora.errors import StorageError

KILLED = """
import os, pathlib, sys
from jaxlora.common import atomic
path = pathlib.Path(sys.argv[1])
rename = pathlib.Path.rename

def kill_before_rename(source, target):
    if target == path and sys.argv[2] == "between":
        os._exit(9)
    return rename(source, target)

pathlib.Path.rename = kill_before_rename
with atomic.replace_folder(path) as folder:
    (folder / "half").write_text("new")
    if sys.argv[2] == "inside":
        os._exit(9)
"""


def fill(path: pathlib.Path, text: str = "old") -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "file").write_text(text)
    return path


def text_in(path: pathlib.Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def replace(path: pathlib.Path, text: str = "new") -> None:
    with replace_folder(path) as folder:
        (folder / "file").write_text(text)


def fill_new(path: pathlib.Path) -> None:
    with new_folder(path) as folder:
        (folder / "file").write_text("new")


def visible(path: pathlib.Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("."))


@pytest.mark.parametrize("maker", [new_folder, replace_folder])
def test_a_folder_appears_when_it_is_whole(tmp_path, maker):
    path = tmp_path / "deep" / "down" / "out"
    with maker(path) as folder:
        (folder / "file").write_text("new")
        assert not path.exists()
    assert text_in(path) == {"file": "new"}
    assert visible(path.parent) == ["out"]
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("maker", [new_folder, replace_folder])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, maker, error):
    with pytest.raises(error), maker(tmp_path / "out") as folder:
        (folder / "file").write_text("new")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_new_folder_replaces_nothing(tmp_path):
    path = fill(tmp_path / "out")
    match = "exists already. Remove it, or choose another name"
    with pytest.raises(FileExistsError, match=match), new_folder(path):
        pytest.fail("the block must not run")
    with pytest.raises(FileExistsError, match=match), new_folder(path / "file"):
        pytest.fail("the block must not run")
    assert text_in(path) == {"file": "old"}


def test_replacing_drops_what_was_there(tmp_path):
    path = fill(tmp_path / "out")
    (path / "other").write_text("old")
    replace(path)
    assert text_in(path) == {"file": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failure_keeps_the_old_folder(tmp_path):
    path = fill(tmp_path / "out")
    with pytest.raises(RuntimeError), replace_folder(path) as folder:
        (folder / "file").write_text("new")
        raise RuntimeError
    assert text_in(path) == {"file": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_that_a_library_makes_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with new_path(path) as place:
        place.write_text("old")
        place.chmod(0o600)
        assert not path.exists()
    write_text(tmp_path / "other", "as usual")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(RuntimeError), new_path(path) as place:
        place.write_text("new")
        raise RuntimeError
    assert text_in(tmp_path) == {"file": "old", "other": "as usual"}


def kill(path: pathlib.Path, where: str) -> None:
    command = [sys.executable, "-c", KILLED, str(path), where]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 9


def test_a_kill_keeps_the_old_folder(tmp_path):
    path = fill(tmp_path / "out")
    kill(path, "inside")
    assert text_in(path) == {"file": "old"}
    assert visible(tmp_path) == ["out"]
    replace(path)
    assert text_in(path) == {"file": "new"}


def test_a_kill_between_the_renames_is_recovered(tmp_path):
    path = fill(tmp_path / "out")
    kill(path, "between")
    assert not path.exists()
    with pytest.raises(RuntimeError), replace_folder(path):
        assert text_in(path) == {"file": "old"}
        raise RuntimeError
    assert text_in(path) == {"file": "old"}


def test_a_leftover_after_both_renames_is_dropped(tmp_path):
    path = fill(tmp_path / "out")
    kill(path, "between")
    fill(path, "newer")
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError), replace_folder(path):
        raise RuntimeError
    assert text_in(path) == {"file": "newer"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("alone", [False, True])
def test_leftovers_are_put_back_or_removed(tmp_path, alone):
    """Between the renames the old folder goes back; before them, the new one goes."""
    for name, where in (("a", "between"), ("b", "inside")):
        kill(fill(tmp_path / name), where)
    assert find_complete_folder(tmp_path / "a") != tmp_path / "a"
    assert text_in(find_complete_folder(tmp_path / "a")) == {"file": "old"}
    remove_leftovers(tmp_path, alone=alone)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert text_in(tmp_path / "a") == text_in(tmp_path / "b") == {"file": "old"}


NAMES = [".out.old", ".out.0123abcd.jaxlora-tmp", ".out.old.0123abcd.jaxlora-tmp"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link", "other mark"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_name_is_no_proof(tmp_path, name, kind, is_there):
    """Only what this program has marked is removed, or taken for an old version."""
    path, mine = tmp_path / "out", tmp_path / name
    if is_there:
        fill(path)
    if kind == "file":
        mine.write_text("mine")
    elif kind == "link":
        mine.symlink_to(fill(tmp_path / "mine", "mine"))
    else:
        mine.mkdir()
        if kind != "empty":
            fill(mine / "old0", "mine")
        if kind == "other mark":
            (mine / "jaxlora.txt").write_text("my notes on jaxlora")
    before = everything(mine)
    assert find_complete_folder(path) == path
    for alone in (False, True):
        remove_leftovers(tmp_path, alone=alone)
    replace(path)
    replace(path)
    assert text_in(path) == {"file": "new"}
    assert everything(mine) == before and os.path.lexists(mine)


def everything(path: pathlib.Path) -> dict[str, str]:
    found = path.rglob("*") if path.is_dir() else [path]
    return {str(p): p.read_text() if p.is_file() else "" for p in found}


def test_two_that_replace_a_folder_at_once(tmp_path, monkeypatch):
    """Each goes through between the other's two renames; the last one stays."""
    path, rename, left = fill(tmp_path / "out"), pathlib.Path.rename, [2]

    def interrupted(source, target):
        if target == path and left[0]:
            left[0] -= 1
            replace(path, f"other {left[0]}")
        return rename(source, target)

    monkeypatch.setattr(pathlib.Path, "rename", interrupted)
    replace(path, "last")
    assert text_in(path) == {"file": "last"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    path, rename = fill(tmp_path / "out"), pathlib.Path.rename

    def failing(source, target):
        if source.name == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(source, target)

    monkeypatch.setattr(pathlib.Path, "rename", failing)
    with pytest.raises(StorageError, match="previous contents are unchanged"):
        replace(path)
    assert text_in(path) == {"file": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_that_make_a_folder_at_once(tmp_path):
    path = tmp_path / "out"
    match = "out exists already"
    with pytest.raises(FileExistsError, match=match), new_folder(path) as folder:
        (folder / "file").write_text("second")
        fill_new(path)
    assert text_in(path) == {"file": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_write_text_replaces_the_whole_file(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_text(path, "a much longer text")
    write_text(path, "short é")
    assert path.read_text(encoding="utf-8") == "short é"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_write_text_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_text(path, "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_what_the_umask_lets_them(tmp_path, monkeypatch, mask):
    before = os.umask(mask)
    try:
        # It is the whole process's, and other threads make files meanwhile.
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("umask was set"))
        compare_modes(tmp_path)
    finally:
        monkeypatch.undo()
        os.umask(before)


def compare_modes(tmp_path: pathlib.Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_text(tmp_path / "file", "")
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
    (tmp_path / "folder").mkdir()
    with replace_folder(tmp_path / "out") as folder:
        (folder / "private").touch(mode=0o600)
        sync_files(folder)
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "folder").stat().st_mode
    assert (tmp_path / "out" / "private").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize(
    "write", [lambda path: write_text(path, ""), replace, fill_new]
)
def test_names_are_on_the_disk_too(tmp_path, monkeypatch, write):
    """The rename that makes something appear is followed by a sync of its folder."""
    synced = []
    fsync = os.fsync

    def note(handle):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{handle}"))
        is_there = (tmp_path / "new" / "out").exists()
        synced.append((path, is_there))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    write(tmp_path / "new" / "out")
    assert (tmp_path, False) in synced
    assert synced[-1] == (tmp_path / "new", True)


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_only_folders_are_replaced(tmp_path, kind):
    path = tmp_path / "out"
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(fill(tmp_path / "mine") if kind == "link" else "nowhere")
    before = sorted(p.name for p in tmp_path.iterdir())
    for _ in range(2):
        with pytest.raises(StorageError, match=r"out is a (file|symbolic link), so"):
            replace(path)
    with pytest.raises(FileExistsError, match="out exists already"), new_folder(path):
        pytest.fail("the block must not run")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert path.is_symlink() or path.read_text() == "mine"


def test_leftovers_of_the_living_stay(tmp_path):
    kill(tmp_path / "dead", "inside")
    with replace_folder(tmp_path / "alive") as folder:
        (folder / "file").write_text("new")
        assert len(list(tmp_path.iterdir())) == 2
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [folder.parent]
        remove_leftovers(tmp_path / "missing")
    assert text_in(tmp_path / "alive") == {"file": "new"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_more(tmp_path, number):
    path = fill(tmp_path / "out")
    match = f"cannot be written: {os.strerror(number)}.* are unchanged. Free space"
    for maker in (replace_folder, lambda path: new_folder(path.with_name("new"))):
        for error in (
            OSError(number, os.strerror(number)),
            safetensors.SafetensorError(f"I/O error: x (os error {number})"),
        ):
            with pytest.raises(StorageError, match=match), maker(path):
                raise error
    assert text_in(path) == {"file": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_errors_of_other_files_stay_theirs(tmp_path):
    with pytest.raises(FileNotFoundError), replace_folder(tmp_path / "out"):
        (tmp_path / "source" / "model.safetensors").read_bytes()
