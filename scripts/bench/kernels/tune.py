"""Measures tile choices of the fused kernels and writes their tuning table.

The shapes are those of a layer that the benchmark `kernels` times. All timings, also of
slower choices, go to a CSV file beside the table. The Mosaic kernels need a Hopper GPU,
the Triton kernels one with compute capability 8.0 or more.

    python -m scripts.bench tune --table pallas_kernels/mosaic/tuning.json
    python -m scripts.bench tune --backend triton \
        --table pallas_kernels/triton/tiles.json

A measured tile counts for GPUs of the same capability and number of multiprocessors.
Run tests/pallas_kernels/test_triton_tiles.py with the new table: it checks that no tile
spills registers.
"""

import argparse
import csv
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxlora.errors import JaxloraError
from jaxlora.pallas_kernels.mosaic.products import expand_work, outer, run_expand
from jaxlora.pallas_kernels.operands import Blocks, Term, make_blocks
from jaxlora.pallas_kernels.projection import KernelSettings, kernel_settings
from jaxlora.pallas_kernels.triton.launch import measured_device
from jaxlora.pallas_kernels.triton.target import present_target
from scripts.bench.kernel_times import device_times
from scripts.bench.kernels import tiles
from scripts.bench.report import require_gpu
from scripts.bench.shapes import LARGE, products

RANK, SLOTS = 16, 4
SHAPES = products(LARGE)  # (K, N)
BANDS = (2, 4, 8, 16, 32)
SPLITS = (1, 2, 4, 8, 16)
KERNELS = ("expand", "outer")
BACKENDS_TO_TUNE = {"mosaic": KERNELS, "triton": tiles.KERNELS}
FIELDS = ("device", "key", "choice", "value", "median_us")


def device_time(f: Callable, *args: jax.Array, repeats: int) -> float:
    """Returns the median device time of a call, in microseconds."""
    return statistics.median(device_times(jax.jit(f), *args, repeats=repeats))


def routing(t: int) -> tuple[Blocks, list[KernelSettings]]:
    """Makes the routing of `t` rows of equal adapters, and the adapters' settings."""
    slots = jnp.repeat(jnp.arange(SLOTS, dtype=jnp.int32), t // 64 // SLOTS)
    scaling, rank = jnp.ones((1, SLOTS)), jnp.full((1, SLOTS), RANK, jnp.int32)
    return make_blocks(slots, SLOTS, t), kernel_settings(scaling, rank, None)


def random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Makes random arrays in bfloat16."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def mosaic_problems(
    tokens: Sequence[int], kernels: Sequence[str]
) -> Iterator[tiles.Problem]:
    """Yields the widths of bands in `expand`, and the numbers of parts in `outer`."""
    sizes = itertools.product(tokens if "expand" in kernels else (), SHAPES)
    for t, (k, n) in sizes:
        (blocks, settings), layer = routing(t), jnp.zeros(1, jnp.int32)

        def product(band, x, w, s, b, blocks=blocks, settings=settings, layer=layer):
            term = Term(x, w, s, b, settings[0])
            options = {"transposed": False, "band": band}
            return run_expand(expand_work([term], layer, blocks, **options))

        arrays = random((t, k), (1, k, n), (t, RANK), (SLOTS, RANK, n))
        calls = lambda band, f=product: [functools.partial(f, band)]
        yield tiles.Problem(f"expand {t} {k} {n}", "band", BANDS, calls, tuple(arrays))
    if "outer" not in kernels:
        return
    t = max(tokens)  # one choice for all T, because sums must not depend on T
    blocks, settings = routing(t)

    def gradient(splits, wide, narrow):
        operands = (wide, [narrow], settings, blocks, [])
        return outer(*operands, transposed=False, splits=splits)

    for features in sorted({n for shape in SHAPES for n in shape}):
        arrays = random((t, features), (t, RANK))
        calls = lambda splits: [functools.partial(gradient, splits)]
        yield tiles.Problem(f"outer {features}", "splits", SPLITS, calls, tuple(arrays))


def tune(problems: Iterable[tiles.Problem], repeats: int) -> Iterator[dict]:
    """Times all choices; yields rows for the tuning table.

    A choice that cannot be compiled, as it needs too much shared memory, is left out.
    """
    for problem in problems:
        for value in problem.values:
            calls, row = problem.calls(value), {"key": problem.key}
            time = functools.partial(device_time, repeats=repeats)
            try:
                times = [time(f, *problem.arrays) for f in calls]
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                print(f"{problem.key}: {value} is left out: {reason}")
                continue
            row |= {"choice": problem.choice, "value": value}
            yield row | {"median_us": round(sum(times), 1)}


def write(table_path: Path, device: str, rows: list[dict]) -> None:
    """Writes the best choices into the table, and all timings into its CSV file.

    Earlier results for other kernels, sizes and devices are kept.

    Args:
        table_path: The table, a JSON file.
        device: Name of the device.
        rows: Timings with the keys of `FIELDS` except for the device.
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
        table.setdefault(device, {})[key] = _entry(best)
    table_path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    with csv_path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(kept)
        writer.writerows({"device": device, **row} for row in rows)


def _entry(row: dict) -> dict:
    """Returns what the table holds for the choice of a row."""
    if row["choice"] == tiles.CHOICE:
        return json.loads(row["value"])
    return {row["choice"]: row["value"]}


def add_options(out: argparse.ArgumentParser) -> None:
    """Adds the options."""
    out.add_argument("--table", type=Path, required=True, help="JSON file to update")
    out.add_argument("--repeats", type=int, default=10)
    out.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    out.add_argument("--backend", choices=BACKENDS_TO_TUNE, default="mosaic")
    out.add_argument(
        "--kernels",
        nargs="+",
        choices=sorted({k for names in BACKENDS_TO_TUNE.values() for k in names}),
        help="by default all of the back end's",
    )


def run(args: argparse.Namespace) -> None:
    """Measures with the given options."""
    require_gpu("tune")
    known = BACKENDS_TO_TUNE[args.backend]
    kernels = args.kernels or known
    if unknown := sorted(set(kernels) - set(known)):
        raise JaxloraError(
            f"--kernels {' '.join(unknown)}: the {args.backend} back end has only "
            f"{', '.join(known)}."
        )
    if known is tiles.KERNELS:
        device = measured_device(present_target())
        problems = tiles.problems(args.tokens, kernels)
    else:
        device = jax.devices()[0].device_kind
        problems = mosaic_problems(args.tokens, kernels)
    rows = []
    for row in tune(problems, args.repeats):
        rows.append(row)
        print(*row.values(), flush=True)
    write(args.table, device, rows)
