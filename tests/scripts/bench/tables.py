"""Helpers of the benchmarks' tests."""

import csv
import pathlib

import jax.numpy as jnp

from jaxlora.bench.weights import random_base


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """Reads a benchmark's table."""
    with path.open() as file:
        return list(csv.DictReader(file))


def broken_base(shapes, **options):
    """Makes random weights with NaN in all of them."""
    made = random_base(shapes, **options)
    return {k: v.at[..., 0].set(jnp.nan) for k, v in made.items()}
