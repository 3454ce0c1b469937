"""Adafactor: second moments as an outer product (Shazeer and Stern, 1804.04235)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlora.modules.trained_tensors import feature_axis, rank_axis

_EPS = 1e-30  # added to squared gradients, as in the paper


class FactoredState(NamedTuple):
    """Second moments; of a matrix, their means over each axis.

    Attributes:
        count: Steps done.
        v_features: Means over the rank, K, of matrices, by name.
        v_rank: Means over the features, R, of matrices, by name; 0 beyond the rank.
        v: Second moments of vectors, by name.
    """

    count: Any
    v_features: Any
    v_rank: Any
    v: Any


def adafactor(
    learning_rate: Any, weight_decay: Any, *, clip_threshold: Any, decay_rate: Any
) -> optax.GradientTransformation:
    """Makes Adafactor without momentum, with a given learning rate.

    This is what the Hugging Face trainer takes: every matrix is factored, whatever its
    size, updates are clipped by their root mean square, and the rate is neither
    relative nor scaled by the weights. All means are over the adapter's own rank.

    Args:
        learning_rate: Learning rate.
        weight_decay: Decoupled weight decay.
        clip_threshold: Largest root mean square of an update, at a rate of 1.
        decay_rate: Second moments decay by `1 - step ** -decay_rate`.
    """

    def init(params: Any) -> FactoredState:
        matrices = {n: p for n, p in params.items() if p.ndim == 2}
        vectors = {n: p for n, p in params.items() if p.ndim != 2}
        sizes = {n: (p.shape[feature_axis(n)], p.size) for n, p in matrices.items()}
        return FactoredState(
            count=jnp.zeros([], jnp.int32),
            v_features={n: jnp.zeros(k) for n, (k, _) in sizes.items()},
            v_rank={n: jnp.zeros(size // k) for n, (k, size) in sizes.items()},
            v=jax.tree.map(jnp.zeros_like, vectors),
        )

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        rank = given["rank"]
        decay = 1 - (state.count + 1.0) ** -decay_rate
        out, v_features, v_rank, v = {}, {}, {}, {}
        for name, gradient in updates.items():
            if name in state.v:
                squares = jnp.square(gradient) + _EPS
                v[name] = decay * state.v[name] + (1 - decay) * squares
                whole = v[name]
                size = gradient.size if rank_axis(name) is None else rank
            else:
                axis = feature_axis(name)
                means = _means(gradient, axis, rank)
                before = state.v_features[name], state.v_rank[name]
                v_features[name], v_rank[name] = (
                    decay * old + (1 - decay) * new
                    for old, new in zip(before, means, strict=True)
                )
                whole = _product(v_features[name], v_rank[name], axis, rank)
                size = gradient.shape[axis] * rank
            scaled = gradient * jax.lax.rsqrt(whole)
            rms = jnp.sqrt(jnp.sum(jnp.square(scaled)) / size)
            out[name] = scaled / jnp.maximum(1.0, rms / clip_threshold)
        return out, FactoredState(state.count + 1, v_features, v_rank, v)

    return optax.chain(
        optax.GradientTransformationExtraArgs(init, update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def _means(gradient: jax.Array, axis: int, rank: Any) -> tuple[jax.Array, jax.Array]:
    """Means of the squares over the rank, and over the features of axis `axis`."""
    numbers = jax.lax.broadcasted_iota(jnp.int32, gradient.shape, 1 - axis)
    squares = jnp.where(numbers < rank, jnp.square(gradient) + _EPS, 0.0)
    return jnp.sum(squares, 1 - axis) / rank, jnp.mean(squares, axis)


def _product(features: jax.Array, ranks: jax.Array, axis: int, rank: Any) -> jax.Array:
    """Second moments of a matrix from their means; 1 beyond the rank."""
    factor = ranks / (jnp.sum(ranks) / rank)
    whole = jnp.expand_dims(features, 1 - axis) * jnp.expand_dims(factor, axis)
    return jnp.where(whole > 0, whole, 1.0)
