"""Helpers of the benchmarks' tests."""

import jax.numpy as jnp

from jaxlora.profile.training import random_base


def broken_base(shapes, *options):
    """Makes random weights with NaN in all of them."""
    made = random_base(shapes, *options)
    return {k: v.at[..., 0].set(jnp.nan) for k, v in made.items()}
