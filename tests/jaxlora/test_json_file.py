"""JSON that Python cannot take, or that would fail later when it is printed."""

import os

import pytest

from jaxlora.common.json_file import cut, parse_json, read_json_file, shown


@pytest.mark.parametrize("depth", [101, 990, 100_000])
def test_deep_json(depth):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = opening * depth + "1" + closing * depth
        with pytest.raises(ValueError, match="nests deeper than 100 levels"):
            parse_json(text)


def test_json_of_usual_depth():
    text = "[" * 100 + "]" * 100
    assert repr(parse_json(text)) == text
    assert parse_json("7") == 7


def test_a_number_of_thousands_of_digits():
    with pytest.raises(ValueError, match="4300 digits"):
        parse_json('{"a": ' + "1" * 5000 + "}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 5000, "..."),
        ("\ud800", r"\ud800"),
        ([[[[[[1]]]]]], "..."),
        (list(range(5000)), "..."),
        ({"a": None}, "{'a': None}"),
    ],
)
def test_values_are_cut_in_errors(value, text):
    assert text in shown(value)
    assert len(shown(value).encode("utf-8")) < 300


def test_numbers_are_cut_in_errors():
    # As parameters, pytest would print them.
    assert "..." in shown(10**4000) and len(shown(10**4000)) < 300
    assert "too long to print" in shown(10**5000)


def test_errors_of_libraries_are_cut():
    assert cut(ValueError("a" * 1000)) == "a" * 300 + "..."
    assert cut(ValueError("short")) == "short"


def test_links_to_nothing_are_not_missing_files(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json_file(path)
    path.symlink_to("nowhere.json")
    with pytest.raises(OSError, match=r"it links to nowhere\.json, which is missing"):
        read_json_file(path)


def test_pipes_and_folders_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe.json", "folder.json"):
        with pytest.raises(OSError, match="not a regular file"):
            read_json_file(tmp_path / name)
