"""The Markdown pages of the repository, their links and their code blocks."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_HEADING = re.compile(r"^#+ (.*)$", re.M)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def pages() -> list[pathlib.Path]:
    """Returns every page that people read on a Git host or on the site."""
    rest = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    examples = (ROOT / "examples").rglob("*.md")
    return [*rest, *sorted(DOCS.rglob("*.md")), *sorted(examples)]


def code_blocks(path: pathlib.Path, language: str) -> list[str]:
    """Returns the fenced code blocks of a page that are marked with a language."""
    return [code for name, code in _FENCE.findall(path.read_text()) if name == language]


def links(path: pathlib.Path) -> list[str]:
    """Returns the targets of a page's links, without those to other hosts."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found = _LINK.findall(re.sub(r"`[^`\n]*`", "", text))
    return [target for target in found if not re.match(r"\w+:", target)]


def anchors(path: pathlib.Path) -> set[str]:
    """Returns the anchors that a Git host makes of a page's headings."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = (re.sub(r"[`*]|\]\([^)]*\)", "", t) for t in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
