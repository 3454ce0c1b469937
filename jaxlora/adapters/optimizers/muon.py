"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024)."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxlora.modules.trained_tensors import feature_axis


def muon(
    learning_rate: Any,
    weight_decay: Any,
    *,
    momentum: Any,
    rms: Any,
    b1: Any,
    b2: Any,
    eps: Any,
) -> optax.GradientTransformation:
    """Makes Muon for matrices, each of A and B, and AdamW for vectors.

    Five Newton-Schulz steps with the coefficients 3.4445, -4.7750 and 2.0315 (Jordan)
    follow Nesterov's momentum, whose bias optax corrects. An update of a matrix with K
    features and rank r is scaled by `rms sqrt(max(K, r))` (Moonlight, arXiv
    2502.16982, section 2.2), so learning rates are those of AdamW. The products are of
    float32.

    Args:
        learning_rate: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Decay of the first moment.
        rms: Root mean square of an update of full rank, at a learning rate of 1.
        b1: Decay of the first moment of vectors.
        b2: Decay of the second moment of vectors.
        eps: Added to the root of the second moment of vectors.
    """

    def dimensions(params: Any) -> Any:
        return jax.tree.map(lambda _: MuonDimensionNumbers(0, 1), params)

    inner = scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            updates, state = inner.update(updates, state, params)

        def scaled(path: Any, matrix: jax.Array) -> jax.Array:
            features = matrix.shape[feature_axis(path[-1].key)]
            return matrix * (rms * jnp.sqrt(jnp.maximum(features, given["rank"])))

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    matrices = optax.GradientTransformationExtraArgs(inner.init, update)
    kinds: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrices,
        "vector": optax.scale_by_adam(b1, b2, eps),
    }

    def kind(params: Any) -> Any:
        return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)

    return optax.chain(
        optax.partition(kinds, kind),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
