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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlora.errors import JaxloraError
from jaxlora.pallas_kernels import MaskWords, dropout_keys, mask_words
from jaxlora.pallas_kernels.mosaic.products import expand_work, outer, run_expand
from jaxlora.pallas_kernels.operands import Blocks, Term, make_blocks
from jaxlora.pallas_kernels.projection import KernelSettings, kernel_settings
from jaxlora.pallas_kernels.triton.launch import measured_device, to_tile
from jaxlora.pallas_kernels.triton.target import Target, present_target
from scripts.bench.kernel_times import device_times
from scripts.bench.report import require_gpu
from scripts.bench.shapes import LARGE, products

SLOTS, BLOCK = 4, 128
RANK, RANKS = 16, (16, 32, 64)
SHAPES = products(LARGE)  # (K, N)
BANDS = (2, 4, 8, 16, 32)
SPLITS = (1, 2, 4, 8, 16)
KERNELS = ("expand", "outer")
TRITON_KERNELS = ("expand", "shrink", "outer", "dual")
BACKENDS_TO_TUNE = {"mosaic": KERNELS, "triton": TRITON_KERNELS}
TILE = "tile"  # what is chosen for a Triton kernel
Entry = dict[str, int]
FIELDS = ("device", "key", "choice", "value", "median_us")


class Problem(NamedTuple):
    """A key of a tuning table, and the choices to time for it."""

    key: str
    choice: str  # what the values are
    values: Sequence[Any]
    calls: Callable[[Any], list[Callable]]  # takes a value; returns functions of arrays
    arrays: tuple[Any, ...]


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


def mosaic_problems(tokens: Sequence[int], kernels: Sequence[str]) -> Iterator[Problem]:
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
        yield Problem(f"expand {t} {k} {n}", "band", BANDS, calls, tuple(arrays))
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
        yield Problem(f"outer {features}", "splits", SPLITS, calls, tuple(arrays))


# ---- the tiles of Triton kernels -----------------------------------------------------


def _entries(
    names: str, *options: tuple[tuple[int, ...], int, Sequence[int]]
) -> list[Entry]:
    """Makes entries of (sizes, num_warps, all num_stages to try)."""
    return [
        dict(zip(names.split(), sizes, strict=True))
        | {"num_warps": num_warps, "num_stages": num_stages}
        for sizes, num_warps, all_stages in options
        for num_stages in all_stages
    ]


CANDIDATES: dict[str, list[Entry]] = {
    "expand": _entries(
        "BM BN BK BAND",
        ((128, 256, 64, 8), 8, (3, 4)),
        ((128, 256, 32, 8), 8, (3, 4)),
        ((128, 128, 64, 8), 8, (3, 4)),
        ((128, 128, 64, 8), 4, (3,)),
        ((128, 128, 32, 8), 4, (3, 4)),
        ((64, 256, 32, 8), 4, (3, 4)),
    ),
    "shrink": _entries(
        "BM BK",
        *(((m, 128), 4, (3, 4)) for m in (16, 32, 64)),
        ((32, 128), 4, (6,)),
        ((16, 256), 4, (4,)),
        ((32, 256), 4, (3, 4)),
        ((32, 256), 8, (4,)),  # more warps for the arithmetic of the mask
    ),
    "outer": _entries(
        "BK",
        ((64,), 4, (5,)),
        ((128,), 4, (3, 4, 5)),
        ((128,), 8, (3, 4)),
        ((256,), 8, (3, 4)),
    ),
    "dual": _entries(
        "BN",
        ((128,), 4, (2, 3, 4, 5)),
        ((128,), 8, (2, 3)),
        ((256,), 4, (2, 3)),
        ((256,), 8, (2, 3, 4)),
    ),
}


class Inputs(NamedTuple):
    """Operands of the kernels in bfloat16, with four equal adapters and dropout."""

    x: jax.Array  # [T, K]
    s: jax.Array  # [T, R]
    w: tuple[jax.Array, jax.Array]  # stored [1, K, N] and [1, N, K]
    a: jax.Array  # [G, K, R]
    a_transposed: jax.Array  # [G, R, K]
    b: tuple[jax.Array, jax.Array]  # stored [G, R, N] and [G, N, R]
    settings: KernelSettings
    words: tuple[MaskWords, MaskWords]  # of the masks of K, and of N features


