"""The rows of the mesh benchmark, which are on the disk as soon as they are measured.

Rows have different columns; `kind` says which:

- `compile`: seconds to make the weights and to compile, peak memory.
- `pass`: one pass of a stage on its own.
- `fit`: the error of the cost model that was fitted to these passes.
- `step`: one tick and its optimizer step, without a pipeline.
- `window`: all samples of some jobs.
- `timeline`: a profiled window.
- `skipped`: a part that could not be measured, and the reason.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlora.bench.mesh.cases import Case
from jaxlora.bench.report import markdown
from jaxlora.bench.shapes import config_json

Row = Mapping[str, Any]


class Results:
    """Rows in a file of JSON lines, and tables of all of them in a second file.

    Several processes may use a folder one after the other.
    """

    def __init__(self, folder: Path | None):
        """Starts with the rows of the folder; without one, nothing is written."""
        self.folder = folder
        self.rows: list[Row] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                lines = self._path.read_text().splitlines()
                self.rows = [json.loads(line) for line in lines]

    @property
    def _path(self) -> Path:
        assert self.folder is not None
        return self.folder / "mesh.jsonl"

    def skip(self, case: Case, part: str, reason: str) -> None:
        """Adds a row that says why a part of a case was not measured."""
        self.add(columns_of(case, "skipped") | {"part": part, "reason": reason})

    def add(self, row: Row) -> None:
        """Prints a row and writes it to the disk, and the tables with it."""
        line = json.dumps(row)
        self.rows.append(json.loads(line))
        print(line, flush=True)
        if self.folder is None:
            return
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        (self.folder / "mesh.md").write_text(tables(self.rows) + "\n")


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


def tables(rows: Sequence[Row]) -> str:
    """Formats all rows, and the ratios between them."""
    parts = []
    for key in dict.fromkeys(_workload(row) for row in rows):
        own = [row for row in rows if _workload(row) == key]
        parts.append(f"## {key[0]}, {key[1]} layers, {key[2]} tokens a microbatch")
        for title, table in (
            ("Pipelines", _pipelines(own)),
            ("Steps without a pipeline", _steps(own)),
            ("Throughput", _throughput(own)),
            ("The same samples in other orders", _orders(own)),
            ("Profiled windows", _timelines(own)),
            ("Passes", _passes(own)),
            ("Cost models of the passes", _fits(own)),
            ("Weights, compilation and memory", _compiled(own)),
            ("Not measured", _skipped(own)),
        ):
            if table:
                parts.append(f"### {title}\n\n{table}")
    return "\n\n".join(parts)


def _workload(row: Row) -> tuple[str, Any, int]:
    return row["model"], row["layers"], row["capacity"]


def _table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return markdown(head, lines) if lines else ""


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _pipelines(rows: Sequence[Row]) -> str:
    """Returns the bubbles of all pipelines."""
    head = (
        "mesh", "adapters", "in flight", "order", "ticks", "of them no-ops", "seconds",
        "bubble, %", "simulated, %", "difference, points",
    )  # fmt: skip
    lines = [
        [
            row["mesh"],
            row["adapters"],
            row["in_flight"],
            row["order"],
            row["ticks"],
            row["no_ops"],
            row["seconds"],
            row["bubble_percent"],
            row["simulated_bubble_percent"],
            round(row["bubble_percent"] - row["simulated_bubble_percent"], 2),
        ]
        for row in _of_kind(rows, "window")
        if "bubble_percent" in row
    ]
    return _table(head, lines)


def _steps(rows: Sequence[Row]) -> str:
    """Returns the steps without a pipeline, and their ratios to one device."""
    steps = _of_kind(rows, "step")
    alone = next((row for row in steps if row["gpus"] == 1), None)
    head = (
        "mesh", "adapters", "ms", "p10", "p90", "over one GPU", "arguments, GiB",
        "temporaries, GiB", "peak, GiB",
    )  # fmt: skip
    lines = [
        [
            row["mesh"],
            row["adapters"],
            row["step_ms"],
            row["p10_ms"],
            row["p90_ms"],
            "" if alone is None else f"{row['step_ms'] / alone['step_ms']:.3f}",
            row["argument_gib"],
            row["temp_gib"],
            _blank(row["peak_gib"]),
        ]
        for row in steps
    ]
    return _table(head, lines)


def _throughput(rows: Sequence[Row]) -> str:
    """Returns the tokens per second of jobs together, and their ratios to one device.

    A ratio is to the same number of adapters on one device, if that was measured, and
    otherwise to the number that was.
    """
    together = [r for r in _of_kind(rows, "window") if r["order"] == "together"]
    alone = {
        r["adapters"]: r["tokens_per_second_gpu"] for r in together if r["gpus"] == 1
    }
    lines = []
    for row in together:
        own = row["tokens_per_second_gpu"]
        base = alone.get(row["adapters"]) or next(iter(alone.values()), None)
        ratio = "" if base is None else f"{own / base:.3f}"
        name = row["mesh"], row["adapters"], row["in_flight"]
        times = row["tokens"], row["seconds"], own, ratio
        lines.append([*name, *times, _blank(row["peak_percent"])])
    head = ("mesh", "adapters", "in flight", "tokens", "seconds", "tokens/s a GPU")
    return _table((*head, "of one GPU", "of peak FLOP/s, %"), lines)


def _orders(rows: Sequence[Row]) -> str:
    """Compares orders of the same samples with the best time of all jobs together."""
    found = [row for row in _of_kind(rows, "window") if row["gpus"] > 1]
    lines = []
    for row in found:
        same = [
            other["seconds"]
            for other in found
            if other["order"] == "together"
            and all(other[k] == row[k] for k in ("gpus", "adapters", "tokens"))
        ]
        has_other = row["order"] != "together"
        if same and has_other:
            name = row["order"], row["mesh"], row["adapters"]
            ratio = f"{row['seconds'] / min(same):.2f}"
            lines.append([*name, row["seconds"], min(same), ratio])
    head = ("order", "mesh", "adapters", "seconds", "best together, seconds", "ratio")
    return _table(head, lines)


def _timelines(rows: Sequence[Row]) -> str:
    head = ("mesh", "adapters", "ticks", "seconds", "bubble, %", "simulated, %")
    keys = (
        "mesh", "adapters", "ticks", "seconds", "bubble_percent",
        "simulated_bubble_percent",
    )  # fmt: skip
    return _table(head, [[r[k] for k in keys] for r in _of_kind(rows, "timeline")])


def _passes(rows: Sequence[Row]) -> str:
    head = ("mesh", "pass", "tokens", "sum of squared lengths", "ms")
    keys = ("mesh", "pass", "tokens", "squares", "ms")
    return _table(head, [[r[k] for k in keys] for r in _of_kind(rows, "pass")])


def _fits(rows: Sequence[Row]) -> str:
    head = ("mesh", "largest mean error of a pass, %")
    return _table(head, [[r["mesh"], r["mape_percent"]] for r in _of_kind(rows, "fit")])


def _compiled(rows: Sequence[Row]) -> str:
    head = ("mesh", "borders of stages", "weights, s", "compiling, s", "peak, GiB")
    keys = ("mesh", "borders", "weights_seconds", "compile_seconds", "peak_gib")
    lines = [[_blank(r[k]) for k in keys] for r in _of_kind(rows, "compile")]
    return _table(head, lines)


def _skipped(rows: Sequence[Row]) -> str:
    head = ("mesh", "part", "reason")
    return _table(head, [[r[k] for k in head] for r in _of_kind(rows, "skipped")])


def _blank(value: object) -> object:
    return "" if value is None else value
