"""The shared parts of benchmarks: options, timing, columns of every row, tables."""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlora.errors import JaxloraError
from scripts.bench.shapes import ANY_DEVICE

PACKAGES = ("jax", "torch", "transformers", "peft")
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Quantiles of a function's time, in the unit of the times they come from."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(times: Sequence[float]) -> "Timing":
        """Computes the quantiles of repeated measurements."""
        return Timing(*np.quantile(times, [0.5, 0.1, 0.9]).tolist())

    def columns(self, name: str, digits: int) -> dict[str, float]:
        """Returns columns of a row.

        Args:
            name: The median's column. Its last word is the unit, as in `step_ms`.
            digits: Digits after the decimal point.
        """
        unit = name.rpartition("_")[2]
        names = (name, f"p10_{unit}", f"p90_{unit}")
        numbers = (self.median, self.p10, self.p90)
        return {n: round(t, digits) for n, t in zip(names, numbers, strict=True)}


def needs_gpu(model: str, has_gpu: bool) -> str | None:
    """Returns why a model cannot be timed on this device, or None if it can."""
    if has_gpu or model in ANY_DEVICE:
        return None
    small = " or ".join(map(repr, ANY_DEVICE))
    return f"{model} needs a GPU, and there is none here; choose the model {small}"


def require_gpu(subject: str) -> None:
    """Raises an error without a GPU.

    Raises:
        JaxloraError: JAX has no GPU here.
    """
    import jax  # the scheduler's benchmark needs none

    backend = jax.default_backend()
    if backend != "gpu":
        raise JaxloraError(
            f"the benchmark {subject!r} measures a GPU, and JAX's backend here is "
            f"{backend!r}: run it on a machine with an NVIDIA GPU and jax[cuda13]."
        )


def devices() -> tuple[int, str, str]:
    """Returns the number of devices, JAX's back end, and the kind of the first device.

    A process of its own asks, as this one would keep memory of the devices.

    Raises:
        JaxloraError: JAX does not start here.
    """
    ask = (
        "import jax; d = jax.devices(); print(len(d), d[0].platform, d[0].device_kind)"
    )
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise JaxloraError("JAX does not start here.")
    number, backend, kind = done.stdout.splitlines()[-1].split(maxsplit=2)
    return int(number), backend, kind


@functools.cache
def commit() -> str:
    """Returns the commit that this file is checked out from, or `unknown`."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    # An installed copy may lie inside the repository of another project.
    is_tracked = shutil.which("git") is not None and git("ls-files", here.name)
    return (git("rev-parse", "--short", "HEAD") if is_tracked else "") or "unknown"


def versions(packages: Sequence[str] = PACKAGES) -> str:
    """Returns the versions of those of the packages that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def about(device: str) -> dict[str, str]:
    """Returns the last columns of every row: commit, device, versions, date."""
    return {
        "commit": commit(),
        "device": device,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


class Rows:
    """The rows of a benchmark, printed and written as soon as they are measured.

    They go to SUBJECT.jsonl, as a line of JSON each, and tables of all of them to
    SUBJECT.md. Several processes may use a folder one after the other.
    """

    def __init__(
        self, folder: Path | None, subject: str, tables: Callable[[Sequence[Row]], str]
    ):
        """Starts with the rows of the folder; without one, nothing is written."""
        self.folder, self._subject, self._tables = folder, subject, tables
        self.rows: list[Row] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path(folder).exists():
                lines = self._path(folder).read_text().splitlines()
                self.rows = [json.loads(line) for line in lines]

    def _path(self, folder: Path) -> Path:
        return folder / f"{self._subject}.jsonl"

    def add(self, row: Row) -> None:
        """Prints a row and writes it to the disk, and the tables with it."""
        line = json.dumps(row)
        self.rows.append(json.loads(line))
        print(line, flush=True)
        if self.folder is None:
            return
        with self._path(self.folder).open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        (self.folder / f"{self._subject}.md").write_text(self.tables() + "\n")

    def tables(self) -> str:
        """Formats tables of all rows in Markdown."""
        return self._tables(self.rows)


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Formats a table; None is an empty cell."""
    shown = [["" if c is None else str(c) for c in line] for line in (head, *lines)]
    shown.insert(1, ["---"] * len(head))
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Formats rows as a table, with a line each.

    Args:
        rows: The rows. A key that a row lacks is an empty cell.
        columns: Keys of the columns, by default those of the first row.

    Returns:
        The table in Markdown; "" without rows.
    """
    if not rows:
        return ""
    columns = columns or list(rows[0])
    return markdown(columns, [[row.get(key) for key in columns] for row in rows])


def pivot(rows: Sequence[Row], index: Sequence[str], column: str, value: str) -> str:
    """Formats rows as a table with a column for each value of `column`.

    Args:
        rows: The rows. Of those that share a cell, the last one counts.
        index: Keys whose values make the lines.
        column: Key whose values are headings.
        value: Key of the cells.

    Returns:
        The table in Markdown; "" without rows.
    """
    if not rows:
        return ""
    name = lambda row: tuple(row[key] for key in index)
    cells = {(name(row), row[column]): row.get(value) for row in rows}
    heads = list(dict.fromkeys(row[column] for row in rows))
    lines = [
        [*line, *(cells.get((line, head)) for head in heads)]
        for line in dict.fromkeys(map(name, rows))
    ]
    return markdown([*index, *map(str, heads)], lines)


def sections(tables: Mapping[str, str]) -> str:
    """Joins the tables that have lines, each under its title."""
    return "\n\n".join(f"### {name}\n\n{made}" for name, made in tables.items() if made)


def titled_tables(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Formats the rows of each table, which have its name as `table`."""
    hidden = {"table", "commit", "device", "versions", "date"}
    out = {}
    for name in names:
        of = [row for row in rows if row["table"] == name]
        out[name] = table(of, [key for key in (of or [{}])[0] if key not in hidden])
    return sections(out)


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option that asks for files."""
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder for all rows as JSON lines, and for tables in Markdown; without "
        "it, nothing is written",
        metavar="DIR",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a training step, apart from its model and its batch."""
    parser.add_argument("--layers", type=int, help="replaces the models' own number")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--longest-tokens", type=int, default=2048, help="in a sample")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--attention", choices=["auto", "cudnn", "triton", "xla"], default="auto"
    )


def shared_fields(case: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that are fields of a dataclass; lists become tuples."""
    names = {field.name for field in dataclasses.fields(case)} & vars(options).keys()
    found = {name: getattr(options, name) for name in names}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
