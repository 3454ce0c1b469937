"""Measures tile choices on the present GPU and writes the tuning table.

Every timing, including those of slower choices, goes to a CSV file beside the table.

    python -m scripts.tune_kernels --table pallas_kernels/mosaic/tuning.json
"""

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxlora.pallas_kernels.mosaic.layer import Term, expand, outer
from jaxlora.pallas_kernels.mosaic.routing import Blocks, blocks_of
from jaxlora.pallas_kernels.settings import KernelSettings, kernel_settings
from scripts.bench_report import device_times

RANK, SLOTS = 16, 4
SHAPES = (
    (4096, 4096),
    (4096, 1024),
    (1024, 4096),
    (4096, 14336),
    (14336, 4096),
)
BANDS = (2, 4, 8, 16, 32)
SPLITS = (1, 2, 4, 8, 16)
KERNELS = ("expand", "outer")
FIELDS = ("device", "key", "choice", "value", "median_us")


def device_time(f: Callable, *args: jax.Array, repeats: int) -> float:
    """Median device time of a call, in microseconds."""
    return statistics.median(device_times(jax.jit(f), *args, repeats=repeats))


def routing(t: int) -> tuple[Blocks, list[KernelSettings]]:
    """Rows of four equal adapters, and the adapters' settings."""
    slots = jnp.repeat(jnp.arange(SLOTS, dtype=jnp.int32), t // 64 // SLOTS)
    scaling, rank = jnp.ones((1, SLOTS)), jnp.full((1, SLOTS), RANK, jnp.int32)
    return blocks_of(slots, SLOTS, t), kernel_settings(scaling, rank, None)


def random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Arrays of bfloat16."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def tune_expand(t: int, repeats: int) -> Iterator[dict]:
    """Times bands of the wide product."""
    (blocks, settings), layer = routing(t), jnp.zeros(1, jnp.int32)
    for k, n in SHAPES:
        arrays = random((t, k), (1, k, n), (t, RANK), (SLOTS, RANK, n))
        for band in BANDS:

            def product(x, w, s, b, band=band):
                term = Term(x, w, s, b, settings[0])
                return expand([term], layer, blocks, transposed=False, band=band)

            time = device_time(product, *arrays, repeats=repeats)
            key = f"expand {t} {k} {n}"
            yield {"key": key, "choice": "band", "value": band, "median_us": time}


def tune_outer(t: int, repeats: int) -> Iterator[dict]:
    """Times splits of the gradients' products."""
    blocks, settings = routing(t)
    for features in sorted({n for shape in SHAPES for n in shape}):
        arrays = random((t, features), (t, RANK))
        for splits in SPLITS:

            def gradient(wide, narrow, splits=splits):
                operands = (wide, [narrow], settings, blocks, [])
                return outer(*operands, transposed=False, splits=splits)

            time = device_time(gradient, *arrays, repeats=repeats)
            key = f"outer {features}"
            yield {"key": key, "choice": "splits", "value": splits, "median_us": time}


def tune(tokens: list[int], kernels: list[str], repeats: int) -> Iterator[dict]:
    """Times every choice."""
    for t in tokens if "expand" in kernels else ():
        yield from tune_expand(t, repeats)
    if "outer" in kernels:  # one choice for all T: sums must not depend on it
        yield from tune_outer(max(tokens), repeats)


def write(table_path: Path, device: str, rows: list[dict]) -> None:
    """Puts what was measured into the table, and every timing into the CSV beside it.

    Earlier results for other kernels, sizes and devices are kept.
    """
    table = json.loads(table_path.read_text()) if table_path.exists() else {}
    csv_path, measured = table_path.with_suffix(".csv"), {row["key"] for row in rows}
    kept = []
    if csv_path.exists():
        with csv_path.open(newline="") as file:
            kept = [
                row
                for row in csv.DictReader(file)
                if row["device"] != device or row["key"] not in measured
            ]
    for key in sorted(measured):
        times = (row for row in rows if row["key"] == key)
        best = min(times, key=lambda row: row["median_us"])
        table.setdefault(device, {})[key] = {best["choice"]: best["value"]}
    table_path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    with csv_path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows({"device": device, **row} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    args = parser.parse_args()
    rows = []
    for row in tune(args.tokens, args.kernels, args.repeats):
        row["median_us"] = round(row["median_us"], 1)
        rows.append(row)
        print(*row.values(), flush=True)
    write(args.table, jax.devices()[0].device_kind, rows)


if __name__ == "__main__":
    main()
