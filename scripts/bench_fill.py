"""How full the trainer's microbatches are, by the steps that a window packs together.

Four jobs with log-normal lengths, packed as the trainer packs them, for one device.
Writes scheduler_fill.csv and prints it as a table; on any CPU, in under a minute.

    python -m scripts.bench_fill --output-dir bench
"""

import argparse
import itertools
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxlora.scheduler import Limits, PackerName, Pipeline, Sample, lower_bound
from jaxlora.train.lineup import fixed_shape_cost, pack_window
from scripts.bench_report import about, write_csv
from scripts.scheduler_tables import dicts_table
from tests.scheduler.lengths import in_batches

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
    """All global batches of all jobs, the jobs in order."""
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
    """(share of real tokens, microbatches, the fewest there could be) of all windows.

    Args:
        given: Samples of whole global batches.
        limits: Of a microbatch.
        steps: Global batches of each job that a window packs.
        packer: By name.
    """
    cost = fixed_shape_cost(limits.capacity)
    number = fewest = 0
    for first in range(0, NUM_BATCHES, steps):
        window = [s for s in given if first <= s.batch < first + steps]
        number += len(pack_window(window, limits, packer).microbatches)
        fewest += lower_bound(window, limits, Pipeline(), cost).microbatches
    real = sum(s.num_tokens for s in given)
    return real / (number * limits.capacity), number, fewest


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=Path("bench"))
    args = parser.parse_args(argv)
    rows = []
    for sizes, capacity in itertools.product(BATCH_SIZES, CAPACITIES):
        given = samples(sizes)
        limits = Limits(capacity=capacity, block_tokens=64)
        for steps, packer in WINDOWS:
            share, number, fewest = fill(given, limits, steps, packer)
            row = {
                "global_batches": ", ".join(map(str, sizes)),
                "capacity": capacity,
                "window_steps": steps,
                "packer": packer,
                "fill_percent": round(100 * share, 1),
                "microbatches": number,
                "fewest": fewest,
            }
            rows.append(row)
    end = about(platform.machine()) | {"versions": f"NumPy {np.__version__}"}
    write_csv(args.output_dir / "scheduler_fill.csv", [row | end for row in rows])
    print(dicts_table(rows, list(rows[0])))


if __name__ == "__main__":
    main()
