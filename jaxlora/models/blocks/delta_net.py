"""The gated delta net, a block of decoder layers in the place of attention."""

import functools
import math
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxlora.models.build import LayerBuilder
from jaxlora.models.config import DeltaShape, ModelConfig
from jaxlora.modules.gated_delta import (
    DeltaCache,
    DeltaInputs,
    DeltaWeights,
    empty_delta_cache,
    gated_norm,
)
from jaxlora.modules.routing import LinearInput, Routing
from jaxlora.modules.rows import Rows
from jaxlora.modules.shared_input import apply_together
from jaxlora.pallas_kernels import LINEAR_RESULTS

_keep_results = jax.checkpoint_policies.save_only_these_names(LINEAR_RESULTS)


class DeltaNet(nnx.Module):
    """Linear attention by the gated delta rule; its linears take LoRA.

    The convolution, the biases of the gates and the norm are frozen.
    """

    def __init__(self, config: ModelConfig, make: LayerBuilder, shape: DeltaShape):
        """Makes the modules.

        Args:
            config: The model.
            make: Makes them.
            shape: Sizes of the rule.
        """
        width, values = config.hidden_size, shape.value_features
        heads = shape.num_value_heads
        read: dict[str, Any] = {"role": "column"}
        # Kernels have no tiles for the few outputs of the gates.
        few: dict[str, Any] = {**read, "in_xla": True}
        name = "linear_attn.{}".format
        mixed = shape.key_features, shape.key_features, values
        common = math.gcd(*mixed)
        sections: dict[str, Any] = {"sections": tuple(x // common for x in mixed)}
        self.in_proj_qkv = make.linear(
            name("in_proj_qkv"), width, shape.mixed_features, **read, **sections
        )
        self.in_proj_z = make.linear(name("in_proj_z"), width, values, **read)
        self.in_proj_b = make.linear(name("in_proj_b"), width, heads, **few)
        self.in_proj_a = make.linear(name("in_proj_a"), width, heads, **few)
        self.conv = make.weight(
            (shape.mixed_features, 1, shape.conv_width),
            name("conv1d.weight"),
            ("N", "1", "W"),
            divided="N",
            **sections,
        )
        self.a_log = make.weight((heads,), name("A_log"), ("H",), divided="H")
        self.dt_bias = make.weight((heads,), name("dt_bias"), ("H",), divided="H")
        self.norm = make.weight((shape.value_dim,), name("norm.weight"), ("E",))
        self.out_proj = make.linear(name("out_proj"), values, width, role="row")
        self.shape, self.eps = shape, config.rms_eps
        self.dtype = make.options.dtype

    @property
    def input_linears(self) -> tuple[()]:
        """None: the linears of the gates read the rows, too, in another back end."""
        return ()

    def __call__(
        self, x: Float[Array, "T D"] | LinearInput, rows: Rows
    ) -> Float[Array, "T D"]:
        mixed, z = apply_together((self.in_proj_qkv, self.in_proj_z), x, rows.routing)
        b, a = self._gates(LinearInput.of(x).x, rows.routing)
        weights = DeltaWeights(self.conv[...][:, 0], self.a_log[...], self.dt_bias[...])
        out = rows.mix(DeltaInputs(mixed, a, b), weights, self.shape)
        out = gated_norm(out, z.reshape(out.shape), self.norm[...], self.eps)
        return self.out_proj(out.reshape(len(out), -1), rows.routing)

    def _gates(
        self, x: Float[Array, "T D"], routing: Routing
    ) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
        """Returns b and a."""

        # Without this, XLA would keep the rows with dropout for the backward pass.
        @functools.partial(jax.checkpoint, policy=_keep_results)
        def run(x):
            return apply_together((self.in_proj_b, self.in_proj_a), x, routing)

        b, a = run(x)
        return b, a

    def empty_cache(self, num_sequences: int, num_tokens: int) -> DeltaCache:
        """Returns the cache of generation before its first tokens.

        Args:
            num_sequences: Number of sequences.
            num_tokens: Tokens of each sequence; the cache has the same size for all.
        """
        del num_tokens
        return empty_delta_cache(self.shape, num_sequences, self.dtype)
