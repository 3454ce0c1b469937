"""What benchmarks share: device time, quantiles, and what a table says of itself."""

import csv
import dataclasses
import datetime
import importlib.metadata
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

PACKAGES = ("jax", "torch", "transformers", "peft", "flash_attn")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Quantiles of a function's time, in the unit of what they were made from."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(times: Sequence[float]) -> "Timing":
        return Timing(*np.quantile(times, [0.5, 0.1, 0.9]).tolist())


def device_times(run: Callable, *args: object, repeats: int) -> list[float]:
    """Microseconds of each call: the sum of its kernels, as CUPTI counts them."""
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.Cupti(finalize=False).measure(run, iterations=repeats)(*args)
    assert found is not None, "CUPTI saw no kernel"
    # Of a single call it is a number.
    return [1000 * t for t in (found if isinstance(found, list) else [found])]


def commit() -> str:
    """The commit that is timed, or `unknown` outside a checkout."""
    out = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return out.stdout.strip() or "unknown"


def versions() -> str:
    """Of what may be timed, as installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def about(device: str) -> dict[str, str]:
    """The columns that end every row."""
    return {
        "commit": commit(),
        "device": device,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows with the columns of all of them, empty where a row has none."""
    rows = list(rows)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
