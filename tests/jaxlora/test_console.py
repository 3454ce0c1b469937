"""Texts are printed as they are, on any terminal."""

import ast
import io
import logging
import os
import pathlib
import subprocess
import sys

import pytest
import rich.progress
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from jaxlora.common import console
from jaxlora.common.console import (
    complain,
    escape_record,
    literal,
    say,
    show,
    stdout,
)
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.errors import DataError
from jaxlora.inspect import inspect_path
from jaxlora.printable import has_invisible, one_line, printable
from jaxlora.run.job_progress import JobProgress
from jaxlora.sweeps.files import print_summary
from jaxlora.train.report.summary import RunResult
from tests.jaxlora.run import made_events

NAMES = ["[qv]_proj", "[/x]", "[bold]", ":smile:", "[red]a[/red]", r"\[b]", "[0]"]
RUN_FILE = r"""
model: "[/m]:smile:"
output_dir: "runs/[bold]é→"
jobs:
  - name: a
    data: {path: "[red]x[/red].jsonl"}
    target_modules: ".*[qv]_proj"
    rank_pattern: {"[/x]": 2, ":smile:": 3}
"""


def terminal(encoding="utf-8", width=100, **options):
    """A terminal of that encoding, which raises where it cannot encode."""
    file = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True, newline="\n")
    return Console(file=file, width=width, **options)


def printed(shown_on: Console) -> str:
    return shown_on.file.buffer.getvalue().decode(shown_on.encoding)


def result(folder: str, reason: str = "") -> RunResult:
    progress = JobProgress(
        status="failed", reason=reason, step=2, first_loss=3.0, last_loss=2.0
    )
    job = made_events.result("job" * 30, progress, pathlib.Path(folder))
    return RunResult(
        jobs=(job,), output_dir=pathlib.Path("x"), interrupted=True, num_compilations=1
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_and_cells_are_printed_as_they_are(name, encoding):
    out = terminal(encoding)
    show(out, f"{name} says {name}")
    table = Table()
    table.add_column(literal(name))
    table.add_row(literal(name))
    show(out, table)
    assert printed(out).count(name) == 4


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_inspect_of_a_run_file(tmp_path, encoding):
    folder = tmp_path / "[bold]"
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(RUN_FILE, encoding="utf-8")
    out = terminal(encoding, width=300)
    inspect_path(str(path), out)
    text = printed(out)
    for name in ("[/m]:smile:", "runs/[bold]", ".*[qv]_proj", "'[/x]': 2", str(path)):
        assert name in text
    assert "[red]x[/red].jsonl" in text and "':smile:': 3" in text
    assert ("é→" if encoding == "utf-8" else r"\xe9->") in text


@pytest.mark.parametrize("width", [200, 40])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_summary(encoding, width):
    out = terminal(encoding, width)
    print_summary(result("out/[bold]é/[/x]", "loss of [/job] → :smile:"), out)
    text = printed(out)
    assert "[bold]" in text and "[/x]" in text and ":smile:" in text
    if width == 200:
        assert f"3.000 {'→' if encoding == 'utf-8' else '->'} 2.000" in text
    is_ascii = encoding != "utf-8"
    assert is_ascii == all(c < "\x80" for c in text.replace("é", ""))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bars(encoding):
    out = terminal(encoding, force_terminal=True)
    bars = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        console=out,
    )
    with bars:
        bars.add_task("[/x]", total=3, completed=1)
    assert "[/x]" in printed(out)


def test_log_lines():
    out = terminal("utf-8", force_terminal=True, color_system=None)
    logger = logging.Logger("test")
    logger.addHandler(RichHandler(console=out, show_path=False))
    logger.warning("%s", " ".join(NAMES))
    assert " ".join(NAMES) in printed(out)


def test_bars_and_log_lines_share_a_terminal_without_markup():
    with console.stderr.capture() as captured:
        console.stderr.print(" ".join(NAMES))
    assert captured.get().strip() == " ".join(NAMES)


