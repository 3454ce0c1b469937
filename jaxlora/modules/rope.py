"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlora.models.config import (
    GrowingRope,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    UnroundedYarnScaling,
    YarnScaling,
)

# Cosine and sine of each token's angles; P pairs of a head's features rotate.
RopeTable = tuple[Float[Array, "T P"], Float[Array, "T P"]]


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position, for each of the pairs of features; float32."""
    rotated = rope.num_rotated(head_dim)
    exponent = np.arange(0, rotated, 2, dtype=np.float32) / rotated
    frequencies = (1.0 / rope.theta**exponent).astype(np.float32)
    match rope.scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor=factor):
            return frequencies / np.float32(factor)
        case Llama3RopeScaling() as scaling:
            return _llama3(frequencies, scaling)
        case LongRopeScaling(factors=factors):
            return frequencies / np.asarray(factors, np.float32)
        case YarnScaling() as scaling:
            return _yarn(frequencies, rope.theta, scaling)
        case ProportionalScaling(share=share):
            turns = np.arange(len(frequencies)) < int(share * rotated // 2)
            return np.where(turns, frequencies, np.float32(0))


def _llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Stretches long waves by `factor`, keeps short ones, and blends those between."""
    waves = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    smooth = scaling.original_max_positions / waves - scaling.low_freq_factor
    smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    stretched = frequencies / scaling.factor
    blended = (1 - smooth) * stretched + smooth * frequencies
    out = np.where(waves > longest, stretched, frequencies)
    between = (waves <= longest) & (waves >= shortest)
    return np.where(between, blended, out).astype(np.float32)


def _yarn(frequencies: np.ndarray, theta: float, scaling: YarnScaling) -> np.ndarray:
    """Stretches waves by their number of turns, along a ramp over the pairs."""
    num, length = len(frequencies), scaling.original_max_positions

    def pair(turns: float) -> float:
        return num * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair(scaling.fast), pair(scaling.slow)
    if not isinstance(scaling, UnroundedYarnScaling):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num - 1)
    width = high - low or 0.001
    pairs = np.arange(num, dtype=np.float32)
    share = np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
    stretched = frequencies / np.float32(scaling.factor)
    return (stretched * share + frequencies * (1 - share)).astype(np.float32)


def query_table(
    table: RopeTable, positions: Int[Array, " T"], rope: GrowingRope
) -> RopeTable:
    """Returns the table of queries that grow with their positions.

    Args:
        table: The table of the keys.
        positions: Position of each row in its own sequence.
        rope: The rotary positions.
    """
    turns = jnp.floor(positions.astype(jnp.float32) / rope.period)
    factors = (1 + rope.growth * jnp.log1p(turns))[:, None]
    return table[0] * factors, table[1] * factors


def rope_table(positions: Int[Array, " T"], rope: Rope, head_dim: int) -> RopeTable:
    """Returns cosine and sine of positions times frequencies."""
    angles = positions.astype(jnp.float32)[:, None] * rope_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, LongRopeScaling | YarnScaling):
        return rope.scaling.magnitude * cos, rope.scaling.magnitude * sin
    return cos, sin


def as_halves(x: Float[Array, "T H E"], pairs: int) -> Float[Array, "T H E"]:
    """Moves neighbours apart, the features 2 i to i and 2 i + 1 to i + P.

    `apply_rope` then rotates them together.

    Args:
        x: Queries or keys.
        pairs: P, the number of pairs that rotate, the first ones.
    """
    rotated, others = x[..., : 2 * pairs], x[..., 2 * pairs :]
    halves = rotated.reshape(*x.shape[:-1], pairs, 2).swapaxes(-1, -2)
    return jnp.concatenate([halves.reshape(rotated.shape), others], axis=-1)


@jax.custom_vjp
def apply_rope(
    x: Float[Array, "T H E"], cos: Float[Array, "T P"], sin: Float[Array, "T P"]
) -> Float[Array, "T H E"]:
    """Rotates feature i with feature i + P; the features after 2 P stay.

    The backward pass rotates back, so it keeps only the table. The table itself gets no
    gradient, because it depends on positions alone.
    """
    return _rotate(x, cos, sin)


def _rotate(x, cos, sin):
    pairs = cos.shape[-1]
    first, second, others = jnp.split(
        x.astype(jnp.float32), [pairs, 2 * pairs], axis=-1
    )
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if others.shape[-1]:
        turned.append(others)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _backward(table, dy):
    cos, sin = table
    return _rotate(dy, cos, -sin), None, None


apply_rope.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), _backward)
