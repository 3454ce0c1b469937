"""Helpers that benchmarks share: timing, the columns of every row, and tables."""

import csv
import dataclasses
import datetime
import functools
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlora.bench.shapes import ANY_DEVICE
from jaxlora.errors import JaxloraError

PACKAGES = ("jax", "torch", "transformers", "peft", "flash_attn")


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


def device_times(run: Callable, *args: object, repeats: int) -> list[float]:
    """Measures the device time of each call, in microseconds.

    It is the sum of the call's kernels as CUPTI counts them.
    """
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.Cupti(finalize=False).measure(run, iterations=repeats)(*args)
    assert found is not None, "CUPTI saw no kernel"
    # CUPTI returns a number, not a list, for a single call.
    return [1000 * t for t in (found if isinstance(found, list) else [found])]


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
    import jax  # the scheduler's benchmarks need none

    backend = jax.default_backend()
    if backend != "gpu":
        raise JaxloraError(
            f"`jaxlora bench {subject}` measures a GPU, and JAX's backend here is "
            f"{backend!r}: run it on a machine with an NVIDIA GPU and jax[cuda13]."
        )


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


def versions() -> str:
    """Returns the installed versions of the packages that may be timed."""
    found = []
    for name in PACKAGES:
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


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows with the columns of all rows; a missing value is left empty."""
    rows = list(rows)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a table for the documentation."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def dicts_table(
    rows: Sequence[Mapping[str, object]], fields: Sequence[str] | None = None
) -> str:
    """Formats dictionaries with the same keys as a table.

    Args:
        rows: At least one row.
        fields: The columns, by default all keys of the first row.
    """
    fields = list(rows[0]) if fields is None else fields
    return markdown(fields, [[row[f] for f in fields] for row in rows])


# Colours that people with any colour vision tell apart (Okabe and Ito), and marks and
# hatches that tell lines and bars apart without colours.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
MARKS = "osD^vPX"
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++")


def device_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the devices of rows, for a title."""
    return " and ".join(dict.fromkeys(str(row["device"]) for row in rows))
