"""Hooks of the documentation site: MkDocs calls them while it builds the pages.

The pages link to files of the repository, such as `../examples/two_jobs.yaml`, so that
the links work on a Git host. The site has copies of the examples, and here the links
are turned to the copies.
"""

import argparse
import os
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
_SUFFIXES = (".py", ".yaml", ".jsonl", ".ipynb")
_COMMAND_LINE = "<!-- command line -->"


def example_files() -> list[str]:
    """Returns the paths of the examples that the site has copies of."""
    found = (p for p in EXAMPLES.rglob("*") if p.suffix in _SUFFIXES)
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def on_files(files: Any, config: Any) -> Any:
    """Adds the examples to the files of the site."""
    for path in example_files():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to the copies, and fills in the help of the commands."""
    folder = posixpath.dirname(page.file.src_uri)
    up = posixpath.relpath("..", folder or ".")
    copies = posixpath.relpath("examples", folder or ".")
    markdown = re.sub(rf"\]\({re.escape(up)}/examples/", f"]({copies}/", markdown)
    if _COMMAND_LINE in markdown:
        markdown = markdown.replace(_COMMAND_LINE, command_line())
    return markdown


def command_line() -> str:
    """Returns the help of every command, as Markdown."""
    from jaxlora.cli.main import _parser

    os.environ["COLUMNS"] = "88"
    parser = _parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parts = [("jaxlora", parser), *commands.choices.items()]
    return "\n\n".join(
        f"## {name}\n\n```text\n{sub.format_help().rstrip()}\n```"
        for name, sub in parts
    )
