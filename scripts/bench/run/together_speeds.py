"""Tables of the benchmark `together`, and the speeds that follow from its rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scripts.bench.report import Row, sections, table


def tables(rows: Sequence[Row]) -> str:
    """Formats the rows, and the speeds that follow from them."""
    hidden = {"commit", "device", "versions", "date", "batches"}
    runs = [row for row in rows if row["row"] != "kernels"]
    shown = [key for row in runs for key in row if key not in hidden]
    kernels = [row for row in rows if row["row"] == "kernels"]
    made = {"runs": table(runs, list(dict.fromkeys(shown)))}
    for model in dict.fromkeys(row["model"] for row in runs):
        found = {row["row"]: row for row in runs if row["model"] == model}
        made[f"speed of {model}"] = table(list(speeds(found)))
    made["kernels in one call"] = table(
        kernels, [key for key in (kernels or [{}])[0] if key not in hidden | {"row"}]
    )
    return sections(made)


def speeds(found: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
    """Yields speeds of the sweep over others, and of packed configurations."""
    sweep, halving = found.get("sweep"), found.get("halving")
    alone = {
        int(name.rpartition(" ")[2]): row["seconds"]
        for name, row in sorted(found.items())
        if name.startswith("alone")
    }
    for row in (sweep, halving):
        if row is None:
            continue
        batches = {int(size): count for size, count in row["batches"].items()}
        if len(alone) > 1:
            each = np.interp(list(batches), list(alone), list(alone.values()))
            total = float(np.dot(list(batches.values()), each))
            yield _speed(row, "one at a time", total)
        if (peft := found.get("peft")) is not None:
            yield _speed(row, "peft", sum(batches.values()) * peft["seconds"])
    if sweep is not None and halving is not None:
        yield _speed(halving, "sweep", sweep["seconds"])
        yield _speed(halving, "sweep, training", sweep["training_s"], "training_s")
    rate = "steady_tokens_per_second"
    for many in found.values():
        one = found.get("alone batch 1")
        if many["row"].startswith("packed") and one is not None:
            ratio = round(many[rate] / one[rate], 2)
            yield {"row": many["row"], "over": "one alone, tokens/s", "speed": ratio}


def _speed(row: Row, over: str, seconds: float, key: str = "seconds") -> dict[str, Any]:
    speed = round(seconds / row[key], 2)
    of = {"seconds": row[key], "seconds_of_the_other": round(seconds, 1)}
    return {"row": row["row"], "over": over, "speed": speed, **of}
