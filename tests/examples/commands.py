"""Runs the commands of a page in this process, as a reader would in a clone.

A page marks what is run: the lines of its code blocks in `bash`, one command a line. A
code block after a comment `<!-- file: NAME -->` is a file that the reader writes.
Blocks of other languages, such as `console` and `text`, are not run.
"""

import pathlib
import re
import runpy
import shlex

from jaxlora.cli.main import main

_PART = re.compile(r"(?:^<!-- file: (\S+) -->\n+)?^```(\w+)\n(.*?)^```$", re.M | re.S)


def run_page(page: pathlib.Path) -> int:
    """Writes the files of a page and runs its commands; returns their number."""
    count = 0
    for name, language, text in _PART.findall(page.read_text(encoding="utf-8")):
        if name:
            pathlib.Path(name).write_text(text)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                run_command(line)
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
