"""Measures how full microbatches are, by the number of steps packed together.

Four jobs with log-normal lengths are packed as the trainer packs them for one device.
Prints a table. With --output-dir, writes scheduler_fill.csv. Any CPU needs less than a
minute.

    jaxlora bench fill --output-dir bench
"""

import argparse
import itertools
import platform
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlora.bench.options import add_output_dir, make_parser
from jaxlora.bench.report import about, dicts_table, write_csv
from jaxlora.bench.scheduler.lengths import in_batches
from jaxlora.scheduler import Limits, PackerName, Pipeline, Sample, lower_bound
from jaxlora.train.plan.next_window import fixed_shape_cost, pack_window

NUM_BATCHES = 64  # global batches of each job
MEAN, SIGMA, SHORTEST, LONGEST = 350, 0.8, 16, 2048  # tokens of a sample
BATCH_SIZES = ((8, 8, 8, 8), (16, 16, 16, 16), (4, 8, 16, 32))
CAPACITIES = (4096, 8192)
WINDOWS: tuple[tuple[int, PackerName], ...] = (
    (1, "greedy"),
    (1, "joint"),
    (4, "joint"),
    (8, "joint"),
)


def samples(batch_sizes: Sequence[int]) -> list[Sample]:
    """Makes all global batches of all jobs, in the order of jobs."""
    out = []
    for job, size in enumerate(batch_sizes):
        rng = np.random.default_rng([0, job])
        center = np.log(MEAN) - SIGMA**2 / 2
        drawn = rng.lognormal(center, SIGMA, NUM_BATCHES * size)
        out += in_batches(job, np.clip(np.rint(drawn), SHORTEST, LONGEST), size)
    return out


def fill(
    given: Sequence[Sample], limits: Limits, steps: int, packer: PackerName
) -> tuple[float, int, int]:
    """Packs all windows.

    Args:
        given: Samples of whole global batches.
        limits: Limits of a microbatch.
        steps: Global batches of each job that a window packs.
        packer: Name of the packer.

    Returns:
        The share of real tokens, the number of microbatches, and a lower bound of it.
    """
    cost = fixed_shape_cost(limits.capacity)
    number = fewest = 0
    for first in range(0, NUM_BATCHES, steps):
        window = [s for s in given if first <= s.batch < first + steps]
        number += len(pack_window(window, limits, packer).microbatches)
        fewest += lower_bound(window, limits, Pipeline(), cost).microbatches
    real = sum(s.num_tokens for s in given)
    return real / (number * limits.capacity), number, fewest


def measure() -> Iterator[dict[str, object]]:
    """Yields a row for each kind of jobs, capacity and window."""
    for sizes, capacity in itertools.product(BATCH_SIZES, CAPACITIES):
        given = samples(sizes)
        limits = Limits(capacity=capacity, block_tokens=64)
        for steps, packer in WINDOWS:
            share, number, fewest = fill(given, limits, steps, packer)
            yield {
                "global_batches": ", ".join(map(str, sizes)),
                "capacity": capacity,
                "window_steps": steps,
                "packer": packer,
                "fill_percent": round(100 * share, 1),
                "microbatches": number,
                "fewest": fewest,
            }


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("fill", __doc__)
    add_output_dir(out)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    rows = list(measure())
    print(dicts_table(rows))
    if args.output_dir:
        end = about(platform.machine()) | {"versions": f"NumPy {np.__version__}"}
        write_csv(args.output_dir / "scheduler_fill.csv", [row | end for row in rows])
