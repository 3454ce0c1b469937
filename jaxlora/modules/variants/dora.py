"""DoRA: trained norms of the columns of W + scaling A B (arXiv 2402.09353).

The norms that the columns have are computed in each pass. The trained ones over these
are gains of the output features, which every back end applies after its kernels; see
`jaxlora.pallas_kernels.dora`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxlora.modules.quantized_kernel import as_dense
from jaxlora.modules.routing import live_scaling
from jaxlora.modules.variants.lora import LORA_A, LORA_B
from jaxlora.modules.variants.variant import (
    Tensors,
    TrainedTensor,
    Variant,
    lora_plus,
)
from jaxlora.pallas_kernels import (
    LINEAR_RESULTS,
    DoraGain,
    QuantizedWeight,
    column_norms,
    dora_gain,
)
from jaxlora.sharding.global_arrays import everywhere
from jaxlora.sharding.tensor import sum_out

_NORMS = "dora_norms"


def _norms_of_weight(kernel: Any, dtype: DTypeLike) -> np.ndarray:
    """Norms of the columns of W, as the magnitudes start."""
    return np.asarray(everywhere(_column_norms(kernel, jnp.dtype(dtype))))


@functools.partial(jax.jit, static_argnums=1)
def _column_norms(kernel: Any, dtype: jnp.dtype) -> jax.Array:
    k, n = kernel.shape
    a, b = jnp.zeros((1, k, 1), dtype), jnp.zeros((1, 1, n), dtype)
    return column_norms(as_dense(kernel, dtype), a, b, jnp.zeros(1))[0]


MAGNITUDE = TrainedTensor(
    name="lora_magnitude_vector",
    peft_name="lora_magnitude_vector",
    dimensions=("N",),
    start=None,
    from_weight=_norms_of_weight,
    rate_ratio=lora_plus,
)


class Dora(Variant):
    """Gains of the output features, after LoRA."""

    setting = "use_dora"
    tensors = (MAGNITUDE,)

    def gain(self, linear: Any, x: Float[Array, "T K"], *, drops: bool) -> DoraGain:
        """The trained norms over those of W + scaling A B, minus 1."""
        norms = linear.constant(_NORMS)
        if norms is None:
            w = linear.weight
            if isinstance(w, QuantizedWeight):
                # It is dequantized beside the product with x. Otherwise XLA could
                # dequantize the weights of many layers in advance.
                w, _ = jax.lax.optimization_barrier(jax.lax.stop_gradient((w, x)))
            norms = checkpoint_name(_norms(linear, w, x.dtype), LINEAR_RESULTS)
        # A slot that gives the base may still hold what an adapter trained.
        is_adapted = linear.table("rank")[:, None] > 0
        magnitude = jnp.where(is_adapted, linear.table(MAGNITUDE.name), 0.0)
        drops = linear.slots.dora_dropout and drops
        return dora_gain(
            magnitude, norms, linear.table("dropout") > 0 if drops else None
        )

    def constants(self, linear: Any, dtype: DTypeLike) -> dict[str, Array]:
        """The norms of W + scaling A B."""
        return {_NORMS: _norms(linear, linear.weight, dtype)}

    def linear_bytes(
        self, slots: Any, in_features: int, out_features: int, copied: int
    ) -> int:
        """Two products of which norms are made, in float32; see `column_norms`."""
        products = 2 * 4 * slots.num_slots * slots.rank
        return out_features * (products + in_features * copied)

    def merged(
        self, w: Float[np.ndarray, "N K"], tensors: Tensors
    ) -> Float[np.ndarray, "N K"]:
        """The columns of W + scaling A B with the trained norms; zeros stay."""
        magnitude, norms = tensors[MAGNITUDE.name], np.linalg.norm(w, axis=1)
        factors = np.where(norms == 0, 1, magnitude / np.where(norms == 0, 1, norms))
        w *= factors[:, None]
        return w


def _norms(
    linear: Any, w: Float[Array, "K N"] | QuantizedWeight, dtype: DTypeLike
) -> Float[Array, "G N"]:
    a, b = linear.table(LORA_A.name), linear.table(LORA_B.name)
    scaling = live_scaling(linear.table("scaling"), linear.table("rank"))
    arrays = as_dense(w, dtype), a, b, scaling
    total = functools.partial(sum_out, num_devices=linear.input_parts)
    return column_norms(*jax.lax.stop_gradient(arrays), total=total)


VARIANT = Dora()
