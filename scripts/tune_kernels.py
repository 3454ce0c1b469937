"""Measures tile choices on the present GPU and writes the tuning table.

Every timing goes to a CSV beside the table, also of the choices that lost.

    python scripts/tune_kernels.py --table pallas_kernels/mosaic/tuning.json
"""

import argparse
import csv
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.mosaic.layer import expand, outer
from pallas_kernels.mosaic.routing import blocks_of

RANK, SLOTS = 16, 4
SHAPES = (
    (4096, 4096),
    (4096, 1024),
    (1024, 4096),
    (4096, 14336),
    (14336, 4096),
)
BANDS = (2, 4, 8, 16, 32)
SPLITS = (1, 2, 3, 4, 8)


def device_time(f: Callable, *args: jax.Array, repeats: int) -> float:
    """Median device time of a call, in microseconds."""
    cupti = profiler.Cupti(finalize=False)
    _, times = cupti.measure(jax.jit(f), iterations=repeats)(*args)
    assert times is not None, "CUPTI saw no kernel"
    return 1000 * statistics.median(times)


def operands(t: int, k: int, n: int) -> tuple:
    """x, w, s, b and the routing of four equal adapters."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    make = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    slots = jnp.repeat(jnp.arange(SLOTS, dtype=jnp.int32), t // 64 // SLOTS)
    blocks = blocks_of(slots, jnp.full(SLOTS, RANK, jnp.int32), t)
    x, w = make(next(keys), (t, k)), make(next(keys), (1, k, n))
    s, b = make(next(keys), (t, RANK)), make(next(keys), (SLOTS, RANK, n))
    return x, w, s, b, blocks


def tune(t: int, k: int, n: int, repeats: int) -> list[tuple[str, str, int, float]]:
    """(key of the table, choice, value, microseconds) of everything tried."""
    x, w, s, b, blocks = operands(t, k, n)
    layer = jnp.zeros(1, jnp.int32)
    rows = []
    for band in BANDS:

        def product(x, w, s, b, band=band):
            return expand(
                x, w, layer, s, b, blocks, None, [], transposed=False, band=band
            )

        time = device_time(product, x, w, s, b, repeats=repeats)
        rows.append((f"expand {t} {k} {n}", "band", band, time))
    for splits in SPLITS:

        def gradient(x, s, splits=splits):
            return outer(x, s, blocks, [], transposed=False, splits=splits)

        time = device_time(gradient, x, s, repeats=repeats)
        rows.append((f"outer {t} {k}", "splits", splits, time))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    rows = []
    for t in args.tokens:
        for k, n in SHAPES:
            found = tune(t, k, n, args.repeats)
            rows += found
            for key in dict.fromkeys(row[0] for row in found):
                best = min((row for row in found if row[0] == key), key=lambda r: r[3])
                print(
                    f"{best[0]:26} {best[1]} {best[2]:3} {best[3]:9.1f} us", flush=True
                )
    table = json.loads(args.table.read_text()) if args.table.exists() else {}
    table[device] = {}
    for key in sorted({row[0] for row in rows}):
        _, choice, value, _ = min((r for r in rows if r[0] == key), key=lambda r: r[3])
        table[device][key] = {choice: value}
    args.table.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    timings = args.table.with_suffix(".csv")
    with timings.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("device", "key", "choice", "value", "median_us"))
        writer.writerows((device, *row[:3], round(row[3], 1)) for row in rows)


if __name__ == "__main__":
    main()
