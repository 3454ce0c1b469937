"""docs/extend.md names files that exist, and at most six of them for a change."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
# A path in backticks, unless it is marked as a file to add.
PATH = re.compile(r"`([\w./-]+\.(?:py|md))`(?! \(new\))")


def test_every_file_exists():
    paths = PATH.findall(TEXT)
    assert len(paths) > 30
    missing = [path for path in paths if not (ROOT / path).is_file()]
    assert not missing, f"correct docs/extend.md: {missing}"


def test_no_change_takes_more_than_six_source_files():
    tables = re.findall(
        r"^\| file \| change \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.M
    )
    assert len(tables) == 8
    assert all(len(table.splitlines()) <= 6 for table in tables)
