"""Runs the commands of a page in this process, as a reader would in a clone.

A page marks what is run: the lines of its code blocks in `bash`, one command a line. A
code block after a comment `<!-- file: NAME -->` is a file that the reader writes.
Blocks of other languages, such as `console` and `text`, are not run.
"""

import pathlib
import re
import runpy
import shlex
from collections.abc import Callable
from unittest import mock

from jaxlora.cli import main as cli
from jaxlora.cli.main import main
from jaxlora.config.run_file import load_run

_PART = re.compile(r"(?:^<!-- file: (\S+) -->\n+)?^```(\w+)\n(.*?)^```$", re.M | re.S)


def run_page(page: pathlib.Path, run: Callable[[str], None] | None = None) -> int:
    """Writes the files of a page and runs its commands; returns their number.

    Args:
        page: The page.
        run: Runs a command; None: `run_command` does.
    """
    run = run or run_command
    count = 0
    for name, language, text in _PART.findall(page.read_text(encoding="utf-8")):
        if name:
            pathlib.Path(name).write_text(text)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                run(line)
                count += 1
    return count


def run_command(line: str) -> None:
    """Runs `jaxlora ...` or `python FILE`, which must succeed.

    Of the examples, only `tiny_model.py` runs here: `test_examples.py` runs the others.
    """
    program, *arguments = shlex.split(line, comments=True)
    if program == "jaxlora":
        status = main(arguments)
        assert status == 0, f"{line}: exit status {status}"
        return
    assert program == "python" and len(arguments) == 1, line
    script = pathlib.Path(arguments[0])
    assert script.is_file(), line
    if script.parent.name != "examples" or script.name == "tiny_model.py":
        runpy.run_path(str(script), run_name="__main__")


def read_command(line: str) -> None:
    """Reads a command, its options and its run file, and runs nothing."""
    program, *arguments = shlex.split(line, comments=True)
    if program != "jaxlora":
        assert program == "python" and arguments[0].endswith(".py"), line
        return
    with mock.patch.object(cli, "_run", lambda arguments: 0):
        assert main(arguments) == 0
    for path in map(pathlib.Path, arguments):
        is_run = arguments[0] in ("plan", "train", "sweep") and path.suffix == ".yaml"
        if is_run and path.is_file():  # another command may write it
            load_run(path)
