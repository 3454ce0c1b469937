"""Hooks of the documentation site: MkDocs calls them while it builds the pages.

The pages link to the examples as they lie in the repository, `../examples/sweep.py`, so
that the links work on a Git host. The site has copies of them in a folder of its root,
and here the links are turned to these.
"""

import argparse
import functools
import pathlib
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
_SUFFIXES = (".md", ".py", ".yaml", ".jsonl", ".ipynb")
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
    """Turns links to places on the site, and fills in the commands.

    The log is left out of the search.
    """
    folder = pathlib.PurePosixPath(page.file.src_uri).parent
    if folder.parts[:1] == ("log",):
        page.meta["search"] = {"exclude": True}
    up = "../" * len(folder.parts)
    if folder.parts[:1] == ("examples",):
        markdown = markdown.replace(f"]({up}docs/", f"]({up}")
    markdown = markdown.replace(f"](../{up}examples/", f"]({up}examples/")
    if _COMMAND_LINE in markdown:
        markdown = markdown.replace(_COMMAND_LINE, command_line())
    return markdown


def command_line() -> str:
    """Returns the help of every command, as Markdown."""
    from jaxlora.cli.main import _parser

    parser = _parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parts = [("jaxlora", parser), *commands.choices.items()]
    return "\n\n".join(f"## {name}\n\n{_help(sub)}" for name, sub in parts)


def _help(parser: Any) -> str:
    """Returns a command's help at a width that does not depend on the terminal."""
    parser.formatter_class = functools.partial(parser.formatter_class, width=88)
    return f"```text\n{parser.format_help().rstrip()}\n```"
