"""No command replaces a file that it reads, whatever name the file is given by."""

import os

import pytest

from jaxlora.cli.outputs import check_output
from jaxlora.errors import StorageError


@pytest.fixture
def inputs(tmp_path):
    """Makes a file and a folder that a command reads, and links to them."""
    (tmp_path / "in.jsonl").write_text("x")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "sub" / "part.bin").write_text("x")
    (tmp_path / "soft").symlink_to("in.jsonl")
    (tmp_path / "softer").symlink_to("soft")
    (tmp_path / "folder").symlink_to("model")
    os.link(tmp_path / "in.jsonl", tmp_path / "hard")
    os.link(tmp_path / "model" / "sub" / "part.bin", tmp_path / "part")
    return [tmp_path / "in.jsonl", None, "owner/name", tmp_path / "folder"]


@pytest.mark.parametrize(
    "name",
    [
        "in.jsonl",
        "./model/../in.jsonl",
        "soft",
        "softer",
        "hard",
        "model/sub/part.bin",
        "folder/sub/part.bin",
        "part",
    ],
)
def test_an_output_that_is_read_is_refused(inputs, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name):
        with pytest.raises(StorageError, match="would be replaced, and it is read as"):
            check_output(path, inputs)


def test_other_outputs_are_not_refused(inputs, tmp_path):
    (tmp_path / "old.jsonl").write_text("x")
    (tmp_path / "gone").symlink_to("nothing")
    for name in ("new.jsonl", "old.jsonl", "gone", "no/such/folder", "model/new"):
        check_output(tmp_path / name, inputs)


def test_an_output_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(StorageError, match="is not a regular file, so it is not"):
            check_output(path, [])