@pytest.mark.parametrize(
    "change",
    [
        # `test_inspect_of_a_run_file` has such a terminal in this process.
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.grid),
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
    ids=["ascii", "C"],
)
def test_the_command_on_an_ascii_terminal(tmp_path, change):
    folder = tmp_path / "é→"
    folder.mkdir()
    job = LoraJob(name="a", data=DataConfig(path="é.jsonl"))
    run = RunConfig(model="é", output_dir=str(folder), jobs=(job,))
    (folder / "run.yaml").write_text(run.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "jaxlora", "inspect", str(folder / "run.yaml")]
    ended = subprocess.run(command, env=os.environ | change, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"microbatch_tokens" in ended.stdout
    assert not ended.stderr


# A terminal's title, a cleared screen, reversed and hidden text, a lone surrogate.
HOSTILE = (
    *("\x1b]0;x\x07", "\x1b[2J", "\x9b2J", "\x7f\b\r", "\0"),
    *("\u202egnp.", "\u2066", "\u200b", "\u2060", "\ufeff", "\u00ad", "\u061c"),
    *("\u2028", "\u3164", "\U000e0041", "\ud800"),
)


def log(handler: logging.Handler, *arguments: object) -> None:
    handler.addFilter(escape_record)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning(*arguments)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_control_characters_are_printed_as_escapes(hostile, capsys):
    """Whatever prints a text, the terminal gets no character that changes it."""
    name = f"a{hostile}b"
    tables, lines, rows = terminal(width=300), io.StringIO(), terminal(width=300)
    table = Table()
    table.add_column(literal(name))
    table.add_row(literal(name))
    show(tables, table)
    show(tables, f"{name} is here")
    inspected = result("out", f"paused: {name}")
    print_summary(inspected, tables)
    log(logging.StreamHandler(lines), "%s: %s", name, OSError(name))
    log(RichHandler(console=rows, show_path=False), "%s", name)
    say(name)
    complain(DataError(f"the field {name}"))
    for text in (
        printed(tables),
        lines.getvalue(),
        printed(rows),
        *capsys.readouterr(),
    ):
        assert one_line(name) in text
        assert not has_invisible(text.replace("\n", "")), text


def test_texts_of_all_scripts_are_printed_as_they_are():
    for text in ("né", "日本語", "שלום", "مرحبا", "🦙", "a\u0301", "two\nlines\tand"):
        assert printable(text) == text
    assert one_line("two\nlines") == r"two\nlines"


def test_the_lines_of_a_log_message_cannot_look_like_others():
    lines = io.StringIO()
    log(logging.StreamHandler(lines), "refused: %s", "x\n12:00:00 all is well")
    assert lines.getvalue() == "refused: x\n    12:00:00 all is well\n"


def test_tracebacks_in_the_log_are_escaped():
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.addFilter(escape_record)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.error("failed", exc_info=ValueError("\x1b[2J"))
    assert r"ValueError: \x1b[2J" in lines.getvalue()


# Modules that print data for programs, or escape it by themselves.
PRINTING = {
    "common/console.py",
    "cli/inspect.py",
    "cli/files.py",
    "cli/generate.py",
}


def test_nothing_prints_past_the_console():
    package = pathlib.Path(console.__file__).parents[1]
    links = {path.name for path in package.iterdir() if path.is_symlink()}
    found = set()
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        calls = (
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        )
        if place.parts[0] not in links and any(
            isinstance(f, ast.Name) and f.id == "print" for f in calls
        ):
            found.add(place.as_posix())
    assert found == PRINTING


@pytest.mark.parametrize("columns", [None, "20"])
def test_names_stay_whole_in_a_file(capsys, monkeypatch, columns):
    """Tables have one line for each row, without codes of a terminal."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_summary(result("a folder/" * 20))
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "failed " in line and "2/10" in line)
    assert row.split()[0] == "job" * 30
    assert "\x1b" not in "".join(lines)
    assert any(line.endswith("a folder/a folder") for line in lines)


def test_a_terminal_has_its_own_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert stdout().width == 50