def _inputs(t: int, k: int, n: int, r: int) -> Inputs:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    key = dropout_keys(jnp.arange(SLOTS), jnp.zeros(SLOTS, jnp.int32), 0, 0)[None]
    one, index = jnp.ones((1, SLOTS)), jnp.arange(t, dtype=jnp.int32)
    (settings,) = kernel_settings(one, jnp.full((1, SLOTS), r, jnp.int32), 0.1 * one)
    words_of = lambda m: mask_words(key, _block_adapter(t), index, m)[0]
    return Inputs(
        x=normal(t, k),
        s=normal(t, r),
        w=(normal(1, k, n), normal(1, n, k)),
        a=normal(SLOTS, k, r),
        a_transposed=normal(SLOTS, r, k),
        b=(normal(SLOTS, r, n), normal(SLOTS, n, r)),
        settings=settings,
        words=(words_of(k), words_of(n)),
    )


def _block_adapter(t: int) -> jax.Array:
    return jnp.repeat(jnp.arange(SLOTS, dtype=jnp.int32), t // BLOCK // SLOTS)


def _calls(kernel: str, tile: Any, target: Target) -> list[Callable[[Inputs], Any]]:
    """Returns functions that call a kernel in each of its roles in a training step."""
    # Triton is optional, and the other back ends are tuned without it.
    from jaxlora.pallas_kernels.triton.dual import dual
    from jaxlora.pallas_kernels.triton.expand import expand
    from jaxlora.pallas_kernels.triton.outer import outer
    from jaxlora.pallas_kernels.triton.shrink import shrink

    options = {"target": target, "tile": tile}

    def blocks(given):
        rows = given.x.shape[0]
        return make_blocks(_block_adapter(rows), SLOTS, rows)

    def product(given, transposed, words=None):
        term = Term(
            x=given.x,
            w=given.w[transposed],
            s=given.s,
            b=given.b[transposed],
            settings=given.settings,
            mask=words,
        )
        return expand(
            [term],
            jnp.zeros(1, jnp.int32),
            blocks(given),
            transposed=transposed,
            rank_last=transposed,
            **options,
        )

    def masked(given, kernel, other, **more):
        shared = [given.settings], [given.words[0]], blocks(given)
        return kernel(given.x, [other], *shared, **more, **options)

    def both(given):
        operands = given.x, given.s, given.a_transposed, given.settings
        return dual(*operands, blocks(given), **options)

    calls: dict[str, list[Callable[[Inputs], Any]]] = {
        "expand": [  # y and dx
            lambda given: product(given, False),
            lambda given: product(given, True, given.words[1]),
        ],
        "shrink": [lambda given: masked(given, shrink, given.a, rank_first=False)],
        "outer": [lambda given: masked(given, outer, given.s)],
        "dual": [both],
    }
    return calls[kernel]


def triton_problems(tokens: Sequence[int], kernels: Sequence[str]) -> Iterator[Problem]:
    """Yields the products that decide tiles, with the candidates.

    Args:
        tokens: Numbers of token rows. The other kernels than expand take the last.
        kernels: Some of `TRITON_KERNELS`.
    """
    for kernel in kernels:
        for key, sizes in _sizes(kernel, tokens):
            yield Problem(
                key=key,
                choice=TILE,
                values=[json.dumps(entry) for entry in CANDIDATES[kernel]],
                calls=lambda value, kernel=kernel: _calls(
                    kernel, to_tile(json.loads(value)), present_target()
                ),
                arrays=(_inputs(*sizes),),
            )


def _sizes(
    kernel: str, tokens: Sequence[int]
) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yields keys of the table, and T, K, N and R of a product that decides them."""
    if kernel == "expand":
        for t in tokens:
            for k, n in SHAPES:
                yield f"expand {t} {k} {n}", (t, k, n, RANKS[0])
        return
    k, n = SHAPES[0]
    for r in RANKS:
        yield f"{kernel} {r}", (tokens[-1], k, n, r)


# ---- timing and writing --------------------------------------------------------------


def tune(problems: Iterable[Problem], repeats: int) -> Iterator[dict]:
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
    if row["choice"] == TILE:
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
    if known is TRITON_KERNELS:
        device = measured_device(present_target())
        problems = triton_problems(args.tokens, kernels)
    else:
        device = jax.devices()[0].device_kind
        problems = mosaic_problems(args.tokens, kernels)
    rows = []
    for row in tune(problems, args.repeats):
        rows.append(row)
        print(*row.values(), flush=True)
    write(args.table, device, rows)
