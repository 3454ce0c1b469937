"""The rows of the mesh benchmark, and tables of them.

Rows have different columns; `kind` says which:

- `compile`: seconds to make the weights and to compile, peak memory.
- `pass`: one pass of a stage on its own.
- `fit`: the error of the cost model that was fitted to these passes.
- `step`: one tick and its optimizer step, without a pipeline.
- `window`: all samples of some jobs.
- `skipped`: a part that could not be measured, and the reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlora.bench.mesh.cases import Case
from jaxlora.bench.report import Row, Rows, sections, table
from jaxlora.bench.shapes import config_json


class Results(Rows):
    """Rows in mesh.jsonl, and tables of all of them in mesh.md."""

    def __init__(self, folder: Path | None):
        """Starts with the rows of the folder; without one, nothing is written."""
        super().__init__(folder, "mesh", tables)

    def skip(self, case: Case, part: str, reason: str) -> None:
        """Adds a row that says why a part of a case was not measured."""
        self.add(columns_of(case, "skipped") | {"part": part, "reason": reason})


def columns_of(case: Case, kind: str) -> dict[str, Any]:
    """Returns the columns that every row of a case has."""
    return {
        "kind": kind,
        "model": case.model,
        "layers": config_json(case.model, case.num_layers)["num_hidden_layers"],
        "capacity": case.capacity,
        "mesh": case.mesh,
        "gpus": case.sizes.num_devices,
    }


# The columns of each kind's table.
_COLUMNS = {
    "window": (
        "mesh", "adapters", "in_flight", "order", "ticks", "no_ops", "tokens",
        "seconds", "tokens_per_second_gpu", "of_one_gpu", "over_together",
        "peak_percent", "bubble_percent", "simulated_bubble_percent",
    ),
    "step": (
        "mesh", "adapters", "step_ms", "p10_ms", "p90_ms", "over_one_gpu",
        "argument_gib", "temp_gib", "peak_gib",
    ),
    "pass": ("mesh", "pass", "tokens", "squares", "ms"),
    "fit": ("mesh", "mape_percent"),
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
        found["window"] = _with_ratios(found["window"])
        found["step"] = _over_one_gpu(found["step"])
        made = sections({k: table(r, _COLUMNS[k]) for k, r in found.items()})
        model, layers, capacity = key
        parts.append(
            f"## {model}, {layers} layers, {capacity} tokens a microbatch\n\n{made}"
        )
    return "\n\n".join(parts)


def _workload(row: Row) -> tuple[str, Any, int]:
    return row["model"], row["layers"], row["capacity"]


def _over_one_gpu(steps: Sequence[Row]) -> list[Row]:
    """Adds the time over that of one device, if that was measured."""
    alone = next((row for row in steps if row["gpus"] == 1), None)
    if alone is None:
        return list(steps)
    ratio = lambda row: _ratio(row["step_ms"], alone["step_ms"])
    return [{**row, "over_one_gpu": ratio(row)} for row in steps]


def _with_ratios(windows: Sequence[Row]) -> list[Row]:
    """Adds ratios to windows.

    - `of_one_gpu`: the throughput of all jobs together over that on one device with as
      many adapters, if that was measured, and otherwise with those that were.
    - `over_together`: the time over the best time of the same samples together.
    """
    together = [row for row in windows if row["order"] == "together"]
    alone = {
        r["adapters"]: r["tokens_per_second_gpu"] for r in together if r["gpus"] == 1
    }
    same = lambda row: tuple(row[k] for k in ("gpus", "adapters", "tokens"))
    out: list[Row] = []
    for row in windows:
        new = dict(row)
        base = alone.get(row["adapters"]) or next(iter(alone.values()), None)
        best = [r["seconds"] for r in together if same(r) == same(row)]
        if row["order"] != "together" and row["gpus"] > 1 and best:
            new["over_together"] = _ratio(row["seconds"], min(best))
        elif row["order"] == "together" and base:
            new["of_one_gpu"] = _ratio(row["tokens_per_second_gpu"], base)
        out.append(new)
    return out


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.3f}"
