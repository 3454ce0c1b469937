"""The rows of the mesh benchmark, and tables of them.

Rows have different columns; `kind` says which:

- `compile`: seconds to make the weights and to compile, peak memory.
- `pass`: one pass of a stage on its own.
- `fit`: the error of the cost model that was fitted to these passes.
- `step`: one tick and its optimizer step, without a pipeline.
- `kinds`, `kernel`: milliseconds of its kernels on the first device, in a profile.
- `routes`: tokens that choose another expert in a layer than on the first mesh.
- `stream`: all samples of a kind of jobs, packed by a share of padding.
- `window`: all samples of some jobs.
- `skipped`: a part that could not be measured, and the reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.kernel_times import KINDS
from scripts.bench.mesh.cases import Case
from scripts.bench.report import Row, Rows, sections, table
from scripts.bench.shapes import config_json


def results(folder: Path | None) -> Rows:
    """Returns the rows of mesh.jsonl, with tables of all of them in mesh.md."""
    return Rows(folder, "mesh", tables)


def skipped(case: Case, part: str, reason: str) -> dict[str, Any]:
    """Returns a row that says why a part of a case was not measured."""
    return columns_of(case, "skipped") | {"part": part, "reason": reason}


def columns_of(case: Case, kind: str) -> dict[str, Any]:
    """Returns the columns that every row of a case has."""
    return {
        "kind": kind,
        "model": case.model,
        "layers": config_json(case.model, case.layers)["num_hidden_layers"],
        "capacity": case.microbatch_tokens,
        "mesh": case.mesh,
        "gpus": case.sizes.num_devices,
    }


# The columns of each kind's table.
_COLUMNS = {
    "window": (
        "mesh", "adapters", "ticks", "no_ops", "tokens", "seconds",
        "tokens_per_second_gpu", "of_one_gpu", "peak_percent", "bubble_percent",
        "simulated_bubble_percent",
    ),
    "stream": (
        "mesh", "jobs", "padding_share", "ticks", "no_ops", "seconds", "speed",
        "simulated_seconds", "simulated_speed", "predicted_seconds", "predicted_speed",
        "bubble_percent", "simulated_bubble_percent",
    ),
    "step": (
        "mesh", "adapters", "step_ms", "p10_ms", "p90_ms", "over_one_gpu",
        "exchange_percent", "exposed_percent", "argument_gib", "temp_gib", "peak_gib",
    ),
    "kinds": ("mesh", "step_ms", *KINDS),
    "kernel": ("mesh", "name", "count", "ms"),
    "routes": ("mesh", "first_mesh", "tokens", "changed_by_layer"),
    "pass": ("mesh", "pass", "tokens", "squares", "ms"),
    "fit": ("mesh", "mape_percent", "fixed_share"),
    "compile": (
        "mesh", "borders", "weights_seconds", "compile_seconds", "peak_gib"
    ),
    "skipped": ("mesh", "part", "reason"),
}  # fmt: skip


def tables(rows: Sequence[Row]) -> str:
    """Formats all rows, and the ratios between them."""
    parts = []
    for key in dict.fromkeys(_workload(row) for row in rows):
        own = [row for row in rows if _workload(row) == key]
        found = {kind: [r for r in own if r["kind"] == kind] for kind in _COLUMNS}
        speed = "tokens_per_second_gpu"
        found["window"] = _over_one_gpu(found["window"], speed, "of_one_gpu")
        found["stream"] = [_over_full(row, found["stream"]) for row in found["stream"]]
        found["step"] = _over_one_gpu(found["step"], "step_ms", "over_one_gpu")
        made = sections({k: table(r, _COLUMNS[k]) for k, r in found.items()})
        model, layers, capacity = key
        parts.append(
            f"## {model}, {layers} layers, {capacity} tokens a microbatch\n\n{made}"
        )
    return "\n\n".join(parts)


def _over_full(row: Row, rows: Sequence[Row]) -> Row:
    """Adds the speed over the stream that takes padding for tokens."""
    alike = [r for r in rows if (r["mesh"], r["jobs"]) == (row["mesh"], row["jobs"])]
    full = next(r for r in alike if r["padding_share"] == 1)
    speeds = {}
    for name in ("", "simulated_", "predicted_"):
        if row.get(f"{name}seconds"):
            speed = full[f"{name}seconds"] / row[f"{name}seconds"]
            speeds[f"{name}speed"] = f"{speed:.3f}"
    return {**row, **speeds}


def _workload(row: Row) -> tuple[str, Any, int]:
    return row["model"], row["layers"], row["capacity"]


def _over_one_gpu(rows: Sequence[Row], key: str, ratio: str) -> list[Row]:
    """Adds the ratio of a column to that of one device, if that was measured.

    That device has as many adapters, or else those that it was measured with.
    """
    alone = {row["adapters"]: row[key] for row in rows if row["gpus"] == 1}
    if not alone:
        return list(rows)
    base = lambda row: alone.get(row["adapters"]) or next(iter(alone.values()))
    return [{**row, ratio: f"{row[key] / base(row):.3f}"} for row in rows]
