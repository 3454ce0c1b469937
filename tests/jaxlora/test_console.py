"""Texts are printed as they are, on any terminal."""

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

from jaxlora import console
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.console import literal, show
from jaxlora.inspect import inspect_path
from jaxlora.run.job_progress import JobProgress
from jaxlora.train.report import JobResult, RunResult, print_summary

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
    job = JobResult(
        name="job" * 30,
        rank=2,
        num_modules=1,
        num_steps=2,
        progress=progress,
        folder=pathlib.Path(folder),
    )
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


def test_the_command_on_an_ascii_terminal(tmp_path):
    folder = tmp_path / "é→"
    folder.mkdir()
    job = LoraJob(name="a", data=DataConfig(path="é.jsonl"))
    run = RunConfig(model="é", output_dir=str(folder), jobs=(job,))
    (folder / "run.yaml").write_text(run.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "jaxlora", "inspect", str(folder / "run.yaml")]
    for change in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        ended = subprocess.run(command, env=os.environ | change, capture_output=True)
        assert ended.returncode == 0, ended.stderr.decode()
        assert b"microbatch_tokens" in ended.stdout
    assert not ended.stderr
